"""Working on one feature: a new folder, a git checkout to edit its hooks in, and hooks.patch made from it."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashnext import artefacts, console, paths
from flashnext.build import hunks, locks, series, stage
from flashnext.build.pin import Pin
from flashnext.build.scratch import IDENTITY, Scratch
from flashnext.build.series import Feature
from flashnext.errors import (
    FeatureExistsError,
    HooksInvalidError,
    HunkFailedError,
    NoShellTreeError,
    NothingToWriteError,
    PatchError,
    PatchNotVerifiedError,
    ShellTreeOutdatedError,
    UnknownFeatureError,
    UsageError,
)

_BASE = "flashnext-base"
_STATE = "state.json"
_DIFF = (
    "diff",
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--no-renames",
    "-U3",
    "--full-index",
)


@dataclass(frozen=True)
class ShellTree:
    """A checkout with the series below a feature committed (tag ``flashnext-base``) and its hooks on top.

    ``kept`` says that it was there already; ``rejects`` are the files that hold hunks which did not fit.
    """

    tree: Path
    kept: bool = False
    rejects: tuple[str, ...] = ()


def shell_folder(name: str | None) -> Path:
    """Where the checkout of a feature (None: of the whole series) is kept."""
    return paths.cache_dir() / "shell" / (name or "whole-series")


def below(features: Sequence[Feature], name: str | None) -> tuple[list[Feature], Feature | None]:
    """The features before one, and it. Raises UnknownFeatureError."""
    if name is None:
        return list(features), None
    ids = [feature.id for feature in features]
    if name not in ids:
        raise UnknownFeatureError(
            f"no such feature: {name}", context=[f"the series has: {', '.join(ids) or '-'}"]
        )
    at = ids.index(name)
    return list(features[:at]), features[at]


def _base_state(pin: Pin, before: Sequence[Feature]) -> dict[str, object]:
    """What a checkout was made from; it is outdated when this changes."""
    return {"sdist_sha256": pin.sha256, "below": [[f.id, f.sha256] for f in before]}


def _open(folder: Path) -> Scratch:
    return Scratch(folder / "tree" / ".git", folder / "tree")


def open_tree(
    pin: Pin, pristine: Path, features: Sequence[Feature], name: str | None, *, fresh: bool = False
) -> ShellTree:
    """The checkout for a feature, made on first use; one with edits is kept as it is.

    Raises ShellTreeOutdatedError where the pin or the features below it have changed since it was made
    (``fresh`` throws it away), HunkFailedError where a feature below does not apply.
    """
    before, feature = below(features, name)
    folder = shell_folder(name)
    state = _base_state(pin, before)
    if folder.exists() and not fresh:
        _check_state(folder, state)
        return ShellTree(folder / "tree", kept=True)
    console.say(f"making a checkout in {folder / 'tree'}")
    with locks.held(folder):
        return _make_tree(pin, pristine, before, feature, folder)


def _make_tree(
    pin: Pin, pristine: Path, before: Sequence[Feature], feature: Feature | None, folder: Path
) -> ShellTree:
    temp = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        new = temp / "new"
        shutil.copytree(pristine, new / "tree", symlinks=True)
        scratch = _open(new)
        Scratch.create(scratch.git_dir, scratch.work)
        scratch.commit_all(f"{pin.name} {pin.version}, pristine")
        for step, edited in stage.apply_each(pristine, before):
            write_files(scratch.work, edited)
            scratch.commit_all(f"{step.id}: {step.summary}")
        scratch.must(["tag", _BASE])
        rejects = _put_hooks(scratch, pristine, before, feature) if feature else ()
        artefacts.write_json(new / _STATE, _base_state(pin, before))
        if folder.exists():
            folder.rename(temp / "old")
        new.rename(folder)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return ShellTree(folder / "tree", rejects=rejects)


def write_files(work: Path, files: dict[str, bytes]) -> None:
    """Write contents over the files of a tree."""
    for path, content in files.items():
        (work / path).write_bytes(content)


def _put_hooks(
    scratch: Scratch, pristine: Path, before: Sequence[Feature], feature: Feature
) -> tuple[str, ...]:
    """Put a feature's hooks into the work tree; hunks that do not fit become ``.rej`` files (returned)."""
    if feature.hooks_patch is None:
        return ()
    try:
        for step, edited in stage.apply_each(pristine, [*before, feature]):
            if step is feature:
                write_files(scratch.work, edited)
        return ()
    except (HunkFailedError, PatchNotVerifiedError):
        # It is opened to be mended: take every hunk that fits.
        scratch.git(["apply", "--reject", "--whitespace=nowarn", feature.hooks_patch.resolve()])
        others = scratch.must(["ls-files", "--others", "-z"]).split("\0")
        return tuple(sorted(name for name in others if name.endswith(".rej")))


def _check_state(folder: Path, state: dict[str, object]) -> None:
    try:
        found = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if found != state:
        raise ShellTreeOutdatedError(
            "the pin or a feature below has changed since this checkout was made",
            context=[str(folder / "tree")],
        )


@dataclass(frozen=True)
class Refreshed:
    """What a refresh wrote: the patch, its size, and new files of the checkout that are not part of it."""

    patch: Path
    added: int
    removed: int
    changed: bool
    left_out: tuple[str, ...]


