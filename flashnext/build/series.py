"""The features: ``patches/series`` and every ``feature.toml``, read into frozen models, with their hashes.

All functions take the patches folder, so that a test (or a person) can use another one.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from flashnext.errors import (
    FeatureInvalidError,
    FeatureRequiredError,
    SeriesInvalidError,
    UnknownFeatureError,
)

FEATURE_FILE = "feature.toml"
HOOKS_FILE = "hooks.patch"
SERIES_FILE = "series"
DEFAULT_HOOK_BUDGET = 40
ID_FORM = r"^[a-z0-9]+(-[a-z0-9]+)*$"
Id = Annotated[str, StringConstraints(pattern=ID_FORM, max_length=40)]
Line = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, pattern=r"^[^\n]+$")]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HookBudget(_Table):
    """How many lines hooks.patch may add to and remove from vendored files, and why."""

    added: Annotated[int, Field(ge=0)] = DEFAULT_HOOK_BUDGET
    removed: Annotated[int, Field(ge=0)] = 0
    reason: str = ""


class Sources(_Table):
    """Our files compiled into an existing upstream target; paths are relative to the feature's folder."""

    target: Line
    files: Annotated[tuple[Line, ...], Field(min_length=1)]


class Program(_Table):
    """An executable or a C++ test of ours: name, files and the targets it links."""

    name: Line
    files: Annotated[tuple[Line, ...], Field(min_length=1)]
    link: tuple[Line, ...] = ()


class FeatureFile(_Table):
    """``feature.toml`` as written."""

    id: Id
    summary: Line
    requires: tuple[Id, ...] = ()
    kill_switch: Line
    hooks: HookBudget = HookBudget()
    sources: tuple[Sources, ...] = ()
    executables: tuple[Program, ...] = ()
    tests: tuple[Program, ...] = ()


class Feature(FeatureFile):
    """A feature as found: what feature.toml says, where it is, and the hash of all its build inputs."""

    folder: Path
    sha256: str

    @property
    def hooks_patch(self) -> Path | None:
        """The patch of the vendored files, or None where the feature edits none."""
        path = self.folder / HOOKS_FILE
        return path if path.is_file() else None

    def listed_files(self) -> list[str]:
        """Every file that feature.toml names, relative to the folder, duplicates kept."""
        groups: Iterable[Sources | Program] = (*self.sources, *self.executables, *self.tests)
        return [name for group in groups for name in group.files]


def input_files(folder: Path) -> Iterator[Path]:
    """The files of a feature that decide what is built: feature.toml, hooks.patch, src/**, tests/**."""
    for name in (FEATURE_FILE, HOOKS_FILE):
        if (folder / name).is_file():
            yield folder / name
    for part in ("src", "tests"):
        yield from sorted(p for p in (folder / part).rglob("*") if p.is_file())


def _hash_files(files: Iterable[tuple[str, Path]]) -> str:
    digest = hashlib.sha256()
    for name, path in files:
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def feature_hash(folder: Path) -> str:
    """sha256 over names and contents of :func:`input_files`."""
    return _hash_files((p.relative_to(folder).as_posix(), p) for p in input_files(folder))


def series_hash(features: Sequence[Feature], cmake_include: Path) -> str:
    """sha256 over the selected features in order and the CMake file that injects them.

    It names the binary's native content: ``build-stamp`` compiles it in, ``serve`` compares it.
    """
    digest = hashlib.sha256()
    for feature in features:
        digest.update(f"{feature.id}\0{feature.sha256}\n".encode())
    if cmake_include.is_file():
        digest.update(cmake_include.read_bytes())
    return digest.hexdigest()


def read_series(patches: Path) -> list[str]:
    """The ids of ``series`` in order; blank lines and ``#`` comments are skipped.

    Raises SeriesInvalidError (file:line) for a bad or a repeated id, or a missing file.
    """
    path = patches / SERIES_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SeriesInvalidError("the series cannot be read", context=[f"{path}: {error}"]) from None
    ids: dict[str, int] = {}
    problems = []
    for number, line in enumerate(lines, 1):
        name = line.split("#", 1)[0].strip()
        if not name:
            continue
        if not re.fullmatch(ID_FORM, name):
            problems.append(f"{path}:{number}: {name!r} is no feature id (lower case, digits, single dashes)")
        elif name in ids:
            problems.append(f"{path}:{number}: {name} is listed already in line {ids[name]}")
        else:
            ids[name] = number
    if problems:
        raise SeriesInvalidError("the series has errors", context=problems)
    return list(ids)


def _line_of(text: str, location: Sequence[int | str]) -> int:
    """The line where a key of a TOML text stands; the nearest table above it where the key is missing."""
    lines = text.splitlines()
    start, at = 0, 1
    for index, step in enumerate(location):
        if isinstance(step, int):
            continue
        nth = location[index + 1] if index + 1 < len(location) and isinstance(location[index + 1], int) else 0
        heads = [i for i in range(len(lines)) if re.match(rf"\s*\[\[?\s*{re.escape(step)}\s*\]?\]", lines[i])]
        if heads:
            start = heads[min(int(nth), len(heads) - 1)]
            at = start + 1
            continue
        for i in range(start, len(lines)):
            if i > start and lines[i].lstrip().startswith("["):
                break
            if re.match(rf'\s*"?{re.escape(step)}"?\s*=', lines[i]):
                return i + 1
    return at


