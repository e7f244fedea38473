"""The rules of a feature folder, checked: ``flashnext patch check``.

Every rule gives problems as ``path[:line]: what is wrong``; all rules run before anything is reported.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from flashnext.build import hunks, series, stage
from flashnext.build.scratch import IDENTITY
from flashnext.build.series import DEFAULT_HOOK_BUDGET, Feature, Program, Sources
from flashnext.errors import FeatureInvalidError, LintFailedError, PatchError, SeriesInvalidError

MAX_CONTEXT = 3
_COMPILED = {".c", ".cc", ".cpp", ".cu"}
_HEADERS = {".h", ".hpp", ".cuh"}
_ALLOWED = {series.FEATURE_FILE, series.HOOKS_FILE, "README.md", "src", "tests"}
_FULL_BLOB = 40
# A function that other object files can see: at the start of a line, a type before it, not static, no member.
_FUNCTION = re.compile(
    r"^(?!static\b|typedef\b|using\b|return\b|else\b|#)[A-Za-z_][\w:<>,*& \"]*[\s*&](\w+)\s*\("
)
_NAMESPACE = re.compile(r"^namespace\b\s*([\w:]*)\s*\{(?!.*\})")
_NOISE = re.compile(
    r'R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'|//[^\n]*|/\*.*?\*/', re.DOTALL
)
_MACRO_LIKE = re.compile(r"^[A-Z][A-Z0-9_]*$")


def check(patches: Path, pristine: Path | None) -> list[Feature]:
    """All rules on a patches folder; returns the series.

    Without a pristine tree the hooks are not tried on it. Raises LintFailedError with every problem.
    """
    problems = list(_orphan_folders(patches))
    features: list[Feature] = []
    for name in _ids(patches, problems):
        try:
            features.append(series.read_feature(patches / name))
        except FeatureInvalidError as error:
            problems += error.context
    problems += series.requirement_problems(features)
    sound = not problems
    for feature in features:
        problems += [
            *_folder(feature),
            *_listed(feature),
            *_unlisted(feature),
            *_names(feature),
            *_symbols(feature),
            *_hooks(feature),
        ]
    problems += [*_shared_names(features), *_lonely_headers(patches, features)]
    if pristine is not None and sound:
        problems += _applies(features, pristine)
    if problems:
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise LintFailedError(f"the patches have {count}", context=problems)
    return features


def _ids(patches: Path, problems: list[str]) -> list[str]:
    try:
        ids = series.read_series(patches)
    except SeriesInvalidError as error:
        problems += error.context
        return []
    problems += [
        f"{patches / name}: listed in the series, but there is no folder"
        for name in ids
        if not (patches / name).is_dir()
    ]
    return [name for name in ids if (patches / name).is_dir()]


def _orphan_folders(patches: Path) -> Iterator[str]:
    try:
        listed = set(series.read_series(patches))
    except SeriesInvalidError:
        return
    for path in sorted(patches.iterdir()):
        if path.is_dir() and path.name not in listed:
            yield f"{path}: a folder that is not in the series"
        elif path.is_file() and path.name not in (series.SERIES_FILE, "README.md"):
            yield f"{path}: not part of any feature"


def _folder(feature: Feature) -> Iterator[str]:
    for path in sorted(feature.folder.iterdir()):
        if path.name not in _ALLOWED:
            yield f"{path}: not part of a feature folder (known: {', '.join(sorted(_ALLOWED))})"
    readme = feature.folder / "README.md"
    if not readme.is_file():
        yield f"{readme}: missing (problem, options, choice, numbers, how to remove it)"
    elif not [ln for ln in readme.read_text(encoding="utf-8").splitlines() if ln.strip() and ln[0] != "#"]:
        yield f"{readme}: has only headings"


def _listed(feature: Feature) -> Iterator[str]:
    """Every file that feature.toml names is there, once, and where its target can compile it."""
    where = feature.folder / series.FEATURE_FILE
    names = feature.listed_files()
    for name in dict.fromkeys(names):
        if PurePosixPath(name).parts[:1] not in (("src",), ("tests",)) or ".." in PurePosixPath(name).parts:
            yield f"{where}: {name} lies neither in src/ nor in tests/"
        elif not (feature.folder / name).is_file():
            yield f"{where}: {name} is listed, but there is no such file"
        on_cuda = any(name in group.files and group.target == "ggml-cuda" for group in feature.sources)
        if name.endswith(".cu") and not on_cuda:
            yield f"{where}: {name}: a .cu file only compiles on target ggml-cuda"
    groups: list[Sources | Program] = [*feature.sources, *feature.executables, *feature.tests]
    for group in groups:
        for name, count in Counter(group.files).items():
            if count > 1:
                yield f"{where}: {name} is listed twice for one target"


def _unlisted(feature: Feature) -> Iterator[str]:
    """Every file of src/ and tests/ is compiled by something, or is a header."""
    names = feature.listed_files()
    for part in ("src", "tests"):
        for path in sorted((feature.folder / part).rglob("*")):
            name = path.relative_to(feature.folder).as_posix()
            if path.suffix in _COMPILED and name not in names:
                yield f"{path}: compiled by nothing: feature.toml does not list it"
            elif part == "src" and path.is_file() and path.suffix not in _COMPILED | _HEADERS:
                yield f"{path}: neither source nor header"


def _names(feature: Feature) -> Iterator[str]:
    for part, prefix in (("src", "fn-"), ("tests", "test-fn-")):
        for path in sorted((feature.folder / part).rglob("*")):
            code = path.suffix in _COMPILED or (path.suffix in _HEADERS and part == "src")
            if code and not path.name.startswith(prefix):
                yield f"{path}: the name must start {prefix}"
    where = feature.folder / series.FEATURE_FILE
    for program, prefix in (
        *((p, "fn-") for p in feature.executables),
        *((p, "test-fn-") for p in feature.tests),
    ):
        if not program.name.startswith(prefix):
            yield f"{where}: the name of {program.name} must start {prefix}"


def _code(text: str) -> list[str]:
    """The lines of a C++ source without comments and literals."""
    return _NOISE.sub(lambda match: "\n" * match.group().count("\n"), text).split("\n")


def _symbols(feature: Feature) -> Iterator[str]:
    """Functions of src/ that the linker can see start ``fn_`` (read by line, so only the plain cases)."""
    for path in sorted((feature.folder / "src").rglob("*")):
        if path.suffix not in _COMPILED | _HEADERS:
            continue
        open_braces: list[bool] = []  # for each: is it an extern "C" block, which hides nothing
        for number, line in enumerate(_code(path.read_text(encoding="utf-8")), 1):
            space = _NAMESPACE.match(line)
            if space and space.group(1) and not space.group(1).startswith("fn"):
                yield f"{path}:{number}: namespace {space.group(1)} must start fn"
            match = _FUNCTION.match(line) if all(open_braces) else None
            name = match.group(1) if match else "fn_"
            if name != "main" and not _MACRO_LIKE.match(name) and not name.startswith("fn_"):
                yield f"{path}:{number}: {name} is visible to the linker: start it fn_, or make it static"
            for brace in re.findall(r"[{}]", line):
                if brace == "{":
                    open_braces.append(re.match(r"extern\s*\{", line) is not None)
                elif open_braces:
                    open_braces.pop()


def _hooks(feature: Feature) -> Iterator[str]:
    budget = feature.hooks
    where = feature.folder / series.FEATURE_FILE
    if (budget.added > DEFAULT_HOOK_BUDGET or budget.removed > 0) and not budget.reason.strip():
        yield f"{where}: a hook budget of +{budget.added} -{budget.removed} needs a reason"
    if feature.hooks_patch is None:
        return
    try:
        patch = hunks.read_hooks(feature.hooks_patch)
    except PatchError as error:
        yield from error.context
        return
    for kind, used, allowed in (
        ("adds", patch.added, budget.added),
        ("removes", patch.removed, budget.removed),
    ):
        if used > allowed:
            yield f"{patch.file}: {kind} {used} lines, its budget in feature.toml is {allowed}"
    yield from _mail_form(feature, patch)
    for edit in patch.edits:
        if min(len(edit.old_blob), len(edit.new_blob)) < _FULL_BLOB:
            yield f"{patch.file}: {edit.path}: the index line is cut short (git diff --full-index)"
        for hunk in edit.hunks:
            if hunk.end_context() > MAX_CONTEXT or hunk.inner_context() > 2 * MAX_CONTEXT:
                yield f"{patch.file}: {edit.path} hunk {hunk.number}: more than {MAX_CONTEXT} context lines"


def _mail_form(feature: Feature, patch: hunks.HooksPatch) -> Iterator[str]:
    sender = "{} <{}>".format(*IDENTITY)
    if patch.headers.get("from") != sender:
        yield f"{patch.file}: needs the header `From: {sender}`"
    if not patch.headers.get("subject", "").startswith(f"[PATCH] {feature.id}: "):
        yield f"{patch.file}: needs the header `Subject: [PATCH] {feature.id}: ...`"
    if not patch.body:
        yield f"{patch.file}: has no reason between the headers and the diff"


def _shared_names(features: Sequence[Feature]) -> Iterator[str]:
    """Every feature's src/ is on one include path, and programs share one folder: names must be unique."""
    owner: dict[str, str] = {}
    for feature in features:
        own = [p.name for p in sorted((feature.folder / "src").rglob("*")) if p.suffix in _HEADERS]
        own += [program.name for program in (*feature.executables, *feature.tests)]
        for name in own:
            if name in owner:
                yield f"{feature.folder}: {name} exists in {owner[name]} already"
            owner.setdefault(name, feature.id)


