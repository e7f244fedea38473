"""Carrying the series to another pin, offline: a 3-way merge between the old and the new source.

Both sources and the series on the old one are committed in one scratch repository, so git has every blob it
needs and merges each feature's commit onto the new source. A conflict stops there, with the marked files in
the work folder; the same command goes on from there once the marks are gone.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashnext import artefacts, console, paths
from flashnext.build import edit, hunks, locks, series, stage
from flashnext.build.pin import Pin
from flashnext.build.scratch import Scratch
from flashnext.build.series import Feature
from flashnext.errors import PatchNotVerifiedError, RebaseConflictError

_STATE = "state.json"
_MARKS = (b"<<<<<<< ", b">>>>>>> ")


@dataclass(frozen=True)
class Rebased:
    """A feature's hooks on the new source. ``text`` is None where they need no hooks.patch any more."""

    feature: Feature
    text: str | None
    changed: bool


def work_folder(new_pin: Pin) -> Path:
    """Where the rebase to a pin works, and where its conflicts are mended."""
    return paths.cache_dir() / "rebase" / new_pin.sha256[:16]


class Rebase:
    """One rebase. Its scratch repository outlives the command where there is a conflict."""

    def __init__(self, old_pin: Pin, new_pin: Pin, features: Sequence[Feature]) -> None:
        self.features = [feature for feature in features if feature.hooks_patch is not None]
        self.folder = work_folder(new_pin)
        self.scratch = Scratch(self.folder / "git", self.folder / "work")
        self.inputs = {
            "old": old_pin.sha256,
            "new": new_pin.sha256,
            "features": [[feature.id, feature.sha256] for feature in features],
        }
        self.state: dict[str, Any] = {}

    def run(self, old: Path, new: Path) -> list[Rebased]:
        """The hooks of every feature on the new source, verified there; nothing is written to the patches.

        Raises RebaseConflictError with feature, file and hunk, and HunkFailedError where the series does not
        apply to the old source. Go on by calling it again after the marked files are mended.
        """
        with locks.held(self.folder):
            return self._run(old, new)

    def _run(self, old: Path, new: Path) -> list[Rebased]:
        if not self._resume():
            console.say("committing the old and the new source")
            self._begin(old, new)
        # What is done is what is committed: an interrupted command goes on at the right feature.
        done = int(self.scratch.must(["rev-list", "--count", f"{self.state['onto']}..HEAD"]))
        for number in range(done, len(self.features)):
            if self.scratch.git(["rev-parse", "--verify", "--quiet", "CHERRY_PICK_HEAD"]).ok:
                self._finish_pick(number)
            else:
                self._pick(number)
        result = [self._rebased(number) for number in range(len(self.features))]
        self._verify(new, result)
        shutil.rmtree(self.folder, ignore_errors=True)
        return result

    def _resume(self) -> bool:
        try:
            state = json.loads((self.folder / _STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        if state.get("inputs") != self.inputs:
            return False
        self.state = state
        return True

    def _begin(self, old: Path, new: Path) -> None:
        """Commit the old source with the series on it, and the new source beside it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        Scratch.create(self.scratch.git_dir, self.scratch.work)
        bases = [Scratch(self.scratch.git_dir, tree).commit_all(f"source {tree.name}") for tree in (old, new)]
        self.scratch.must(["checkout", "--quiet", "--force", "--detach", bases[0]])
        picks = []
        for feature, edited in stage.apply_each(old, self.features):
            edit.write_files(self.scratch.work, edited)
            picks.append(self.scratch.commit_all(f"{feature.id}: {feature.summary}"))
        self.scratch.must(["checkout", "--quiet", "--force", "--detach", bases[1]])
        self.state = {"inputs": self.inputs, "picks": picks, "onto": bases[1]}
        artefacts.write_json(self.folder / _STATE, self.state)

    def _pick(self, number: int) -> None:
        pick = self.state["picks"][number]
        done = self.scratch.git(["cherry-pick", "--allow-empty", "--keep-redundant-commits", pick])
        if done.ok:
            return
        unmerged = self._unmerged()
        if not unmerged:
            raise PatchNotVerifiedError(
                f"{self.features[number].id}: git cannot merge it", context=done.err.strip().splitlines()[:5]
            )
        raise self._conflict(number, unmerged)

    def _unmerged(self) -> list[str]:
        listed = self.scratch.must(["diff", "--name-only", "--diff-filter=U", "-z"])
        return [name for name in listed.split("\0") if name]

    def _finish_pick(self, number: int) -> None:
        """Take the mended files of a conflict, unless a mark is left in one."""
        unmerged = self._unmerged()
        work = self.scratch.work
        marked = [
            name
            for name in unmerged
            if (work / name).is_file()
            and any(line.startswith(_MARKS) for line in (work / name).read_bytes().splitlines())
        ]
        if marked:
            raise self._conflict(number, marked)
        self.scratch.must(["add", "--update"])
        self.scratch.must(
            ["commit", "--quiet", "--allow-empty", "--no-verify", "--reuse-message=CHERRY_PICK_HEAD"]
        )

    def _conflict(self, number: int, names: Sequence[str]) -> RebaseConflictError:
        feature = self.features[number]
        assert feature.hooks_patch is not None
        edits = {one.path: one for one in hunks.read_hooks(feature.hooks_patch).edits}
        lines = [f"patch {feature.hooks_patch}"]
        for name in names:
            lines += self._hunks_in_conflict(number, edits.get(name), name)
        done = ", ".join(f.id for f in self.features[:number])
        return RebaseConflictError(
            f"{feature.id} does not carry over to the new source",
            context=[*lines, f"merged before it: {done or 'nothing'}", f"mend  {self.scratch.work}"],
            hint="edit the files named above in that folder until no <<<<<<< mark is left, then run the same "
            "command again: it goes on from there",
        )

    def _hunks_in_conflict(self, number: int, one: hunks.FileEdit | None, name: str) -> list[str]:
        """Which hunks of a file conflict: each alone is merged between the old and the new file."""
        base, ours = (self._content(f"{at}:{name}") for at in (f"{self.state['picks'][number]}~", "HEAD"))
        if one is None or base is None:
            return [f"file  {name}: in conflict"]
        if ours is None:
            return [f"file  {name}: not in the new source (all {len(one.hunks)} hunks)"]
        found = [
            f"file  {name} hunk {hunk.number} of {len(one.hunks)}: {hunk.head} ({_why(ours, one, hunk)})"
            for hunk in one.hunks
            if self._merges_badly(ours, base, hunks.apply_edit(base, one, only=hunk.number))
        ]
        return found or [f"file  {name}: its hunks conflict only together"]

    def _content(self, what: str) -> bytes | None:
        """A committed file's bytes, through a file (a pipe in text mode would change line ends)."""
        listed = self.scratch.git(["rev-parse", "--verify", "--quiet", what])
        if not listed.ok:
            return None
        name = self.scratch.must(["unpack-file", listed.out.strip()]).strip()
        path = self.scratch.work / name
        content = path.read_bytes()
        path.unlink()
        return content

    def _merges_badly(self, ours: bytes, base: bytes, theirs: bytes) -> bool:
        with tempfile.TemporaryDirectory(prefix="flashnext-merge-") as folder:
            files = []
            for name, content in (("ours", ours), ("base", base), ("theirs", theirs)):
                (Path(folder) / name).write_bytes(content)
                files.append(Path(folder) / name)
            return not self.scratch.git(["merge-file", "-p", "-q", *files]).ok

    def _rebased(self, number: int) -> Rebased:
        feature = self.features[number]
        assert feature.hooks_patch is not None
        below = len(self.features) - number
        diff = edit.diff_text(self.scratch, [f"HEAD~{below}", f"HEAD~{below - 1}"])
        if not diff:
            return Rebased(feature, None, changed=True)
        mail = edit.old_mail(feature.hooks_patch) or edit.mail_of(feature, feature.summary)
        old = feature.hooks_patch.read_bytes().decode("utf-8", "replace")
        return Rebased(feature, mail + diff, changed=edit.without_version(old) != mail + diff)

    def _verify(self, new: Path, result: Sequence[Rebased]) -> None:
        """The new patches, applied to the new source as a build would, give the merged files."""
        with tempfile.TemporaryDirectory(prefix="flashnext-rebase-") as folder:
            moved = []
            for one in result:
                if one.text is None:
                    continue
                copy = Path(folder) / one.feature.id
                copy.mkdir()
                (copy / series.HOOKS_FILE).write_text(one.text, encoding="utf-8", newline="")
                moved.append(one.feature.model_copy(update={"folder": copy}))
            for path, content in stage.patched_files(new, moved).items():
                if (self.scratch.work / path).read_bytes() != content:
                    raise PatchNotVerifiedError(
                        "the carried-over patches do not give the merged files", context=[path]
                    )


def _why(ours: bytes, one: hunks.FileEdit, hunk: hunks.Hunk) -> str:
    """Where the new file differs from what a hunk expects."""
    try:
        hunks.apply_edit(ours, one, only=hunk.number)
    except hunks.HunkMismatch as error:
        return error.detail
    return "the lines next to it have changed"


def write(result: Sequence[Rebased], new_pin_file: Path, pin_file: Path) -> list[Path]:
    """Write the new patches, and the new pin over the old one; returns the files that changed."""
    written = []
    for one in result:
        assert one.feature.hooks_patch is not None
        if one.text is None:
            one.feature.hooks_patch.unlink()
        elif one.changed:
            artefacts.write_atomic(one.feature.hooks_patch, one.text)
        else:
            continue
        written.append(one.feature.folder / series.HOOKS_FILE)
    artefacts.write_atomic(pin_file, new_pin_file.read_text(encoding="utf-8"))
    return [*written, pin_file]