def _near(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _table_keys(location: Sequence[int | str]) -> list[str]:
    """The legal keys of the table in which a location lies."""
    tables: dict[str, type[BaseModel]] = {
        "hooks": HookBudget,
        "sources": Sources,
        "executables": Program,
        "tests": Program,
    }
    names = [step for step in location[:-1] if isinstance(step, str)]
    return list((tables.get(names[0], FeatureFile) if names else FeatureFile).model_fields)


def _problems(path: Path, text: str, error: ValidationError) -> list[str]:
    found = []
    for item in error.errors():
        location = item["loc"]
        where = f"{path}:{_line_of(text, location)}"
        name = ".".join(str(step) for step in location)
        if item["type"] == "extra_forbidden":
            found.append(
                f"{where}: unknown key {name}{_near(str(location[-1]), _table_keys(location))}",
            )
        elif item["type"] == "missing":
            found.append(f"{where}: {name} is missing")
        else:
            found.append(f"{where}: {name}: {item['msg']}")
    return found


def read_toml(path: Path) -> tuple[str, dict[str, Any]]:
    """Text and data of a TOML file. Raises FeatureInvalidError naming file and line."""
    try:
        text = path.read_text(encoding="utf-8")
        return text, tomllib.loads(text)
    except FileNotFoundError:
        raise FeatureInvalidError(
            f"feature {path.parent.name} has no {path.name}", context=[f"expected at {path}"]
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise FeatureInvalidError(f"{path.name} cannot be read", context=[f"{path}: {error}"]) from None
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        where = f"{path}:{line.group(1)}" if line else str(path)
        raise FeatureInvalidError("feature.toml is not valid TOML", context=[f"{where}: {error}"]) from None


def read_feature(folder: Path) -> Feature:
    """One feature folder. Raises FeatureInvalidError with every problem as ``file:line: ...``."""
    path = folder / FEATURE_FILE
    text, data = read_toml(path)
    try:
        parsed = FeatureFile.model_validate(data)
    except ValidationError as error:
        found = _problems(path, text, error)
        raise FeatureInvalidError(f"feature {folder.name} has errors", context=found) from None
    problems = []
    if parsed.id != folder.name:
        problems.append(
            f"{path}:{_line_of(text, ['id'])}: id is {parsed.id!r}, the folder is {folder.name!r}"
        )
    if parsed.id in parsed.requires:
        problems.append(f"{path}:{_line_of(text, ['requires'])}: {parsed.id} requires itself")
    if problems:
        raise FeatureInvalidError(f"feature {folder.name} has errors", context=problems)
    return Feature(
        **{name: getattr(parsed, name) for name in FeatureFile.model_fields},
        folder=folder,
        sha256=feature_hash(folder),
    )


def load_series(patches: Path) -> list[Feature]:
    """Every feature of the series, in order.

    Raises SeriesInvalidError where a listed folder is missing or a feature comes before what it requires,
    FeatureInvalidError where a feature.toml has errors. All problems of a kind are reported at once.
    """
    ids = read_series(patches)
    missing = [name for name in ids if not (patches / name).is_dir()]
    if missing:
        raise SeriesInvalidError(
            "the series lists features that are not there",
            context=[f"{patches / m}: no folder" for m in missing],
        )
    features: list[Feature] = []
    problems: list[str] = []
    for name in ids:
        try:
            features.append(read_feature(patches / name))
        except FeatureInvalidError as error:
            problems.extend(error.context)
    if problems:
        raise FeatureInvalidError("features have errors", context=problems)
    order_problems = requirement_problems(features)
    if order_problems:
        raise SeriesInvalidError("the order of the series is wrong", context=order_problems)
    return features


def requirement_problems(features: Sequence[Feature]) -> list[str]:
    """Requirements that are unknown or not earlier in the series (which also rules out cycles)."""
    position = {feature.id: i for i, feature in enumerate(features)}
    problems = []
    for i, feature in enumerate(features):
        path = feature.folder / FEATURE_FILE
        line = _line_of(path.read_text(encoding="utf-8"), ["requires"])
        for need in feature.requires:
            if need not in position:
                near = _near(need, position)
                problems.append(
                    f"{path}:{line}: {feature.id} requires {need}, which is not in the series{near}"
                )
            elif position[need] > i:
                problems.append(
                    f"{path}:{line}: {feature.id} requires {need}, which comes later in the series"
                )
    return problems


def select(features: Sequence[Feature], *, without: Collection[str] = ()) -> list[Feature]:
    """The series without some features, order kept.

    Raises UnknownFeatureError for an id that is not in the series and FeatureRequiredError where a feature
    that stays requires one that goes.
    """
    known = [feature.id for feature in features]
    unknown = [name for name in without if name not in known]
    if unknown:
        raise UnknownFeatureError(
            f"no such feature: {', '.join(unknown)}",
            context=[f"{name}: not in the series{_near(name, known)}" for name in unknown],
        )
    stay = [feature for feature in features if feature.id not in without]
    broken = [f"{f.id} requires {need}" for f in stay for need in f.requires if need in without]
    if broken:
        raise FeatureRequiredError("a feature that stays needs one that is left out", context=broken)
    return stay


def closure(features: Sequence[Feature], wanted: str) -> list[Feature]:
    """A feature with only what it requires, in the order of the series."""
    by_id = {feature.id: feature for feature in features}
    needed: set[str] = set()
    todo = [wanted]
    while todo:
        name = todo.pop()
        if name not in needed:
            needed.add(name)
            todo.extend(by_id[name].requires)
    return [feature for feature in features if feature.id in needed]
