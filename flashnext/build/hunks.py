"""Reading hooks.patch: a mail header and plain edits of existing text files, nothing else.

Git applies the patches (see stage.py). This module tells which hunk is meant, measures hooks for the lint,
and computes a file's expected content on its own, so that git's result is compared with something that is not
git.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PurePosixPath

from flashnext.errors import HooksInvalidError

_HUNK_HEAD = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)$")
_INDEX = re.compile(r"^index ([0-9a-f]{7,64})\.\.([0-9a-f]{7,64})(?: (\d{6}))?$")
_NO_NEWLINE = "\\"


class HunkMismatch(Exception):  # noqa: N818 - not a failure by itself: callers turn it into their own error
    """A hunk that does not fit a file: which one, and the first line where they differ."""

    def __init__(self, hunk: Hunk, detail: str) -> None:
        super().__init__(detail)
        self.hunk = hunk
        self.detail = detail


@dataclass(frozen=True)
class Hunk:
    """One hunk. ``lines`` keep their first character (blank, + or -) and their line end."""

    number: int
    head: str
    old_start: int
    lines: tuple[str, ...]

    @property
    def added(self) -> int:
        return sum(line[0] == "+" for line in self.lines)

    @property
    def removed(self) -> int:
        return sum(line[0] == "-" for line in self.lines)

    def before(self) -> list[str]:
        return [line[1:] for line in self.lines if line[0] != "+"]

    def after(self) -> list[str]:
        return [line[1:] for line in self.lines if line[0] != "-"]

    def end_context(self) -> int:
        """The longer run of context at the ends."""
        kinds = "".join(line[0] for line in self.lines)
        return max(len(kinds) - len(kinds.lstrip(" ")), len(kinds) - len(kinds.rstrip(" ")))

    def inner_context(self) -> int:
        """The longest run of context lines anywhere (git joins hunks, so it may be twice the ends')."""
        runs = [len(list(run)) for kind, run in groupby(self.lines, key=lambda line: line[0]) if kind == " "]
        return max(runs, default=0)


@dataclass(frozen=True)
class FileEdit:
    """The edits of one vendored file; blobs are git's ids of the content before and after."""

    path: str
    old_blob: str
    new_blob: str
    hunks: tuple[Hunk, ...]

    @property
    def added(self) -> int:
        return sum(hunk.added for hunk in self.hunks)

    @property
    def removed(self) -> int:
        return sum(hunk.removed for hunk in self.hunks)


@dataclass(frozen=True)
class HooksPatch:
    """A parsed hooks.patch; ``headers`` are the mail's, with lower-case names."""

    file: Path
    headers: dict[str, str]
    body: str
    edits: tuple[FileEdit, ...]

    @property
    def added(self) -> int:
        return sum(edit.added for edit in self.edits)

    @property
    def removed(self) -> int:
        return sum(edit.removed for edit in self.edits)


def blob_id(content: bytes) -> str:
    """Git's id of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


class _Reader:
    """The lines of a patch with their numbers, for messages with file:line."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            text = file.read_bytes().decode("utf-8", "surrogateescape")
        except OSError as error:
            raise HooksInvalidError("hooks.patch cannot be read", context=[f"{file}: {error}"]) from None
        self.lines = text.split("\n")
        if self.lines[-1] == "":
            self.lines.pop()
        self.at = 0

    def peek(self) -> str | None:
        return self.lines[self.at] if self.at < len(self.lines) else None

    def fail(self, text: str) -> HooksInvalidError:
        name = self.file.parent.name
        return HooksInvalidError(
            f"hooks.patch of {name} is not valid", context=[f"{self.file}:{self.at + 1}: {text}"]
        )


def read_hooks(file: Path) -> HooksPatch:
    """Parse a hooks.patch. Raises HooksInvalidError (file:line) for all that is not a plain text edit."""
    reader = _Reader(file)
    headers, body = _read_mail(reader)
    edits: dict[str, FileEdit] = {}
    while (line := reader.peek()) is not None:
        if line.rstrip() == "--":  # format-patch ends with its version
            break
        if not line.startswith("diff --git "):
            raise reader.fail(f"expected `diff --git`, found {line[:60]!r}")
        edit = _read_file(reader)
        if edit.path in edits:
            raise reader.fail(f"{edit.path} is edited twice")
        edits[edit.path] = edit
    if not edits:
        raise reader.fail("no edit in it: leave hooks.patch away where a feature edits no vendored file")
    return HooksPatch(file, headers, body, tuple(edits.values()))


def _read_mail(reader: _Reader) -> tuple[dict[str, str], str]:
    headers: dict[str, str] = {}
    last = ""
    while (line := reader.peek()) is not None and line and not line.startswith("diff --git "):
        if line[0] in " \t" and last:
            headers[last] += " " + line.strip()
        elif match := re.match(r"([A-Za-z-]+):\s*(.*)$", line):
            last = match.group(1).lower()
            headers[last] = match.group(2)
        elif not line.startswith("From "):
            break
        reader.at += 1
    body = []
    while (line := reader.peek()) is not None and not line.startswith("diff --git "):
        body.append(line)
        reader.at += 1
    text = "\n".join(body).split("\n---\n")[0].strip()
    return headers, text


def _read_file(reader: _Reader) -> FileEdit:
    first = reader.lines[reader.at]
    match = re.fullmatch(r"diff --git a/(\S+) b/(\S+)", first)
    if match is None or match.group(1) != match.group(2):
        raise reader.fail(f"not the edit of one plainly named file: {first!r}")
    path = match.group(1)
    if ".." in PurePosixPath(path).parts or path.startswith("/"):
        raise reader.fail(f"{path} leads out of the tree")
    reader.at += 1
    index = _INDEX.match(reader.peek() or "")
    if index is None:
        raise reader.fail(
            f"expected `index`, found {reader.peek()!r}: hooks only edit text files; new files belong in src/"
        )
    if set(index.group(1)) == {"0"} or set(index.group(2)) == {"0"}:
        raise reader.fail("hooks neither make nor delete files: new files belong in src/")
    reader.at += 1
    for expected in (f"--- a/{path}", f"+++ b/{path}"):
        if (reader.peek() or "").split("\t")[0] != expected:
            raise reader.fail(f"expected {expected!r}, found {reader.peek()!r}")
        reader.at += 1
    found: list[Hunk] = []
    while (reader.peek() or "").startswith("@@ "):
        found.append(_read_hunk(reader, len(found) + 1))
    if not found:
        raise reader.fail(f"no hunk for {path}")
    return FileEdit(path, index.group(1), index.group(2), tuple(found))


def _read_hunk(reader: _Reader, number: int) -> Hunk:
    head = reader.lines[reader.at]
    match = _HUNK_HEAD.match(head)
    if match is None:
        raise reader.fail(f"not a hunk header: {head!r}")
    old, new = (int(match.group(g)) if match.group(g) is not None else 1 for g in (2, 4))
    reader.at += 1
    lines: list[str] = []
    while old > 0 or new > 0:
        line = reader.peek()
        # Mail programs strip the blank of an empty context line; git takes both.
        kind = " " if line == "" else (line or "")[:1]
        if line is None or kind not in (" ", "+", "-", _NO_NEWLINE):
            raise reader.fail(f"hunk {number} ({head}) ends too early")
        if kind == _NO_NEWLINE:
            lines[-1] = lines[-1][:-1]
        else:
            old -= kind != "+"
            new -= kind != "-"
            lines.append((line or " ") + "\n")
        reader.at += 1
    if (reader.peek() or "").startswith(_NO_NEWLINE):
        lines[-1] = lines[-1][:-1]
        reader.at += 1
    if (reader.peek() or "")[:1] in ("+", " ") or (reader.peek() or "").startswith(("- ", "-\t")):
        raise reader.fail(f"hunk {number} ({head}) has more lines than its header says")
    return Hunk(number, head, int(match.group(1)), tuple(lines))


def split_lines(content: bytes) -> list[str]:
    """Lines with their ends, split at newlines only, as git does."""
    text = content.decode("utf-8", "surrogateescape")
    return [part + "\n" for part in text.split("\n")[:-1]] + (
        [text.rsplit("\n", 1)[-1]] if text[-1:] != "\n" and text else []
    )


def _positions(start: int, last: int) -> Iterator[int]:
    """Line indices from the nearest to the farthest, as git looks for a hunk that has moved."""
    start = min(max(start, 0), last)
    yield start
    for distance in range(1, last + 1):
        if start + distance <= last:
            yield start + distance
        if start - distance >= 0:
            yield start - distance


def apply_edit(content: bytes, edit: FileEdit, *, only: int | None = None) -> bytes:
    """The file's content after an edit (or after its hunk number ``only``), computed without git.

    A hunk may have moved, but its context must match exactly. Raises HunkMismatch.
    """
    old = split_lines(content)
    out: list[str] = []
    done = moved = 0
    for hunk in edit.hunks:
        if only is not None and hunk.number != only:
            continue
        before = hunk.before()
        guess = hunk.old_start - (1 if before else 0) + moved
        last = len(old) - len(before)
        places = (p for p in _positions(guess, last) if p >= done and old[p : p + len(before)] == before)
        place = next(places, None) if last >= 0 else None
        if place is None:
            raise HunkMismatch(hunk, _difference(old, hunk, guess))
        moved += place - guess
        out += old[done:place] + hunk.after()
        done = place + len(before)
    return "".join(out + old[done:]).encode("utf-8", "surrogateescape")


def _difference(old: list[str], hunk: Hunk, guess: int) -> str:
    """The first line where the best place in the file differs from what the hunk expects."""
    before = hunk.before()
    if _fits(old, hunk.after(), guess):
        return "its lines are in the file already: it looks applied"
    best = max(
        range(max(guess - 200, 0), max(min(guess + 200, len(old)), 1)),
        key=lambda p: (sum(a == b for a, b in zip(old[p:], before, strict=False)), -abs(p - guess)),
        default=0,
    )
    for i, line in enumerate(before):
        found = old[best + i] if best + i < len(old) else None
        if found != line:
            shown = "the end of the file" if found is None else repr(found.rstrip("\n"))
            return f"line {best + i + 1}: expected {line.rstrip(chr(10))!r}, found {shown}"
    return "its context is not in the file"


def _fits(old: list[str], lines: list[str], guess: int) -> bool:
    return any(
        old[p : p + len(lines)] == lines for p in range(max(guess - 200, 0), min(guess + 200, len(old)))
    )