def refresh(
    pin: Pin, pristine: Path, features: Sequence[Feature], name: str, *, reason: str | None = None
) -> Refreshed:
    """Write a feature's hooks.patch anew from its checkout; mail header and reason are kept.

    Raises NoShellTreeError, ShellTreeOutdatedError, NothingToWriteError or HooksInvalidError with nothing
    written; and, with the patch written, HunkFailedError where a later feature no longer applies on top.
    """
    before, feature = below(features, name)
    assert feature is not None
    folder = shell_folder(name)
    if not (folder / "tree").is_dir():
        raise NoShellTreeError(f"there is no checkout for {name}", context=[str(folder / "tree")])
    _check_state(folder, _base_state(pin, before))
    scratch = _open(folder)
    text = diff_text(scratch, [_BASE])
    if not text:
        raise NothingToWriteError(f"the checkout for {name} has no edits", context=[str(folder / "tree")])
    target = feature.folder / series.HOOKS_FILE
    old = target.read_bytes().decode("utf-8", "replace") if target.exists() else ""
    mail = mail_of(feature, reason) if reason else old_mail(target)
    if not mail:
        raise UsageError(
            "hooks.patch needs a reason", context=[str(target)], hint="pass it with `--reason TEXT`"
        )
    new = mail + text
    patch = _check_text(new, feature.folder)
    changed = without_version(old) != new
    if changed:
        artefacts.write_atomic(target, new)
    others = scratch.must(["ls-files", "--others", "--exclude-standard", "-z"]).split("\0")
    left_out = tuple(sorted(n for n in others if n and not n.endswith((".rej", ".orig"))))
    written = [series.read_feature(f.folder) for f in features]
    stage.patched_files(pristine, written)
    return Refreshed(target, patch.added, patch.removed, changed, left_out)


def diff_text(scratch: Scratch, what: Sequence[str]) -> str:
    """A diff in the form of hooks.patch. Raises HooksInvalidError where an edited line is not UTF-8."""
    with tempfile.TemporaryDirectory(prefix="flashnext-diff-") as folder:
        # Written by git itself: a pipe in text mode would change line ends.
        file = Path(folder) / "diff"
        scratch.must([*_DIFF, f"--output={file}", *what, "--"])
        try:
            return file.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise HooksInvalidError("an edited line is not UTF-8", context=[str(error)]) from None


def mail_of(feature: Feature, reason: str) -> str:
    """What stands above the diff in a hooks.patch, so that ``git am`` takes it."""
    sender = "{} <{}>".format(*IDENTITY)
    return f"From: {sender}\nSubject: [PATCH] {feature.id}: {feature.summary}\n\n{reason.strip()}\n\n"


def old_mail(patch: Path) -> str:
    """What stands above the diff in an existing hooks.patch; empty where it cannot be kept."""
    try:
        if not hunks.read_hooks(patch).body:
            return ""
    except PatchError:
        return ""
    return patch.read_bytes().decode("utf-8", "replace").split("diff --git ", 1)[0]


def without_version(patch: str) -> str:
    """A hooks.patch without the version that format-patch puts at its end (a diff has none)."""
    return re.sub(r"\n-- ?\n[^\n]*\n*\Z", "\n", patch)


def _check_text(text: str, folder: Path) -> hunks.HooksPatch:
    """Parse what is about to be written, so that a deletion or a mode change is refused before it is."""
    with tempfile.TemporaryDirectory(prefix="flashnext-diff-") as temp:
        file = Path(temp) / folder.name / series.HOOKS_FILE
        file.parent.mkdir()
        file.write_text(text, encoding="utf-8", newline="")
        return hunks.read_hooks(file)


_FEATURE_TOML = """id = "{id}"
summary = {summary}
requires = []
kill_switch = {kill_switch}

[hooks]                 # what hooks.patch may add to and remove from vendored files
added = 40
removed = 0
reason = ""             # needed when added > 40 or removed > 0

# [[sources]]           # our files compiled into an upstream target
# target = "llama"
# files = ["src/fn-{id}.cpp"]
"""
_README = """# {id}

{summary}

## Problem

## Options

## Choice

## Numbers

## How to remove it

Delete this folder and its line in `series`.
"""


def create(patches: Path, name: str, *, summary: str, kill_switch: str) -> Path:
    """A new feature folder at the end of the series; returns it.

    Raises FeatureExistsError, FeatureInvalidError or, for an id of another form, UnknownFeatureError.
    """
    if not re.fullmatch(series.ID_FORM, name):
        raise UnknownFeatureError(f"{name!r} is no feature id", context=["lower case, digits, single dashes"])
    folder = patches / name
    if name in series.read_series(patches) or folder.exists():
        raise FeatureExistsError(f"{name} is there already", context=[str(folder)])
    with tempfile.TemporaryDirectory(dir=patches, prefix=".new-") as temp:
        draft = Path(temp) / name
        draft.mkdir()
        words = {
            "id": name,
            "summary": json.dumps(summary, ensure_ascii=False),
            "kill_switch": json.dumps(kill_switch, ensure_ascii=False),
        }
        (draft / series.FEATURE_FILE).write_text(_FEATURE_TOML.format(**words), encoding="utf-8")
        (draft / "README.md").write_text(_README.format(id=name, summary=summary), encoding="utf-8")
        series.read_feature(draft)
        draft.rename(folder)
    lines = (patches / series.SERIES_FILE).read_text(encoding="utf-8")
    gap = "" if lines.endswith("\n") or not lines else "\n"
    artefacts.write_atomic(patches / series.SERIES_FILE, f"{lines}{gap}{name}\n")
    return folder
