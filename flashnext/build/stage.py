"""The series applied: a staged tree of vendored files, whole or not there at all.

Git applies each hooks.patch in a scratch repository that holds only the files it touches. Its exit code
proves nothing (inside another repository it skips every file and exits 0), so each file is compared with the
content computed from the patch, and the finished tree with the manifest computed from both.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from flashnext.build import hunks, locks, tree
from flashnext.build.pin import Pin
from flashnext.build.scratch import Scratch
from flashnext.build.series import Feature
from flashnext.errors import FlashnextError, HunkFailedError, PatchNotVerifiedError


def patched_files(pristine: Path, features: Sequence[Feature]) -> dict[str, bytes]:
    """Apply the hooks of all features in order; returns the new content of every file they touch.

    The pristine tree is only read. Raises HunkFailedError (feature, file, hunk) where a hook does not fit,
    HooksInvalidError for a patch that is no plain edit, PatchNotVerifiedError where git did something else.
    """
    touched: dict[str, bytes] = {}
    for _, edited in apply_each(pristine, features):
        touched |= edited
    return touched


def apply_each(pristine: Path, features: Sequence[Feature]) -> Iterator[tuple[Feature, dict[str, bytes]]]:
    """:func:`patched_files` by step: each feature with hooks, and the files it edits as it leaves them."""
    with tempfile.TemporaryDirectory(prefix="flashnext-apply-") as folder:
        scratch = Scratch.create(Path(folder) / "git", Path(folder) / "work")
        touched: dict[str, bytes] = {}
        for feature in features:
            if feature.hooks_patch is None:
                continue
            patch = hunks.read_hooks(feature.hooks_patch)
            for edit in patch.edits:
                if edit.path not in touched:
                    touched[edit.path] = _bring(pristine, scratch.work, feature, edit)
            edited = _apply(scratch, feature, patch, touched)
            touched |= edited
            yield feature, edited


def _bring(pristine: Path, work: Path, feature: Feature, edit: hunks.FileEdit) -> bytes:
    source = pristine / edit.path
    if not source.is_file() or source.is_symlink():
        raise hunk_failed(feature, edit, edit.hunks[0], "the file is not in the pinned source")
    copy = work / edit.path
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, copy)
    return copy.read_bytes()


def hunk_failed(feature: Feature, edit: hunks.FileEdit, hunk: hunks.Hunk, detail: str) -> HunkFailedError:
    """The error for one hunk that does not fit: feature, patch, file, hunk, reason, next step."""
    return HunkFailedError(
        f"{feature.id}: hunk {hunk.number} of {edit.path} does not fit",
        context=[
            f"patch {feature.folder / 'hooks.patch'}",
            f"file  {edit.path}",
            f"hunk  {hunk.number} of {len(edit.hunks)}: {hunk.head}",
            detail,
        ],
        hint=f"`flashnext patch shell {feature.id}` opens the tree before it: mend it there, then "
        f"`flashnext patch refresh {feature.id}`",
    )


def _apply(
    scratch: Scratch, feature: Feature, patch: hunks.HooksPatch, before: dict[str, bytes]
) -> dict[str, bytes]:
    expected = {}
    for edit in patch.edits:
        try:
            expected[edit.path] = hunks.apply_edit(before[edit.path], edit)
        except hunks.HunkMismatch as error:
            raise hunk_failed(feature, edit, error.hunk, error.detail) from None
    file = patch.file.resolve()
    _check_numstat(scratch, feature, patch)
    done = scratch.git(["apply", "--whitespace=nowarn", file])
    if not done.ok:
        raise _git_refused(feature, patch, done.err)
    found = {path: (scratch.work / path).read_bytes() for path in expected}
    for edit in patch.edits:
        _check_result(feature, edit, before[edit.path], expected[edit.path], found[edit.path])
    return found


def _check_numstat(scratch: Scratch, feature: Feature, patch: hunks.HooksPatch) -> None:
    """Git must see the same files and line counts in the patch as we do."""
    listed = scratch.must(["apply", "--numstat", "-z", patch.file.resolve()])
    seen = {}
    for record in filter(None, listed.split("\0")):
        added, removed, path = record.split("\t", 2)
        seen[path] = (added, removed)
    ours = {edit.path: (str(edit.added), str(edit.removed)) for edit in patch.edits}
    if seen != ours:
        raise PatchNotVerifiedError(
            f"{feature.id}: git reads its hooks.patch differently",
            context=[f"patch {patch.file}", f"git   {seen}", f"we    {ours}"],
        )


def _git_refused(feature: Feature, patch: hunks.HooksPatch, text: str) -> FlashnextError:
    """Git's own refusal of a patch whose contexts we found: name the hunk that starts at git's line."""
    match = re.search(r"error: patch failed: (.+):(\d+)", text)
    for edit in patch.edits:
        for hunk in edit.hunks:
            if match and edit.path == match.group(1) and hunk.old_start == int(match.group(2)):
                return hunk_failed(feature, edit, hunk, f"git: {text.strip().splitlines()[0]}")
    return PatchNotVerifiedError(
        f"{feature.id}: git refuses its hooks.patch",
        context=[f"patch {patch.file}", *text.strip().splitlines()[:5]],
    )


def _check_result(
    feature: Feature, edit: hunks.FileEdit, before: bytes, expected: bytes, found: bytes
) -> None:
    want = hashlib.sha256(expected).hexdigest()
    have = hashlib.sha256(found).hexdigest()
    if want != have:
        raise PatchNotVerifiedError(
            f"{feature.id}: {edit.path} is not what its hooks.patch makes of it",
            context=[f"expected {want}", f"found    {have}"],
        )
    # On the very file that the patch was made from, the result must be the file it was made to.
    if hunks.blob_id(before).startswith(edit.old_blob) and not hunks.blob_id(found).startswith(edit.new_blob):
        raise PatchNotVerifiedError(
            f"{feature.id}: the index line of {edit.path} names another result",
            context=[
                f"patch    {feature.folder / 'hooks.patch'} (edited by hand?)",
                f"expected {edit.new_blob}",
                f"found    {hunks.blob_id(found)}",
            ],
            hint=f"`flashnext patch shell {feature.id}`, `flashnext patch refresh {feature.id}` mends it",
        )


def expected_manifest(pristine: Path, patched: dict[str, bytes]) -> dict[str, str]:
    """The manifest of the staged tree, after checking the pristine one (PristineChangedError)."""
    files = dict(tree.verify_pristine(pristine))
    files |= {path: hashlib.sha256(content).hexdigest() for path, content in patched.items()}
    return files


def stage_tree(pin: Pin, pristine: Path, features: Sequence[Feature], into: Path) -> dict[str, str]:
    """Make ``into`` the pinned tree with the series applied; returns ``{path: sha256}`` of every file.

    ``into`` changes only when the whole series has applied and verified; it then is replaced by a rename.
    Where it is right already, nothing is touched. Files that no hook touches keep their modification time.
    Raises what :func:`patched_files` and ``tree.verify_pristine`` raise.
    """
    patched = patched_files(pristine, features)
    expected = expected_manifest(pristine, patched)
    if into.is_dir() and tree.manifest(into) == expected:
        return expected
    with locks.held(into):
        _put_in_place(pin, pristine, patched, expected, into)
    return expected


def _put_in_place(
    pin: Pin, pristine: Path, patched: dict[str, bytes], expected: dict[str, str], into: Path
) -> None:
    for left in into.parent.glob(f".{into.name}.*"):  # of a run that was killed
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
    temp = Path(tempfile.mkdtemp(dir=into.parent, prefix=f".{into.name}."))
    try:
        shutil.copytree(pristine, temp / "new", symlinks=True)
        for path, content in patched.items():
            (temp / "new" / path).write_bytes(content)
        if tree.manifest(temp / "new") != expected:
            raise PatchNotVerifiedError(
                "the staged tree is not what was computed",
                context=[f"source {pin.name} {pin.version}", f"into {into}"],
            )
        if into.exists():
            into.rename(temp / "old")
        (temp / "new").rename(into)
    finally:
        if (temp / "old").exists() and not into.exists():
            (temp / "old").rename(into)
        shutil.rmtree(temp, ignore_errors=True)
