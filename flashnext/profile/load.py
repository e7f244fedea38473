"""From a file to a checked profile: every problem at once, each with file, line, key and reason."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import BaseModel, TypeAdapter, ValidationError

from flashnext import paths
from flashnext.errors import ProfileInvalidError, ProfileNotFoundError, ProfileNotQualifiedError
from flashnext.profile import rules, strict_yaml
from flashnext.profile.schema import NO_SUCH_KEY, Profile
from flashnext.profile.strict_yaml import Document, Problem, Refused, dotted


@dataclass(frozen=True)
class Loaded:
    """A valid profile, where it came from, and where it leaves the qualified set (experimental only)."""

    profile: Profile
    file: Path
    lines: dict[strict_yaml.Path, int]
    deviations: tuple[rules.Deviation, ...] = ()

    def place(self, path: strict_yaml.Path) -> str:
        """``file:line`` of a key, for reasons that are found later than the file's own."""
        line = Document(lines=self.lines).line(path)
        return f"{self.file.name}:{line}" if line else self.file.name


@dataclass(frozen=True)
class Checked:
    """What a file is worth: either a profile or reasons, never neither."""

    loaded: Loaded | None
    problems: tuple[Problem, ...]
    only_unqualified: bool = False


def available() -> list[Path]:
    """The profiles that are shipped, in order of name."""
    return sorted(paths.profiles_dir().glob("*.yaml"))


def find(name: str) -> Path:
    """The file of a shipped profile's name, or of a path (anything with a slash or ending in .yaml)."""
    if "/" in name or name.endswith((".yaml", ".yml")):
        file = Path(name).expanduser()
        if file.is_file():
            return file
        raise ProfileNotFoundError(f"no file {file}")
    known = {file.stem: file for file in available()}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    guess = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known) or 'none'}"
    raise ProfileNotFoundError(f"no profile is called {name!r}", context=[guess])


def load(name: str) -> Loaded:
    """Load by name or path. Raises ProfileInvalidError or ProfileNotQualifiedError with every reason."""
    file = find(name)
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise ProfileNotFoundError(f"cannot read {file}: {error.strerror}") from None
    checked = check(raw, file)
    if checked.loaded is not None:
        return checked.loaded
    kind = ProfileNotQualifiedError if checked.only_unqualified else ProfileInvalidError
    count = len(checked.problems)
    raise kind(
        f"{count} {'problem' if count == 1 else 'problems'} in {file.name}",
        context=[p.render(file.name) for p in checked.problems],
    )


def check(raw: bytes, file: Path) -> Checked:
    """Check a profile's text. Pure but for the name of the file; never raises."""
    doc = strict_yaml.read(raw)
    if doc.data is None:
        return Checked(None, tuple(sorted(set(doc.problems))))
    problems = list(doc.problems)
    sections = _sections(doc, problems)
    problems += [Problem(doc.line(path), dotted(path), text) for path, text in rules.structural(sections)]
    deviations = [] if sections.get("kind") == "demo" else rules.deviations(sections)
    unqualified = (
        [Problem(doc.line(d.path), dotted(d.path), d.text()) for d in deviations]
        if sections.get("kind") == "qualified"
        else []
    )
    if problems or unqualified:
        found = tuple(sorted(set(problems + unqualified)))
        return Checked(None, found, only_unqualified=not problems)
    profile = Profile(**sections)
    return Checked(Loaded(profile, file, doc.lines, tuple(deviations)), ())


@cache
def adapter(key: str) -> TypeAdapter[Any]:
    """The validator of one field of a profile, constraints included."""
    return TypeAdapter(get_type_hints(Profile, include_extras=True)[key])


def _sections(doc: Document, problems: list[Problem]) -> dict[str, Any]:
    """Validate field by field, so that one broken section does not hide what is wrong with another."""
    assert doc.data is not None
    data = doc.data
    result: dict[str, Any] = {}
    for key in data:
        if key not in Profile.model_fields:
            problems.append(Problem(doc.line((key,)), key, _unknown(key, Profile)))
    for key, info in Profile.model_fields.items():
        if key not in data:
            if info.is_required():
                problems.append(Problem(0, key, "missing"))
            else:
                result[key] = info.get_default()
            continue
        try:
            result[key] = adapter(key).validate_python(data[key], strict=True)
        except ValidationError as error:
            problems += _translated(error, key, doc)
    return result


def _translated(error: ValidationError, key: str, doc: Document) -> Iterator[Problem]:
    """Pydantic's findings in our words; values that YAML already refused are not reported twice."""
    seen: set[strict_yaml.Path] = set()
    items = error.errors(include_url=False)
    # `4096 or auto` is found wrong twice: the words that would do belong to the first finding
    words = {
        _real_path((key, *i["loc"]), doc): f" or {i['ctx']['expected']}"
        for i in items
        if i["type"] == "literal_error"
    }
    for item in items:
        if isinstance(item["input"], Refused):
            continue
        path = _real_path((key, *item["loc"]), doc)
        if path in seen:
            continue
        seen.add(path)
        if item["type"] == "extra_forbidden":
            text = _unknown(str(path[-1]), _model_at(path[:-1]))
        elif item["type"] == "missing":
            text = "missing"
        elif item["type"] == "model_type":
            text = f"should be a mapping, found {_short(item['input'])}"
        else:
            found = "" if isinstance(item["input"], dict | tuple) else f", found {_short(item['input'])}"
            message = item["msg"].replace("Input should be", "should be").replace("dictionary", "mapping")
            also = "" if item["type"] == "literal_error" else words.get(path, "")
            text = f"{message[:1].lower()}{message[1:]}{also}{found}".replace(
                "an instance of", "a mapping like"
            )
        yield Problem(doc.line(path), dotted(path), text)


def _real_path(loc: tuple[Any, ...], doc: Document) -> strict_yaml.Path:
    """Pydantic puts names of union members into a location; keep what the file or the schema knows."""
    path: strict_yaml.Path = ()
    for part in loc:
        model = _model_at(path)
        known = isinstance(part, int) or (model is not None and part in model.model_fields)
        if known or (*path, part) in doc.lines:
            path = (*path, part)
    return path


def _model_at(path: strict_yaml.Path) -> type[BaseModel] | None:
    """The model that describes the mapping at a path, or None where there is none."""
    model: type[BaseModel] | None = Profile
    for part in path:
        if isinstance(part, int):
            continue
        info = model.model_fields.get(part) if model else None
        model = _inner(info.annotation) if info else None
    return model


def _inner(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _inner(argument)
        if found is not None:
            return found
    return None


def _unknown(key: str, model: type[BaseModel] | None) -> str:
    if key.lower().replace("-", "_") in NO_SUCH_KEY:
        return f"no such key: {NO_SUCH_KEY[key.lower().replace('-', '_')]}"
    fields = list(model.model_fields) if model else []
    near = difflib.get_close_matches(key.lower().replace("-", "_"), fields, n=1)
    if near:
        return f"no such key; did you mean `{near[0]}`?"
    elsewhere = [
        f"{name}.{key}"
        for name, info in Profile.model_fields.items()
        if (inner := _inner(info.annotation)) is not None and key in inner.model_fields
    ]
    if elsewhere:
        return f"no such key here; it belongs to `{elsewhere[0]}`"
    return f"no such key; there are: {', '.join(fields)}" if fields else "no such key"


def _short(value: Any) -> str:
    text = (
        repr(value)
        if isinstance(value, str)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )
    return text if len(text) <= 60 else text[:57] + "..."
