"""Find and check the files of a model: one file or a set of shards, unfinished, joined or cut ones."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from flashnext.artefacts import Artefact
from flashnext.errors import ModelHeaderError
from flashnext.model.gguf_format import MAGIC, align
from flashnext.model.header import Header, TensorEntry, read_header
from flashnext.model.problems import Problem, listed, problem

_SHARD = re.compile(r"^(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$")
# What browsers, curl wrappers, hub clients and torrent clients call a file that is not whole yet.
PARTIAL_SUFFIXES = (".part", ".partial", ".incomplete", ".download", ".crdownload", ".!qB", ".tmp")
# Beside a file of full size: the download is still filling it.
_CONTROL_SUFFIXES = (".aria2", ".st")

State = Literal["present", "missing", "partial", "broken"]


class Shard(Artefact):
    """One file of the set. `tensors` is None where its header could not be read."""

    path: Path
    state: State
    size_bytes: int
    tensors: int | None = None


@dataclass
class FileSet:
    """What was found on disk: headers in shard order, with every problem of the files themselves."""

    path: Path
    headers: list[Header] = field(default_factory=list)
    shards: list[Shard] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    alone: bool = False  # a shard whose siblings cannot be named

    @property
    def main(self) -> Header | None:
        """The header with the metadata: of the single file or of the first shard."""
        return next((h for h in self.headers if (h.integer("split.no") or 0) == 0), None)

    @property
    def complete(self) -> bool:
        return bool(self.shards) and not self.alone and all(shard.state == "present" for shard in self.shards)

    def tensors(self) -> list[tuple[TensorEntry, Header]]:
        return [(entry, header) for header in self.headers for entry in header.tensors]


def open_set(path: Path) -> FileSet:
    """Read the headers of `path` and of the shards that belong to it. Never raises for a bad file."""
    found = FileSet(path)
    try:
        _open(found, path)
    except OSError as error:
        reason = error.strerror or str(error)
        found.problems.append(problem("model-header-broken", f"{path}: cannot be read: {reason}", path))
    return found


def _open(found: FileSet, path: Path) -> None:
    if path.is_dir():
        found.problems.append(_folder(path))
        return
    if path.suffix in PARTIAL_SUFFIXES or path.suffix in _CONTROL_SUFFIXES:
        message = f"{path.name} is an unfinished download"
        found.problems.append(problem("model-partial-download", message, path))
        return
    if not path.exists():
        found.problems.append(_absent(path))
        return
    header = _read(found, path)
    if header is None:
        return
    count = header.integer("split.count") or 0
    if count <= 1:
        found.headers.append(header)
        return
    _open_shards(found, header, count)


def _open_shards(found: FileSet, header: Header, count: int) -> None:
    number = header.integer("split.no") or 0
    path = header.path
    named = _SHARD.match(path.name)
    joined = any(p.id == "model-shards-joined" for p in found.problems)
    if named is None or (int(named["no"]), int(named["count"])) != (number + 1, count):
        found.headers.append(header)
        found.alone = True
        if not joined:
            message = f"{path.name} is shard {number + 1} of {count}, but its name says otherwise"
            found.problems.append(problem("model-shard-name", message, path))
        return
    names = [path.with_name(f"{named['stem']}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
    if number != 0:
        message = f"{path.name} is shard {number + 1} of {count}; the model starts with {names[0].name}"
        found.problems.append(problem("model-not-first-shard", message, path))
    own = found.shards.pop()
    missing: list[str] = []
    for i, name in enumerate(names):
        if name == path:
            found.shards.append(own)
            found.headers.append(header)
        elif name.exists():
            other = _read(found, name)
            if other is not None:
                found.headers.append(other)
                _compare(found, other, i, count)
        else:
            missing.append(_missing_shard(found, name))
    if missing:
        message = f"{len(missing)} of {count} shards missing: {', '.join(missing)}"
        found.problems.append(problem("model-shard-missing", message, path.parent))
    _count_tensors(found)


def _missing_shard(found: FileSet, name: Path) -> str:
    partial = _partial_beside(name) or _unnamed_partial(name.parent)
    state: State = "partial" if partial else "missing"
    found.shards.append(Shard(path=name, state=state, size_bytes=0))
    if partial is None:
        return name.name
    found.problems.append(
        problem("model-partial-download", f"{name.name} is an unfinished download: {partial.name}", partial)
    )
    return f"{name.name} (unfinished: {partial.name})"


def _compare(found: FileSet, header: Header, index: int, count: int) -> None:
    number, total = header.integer("split.no"), header.integer("split.count")
    if (number, total) != (index, count):
        name, expected = header.path.name, f"expected {index + 1} of {count}"
        message = f"{name} says it is shard {_ordinal(number)} of {total}, {expected}"
        found.problems.append(problem("model-shard-mismatch", message, header.path))


def _ordinal(number: int | None) -> str:
    return "unknown" if number is None else str(number + 1)


def _count_tensors(found: FileSet) -> None:
    if not found.complete or found.main is None:
        return
    names = [entry.name for entry, _ in found.tensors()]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        message = f"tensors in two shards: {listed(twice)}"
        found.problems.append(problem("model-shard-mismatch", message, found.path))
    expected = found.main.integer("split.tensors.count")
    if expected is None:
        message = f"{found.main.path.name}: split.tensors.count is missing"
        found.problems.append(problem("model-key-missing", message, found.main.path))
    elif expected != len(names):
        message = f"the shards hold {len(names)} tensors, the first one announces {expected}"
        found.problems.append(problem("model-shard-mismatch", message, found.path))


def _read(found: FileSet, path: Path) -> Header | None:
    """Read one file's header, note the file's own problems, add its Shard."""
    size = path.stat().st_size
    busy = next((c for s in _CONTROL_SUFFIXES if (c := path.with_name(path.name + s)).exists()), None)
    if busy is not None:
        message = f"{path.name} is an unfinished download: {busy.name} is beside it"
        found.problems.append(problem("model-partial-download", message, busy))
    leftover = _partial_beside(path)
    if leftover is not None:
        found.notes.append(f"a partial download lies beside {path.name}: {leftover.name}")
    header: Header | None = None
    state: State = "broken"
    if size == 0:
        found.problems.append(problem("model-file-empty", f"{path.name} is empty", path))
    else:
        try:
            header = read_header(path)
        except ModelHeaderError as error:
            found.problems.append(problem("model-header-broken", error.message, path))
        else:
            state = "partial" if busy else _judge_length(found, header)
    tensors = len(header.tensors) if header else None
    found.shards.append(Shard(path=path, state=state, size_bytes=size, tensors=tensors))
    return header


def _judge_length(found: FileSet, header: Header) -> State:
    path, end = header.path, header.end_bytes
    if header.file_bytes < end:
        message = f"{path.name} is cut: {header.file_bytes:,} of {end:,} bytes"
        found.problems.append(problem("model-truncated", message, path))
        return "broken"
    if header.file_bytes > end and _another_file_follows(header):
        message = f"{path.name} is several GGUF files in one"
        found.problems.append(problem("model-shards-joined", message, path))
        return "broken"
    return "present"


def _another_file_follows(header: Header) -> bool:
    end = header.end_bytes
    with header.path.open("rb") as stream:
        for start in {end, align(end, header.alignment)}:
            stream.seek(start)
            if stream.read(4) == MAGIC:
                return True
    return False


def _partial_beside(path: Path) -> Path | None:
    for suffix in PARTIAL_SUFFIXES:
        for name in (path.name + suffix, path.stem + suffix):
            candidate = path.with_name(name)
            if candidate.exists():
                return candidate
    # hub clients keep unfinished files in a folder of their own, the target's name first
    cache = path.parent / ".cache" / "huggingface" / "download"
    return next(iter(sorted(cache.glob(f"{_glob_escape(path.name)}*.incomplete"))), None)


def _unnamed_partial(folder: Path) -> Path | None:
    """An unfinished file named by a hash: it could be any that is missing."""
    places = (folder, folder / ".cache" / "huggingface" / "download")
    names = (p for place in places for p in sorted(place.glob("*.incomplete")) if ".gguf" not in p.name)
    return next(names, None)


def _glob_escape(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def _absent(path: Path) -> Problem:
    partial = _partial_beside(path)
    if partial is not None:
        message = f"{path.name} is an unfinished download: {partial.name}"
        return problem("model-partial-download", message, partial)
    if path.is_symlink():
        message = f"{path} is a link to {path.readlink()}, which does not exist"
        return problem("model-file-missing", message, path)
    if not path.parent.is_dir():
        return problem("model-file-missing", f"{path}: there is no folder {path.parent}", path)
    near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.gguf")], 1)
    hint = f"did you mean {path.with_name(near[0])}?" if near else None
    return problem("model-file-missing", f"{path} does not exist", path, hint)


def _folder(path: Path) -> Problem:
    files = sorted(path.glob("*.gguf"))
    starts = [p for p in files if (m := _SHARD.match(p.name)) is None or int(m["no"]) == 1]
    hint = f"pass the file: {listed([str(p) for p in starts], 3)}" if starts else None
    partial = sorted(p.name for p in path.iterdir() if p.suffix in PARTIAL_SUFFIXES)
    if not files and partial:
        return problem(
            "model-partial-download", f"{path} holds unfinished downloads: {listed(partial)}", path
        )
    return problem("model-is-folder", f"{path} is a folder", path, hint)