def _lonely_headers(patches: Path, features: Sequence[Feature]) -> Iterator[str]:
    included: set[str] = set()
    for feature in features:
        for path in series.input_files(feature.folder):
            text = path.read_text(encoding="utf-8", errors="replace")
            included |= {
                name.rsplit("/", 1)[-1] for name in re.findall(r'#\s*include\s+[<"]([^>"]+)[>"]', text)
            }
    for feature in features:
        for path in sorted((feature.folder / "src").rglob("*")):
            if path.suffix in _HEADERS and path.name not in included:
                yield f"{path}: included by nothing under {patches}"


def _applies(features: Sequence[Feature], pristine: Path) -> Iterator[str]:
    """The whole series applies, and each feature with only what it requires."""
    try:
        stage.patched_files(pristine, features)
    except PatchError as error:
        yield _one_line(error, "in the whole series")
    for feature in features:
        chosen = series.closure(features, feature.id)
        if len(chosen) == len(features):
            continue
        try:
            stage.patched_files(pristine, chosen)
        except PatchError as error:
            yield _one_line(error, f"with only {', '.join(f.id for f in chosen)}")


def _one_line(error: PatchError, when: str) -> str:
    return f"{error.message} ({when}): " + "; ".join(" ".join(line.split()) for line in error.context)
