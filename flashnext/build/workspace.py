"""The work folder of one configuration: its lock, its synced sources, and recovery from a killed run.

Layout of ``<work>/<configuration key>/``: ``staged`` (patched source as it should be), ``tree`` (the same, as
it is compiled), ``patches`` and ``cmake`` (our own source), ``build`` (objects, bin), ``log``,
``presets.cmake``, ``features.cmake``, ``command.txt``. Everything here can be deleted at any time.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from flashnext import console
from flashnext.errors import BuildLockedError

_ORPHAN_WAIT_S = 600.0


@dataclass(frozen=True)
class Workspace:
    """Paths of one work folder."""

    root: Path

    @property
    def tree(self) -> Path:
        return self.root / "tree"

    @property
    def patches(self) -> Path:
        return self.root / "patches"

    @property
    def cmake(self) -> Path:
        return self.root / "cmake"

    @property
    def build(self) -> Path:
        return self.root / "build"

    @property
    def bin(self) -> Path:
        return self.build / "bin"

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def lock(self) -> Path:
        return self.root / ".lock"

    @property
    def presets(self) -> Path:
        return self.root / "presets.cmake"

    @property
    def features_file(self) -> Path:
        return self.root / "features.cmake"

    @property
    def command(self) -> Path:
        return self.root / "command.txt"

    @property
    def ninja_file(self) -> Path:
        return self.build / "build.ninja"

    @property
    def cache_file(self) -> Path:
        return self.build / "CMakeCache.txt"

    @property
    def configured(self) -> Path:
        """Holds the digest of the settings of the last configuration that succeeded."""
        return self.root / ".configured"

    @property
    def compiling(self) -> Path:
        """Exists while ninja runs: one that is found at the start tells that the last run was killed."""
        return self.root / ".compiling"

    @property
    def tested(self) -> Path:
        """Holds the build key for which the features' tests were compiled."""
        return self.root / ".tested"


# --- lock ------------------------------------------------------------------------------------------------


@dataclass
class WorkLock:
    """A held lock. Compilers inherit ``handle``: the folder stays locked until the last of them is gone."""

    handle: int

    def note_session(self, session: int | None) -> None:
        """Remember the session of the compilers, so that a later run can end them if we are killed."""
        me = psutil.Process()
        _write_holder(self.handle, {"pid": me.pid, "started": me.create_time(), "session": session})


@contextmanager
def locked(work: Workspace) -> Iterator[WorkLock]:
    """Hold the work folder. Compilers that a killed run left behind are ended first.

    Raises BuildLockedError with the pid of a live build.
    """
    work.root.mkdir(parents=True, exist_ok=True)
    path = work.lock
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _acquire(handle, path)
        lock = WorkLock(handle)
        lock.note_session(None)
        yield lock
    finally:
        os.close(handle)


def _acquire(handle: int, path: Path) -> None:
    deadline = time.monotonic() + _ORPHAN_WAIT_S
    told = False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
        holder = _read_holder(handle)
        if _is_alive(holder):
            raise BuildLockedError(
                f"another build works in {path.parent}", context=[f"its process is {holder['pid']}"]
            )
        if not told:
            console.say("ending the compilers that an interrupted build left behind")
            told = True
        if isinstance(session := holder.get("session"), int):
            end_session(session, path)
        if time.monotonic() > deadline:
            raise BuildLockedError(f"{path.parent} stays locked", context=[f"by an unknown holder of {path}"])
        time.sleep(0.05)


def _write_holder(handle: int, holder: Mapping[str, object]) -> None:
    # one write, blank-padded: a reader never sees the tail of a longer one
    os.pwrite(handle, json.dumps(holder).ljust(200).encode(), 0)


def _read_holder(handle: int) -> dict[str, object]:
    try:
        data = json.loads(os.pread(handle, 200, 0))
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def _is_alive(holder: Mapping[str, object]) -> bool:
    pid, started = holder.get("pid"), holder.get("started")
    if not isinstance(pid, int) or not isinstance(started, float):
        return False
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def end_session(session: int, lock: Path) -> None:
    """Kill what is left of a session, only processes that hold our lock file (a session id can be reused)."""
    target = lock.resolve()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        try:
            if os.getsid(pid) != session:
                continue
            handles = [handle.readlink() for handle in (entry / "fd").iterdir()]
            if target in handles:
                os.kill(pid, signal.SIGKILL)
        except OSError:
            continue


# --- sources ---------------------------------------------------------------------------------------------


def sync(source: Mapping[str, Path], into: Path) -> int:
    """Make a folder hold exactly these files (name -> where its content is); returns how many were written.

    Only files whose content or mode differs are rewritten, with the time of now: ninja then rebuilds what
    depends on them, whatever times the originals carry (a wheel's files are years old). Extra files go.
    """
    into.mkdir(parents=True, exist_ok=True)
    for folder, folders, files in os.walk(into, topdown=False):
        here = Path(folder)
        for name in (*files, *(d for d in folders if (here / d).is_symlink())):
            if (here / name).relative_to(into).as_posix() not in source:
                (here / name).unlink()
        if here != into and not any(here.iterdir()):
            here.rmdir()
    written = 0
    for name, origin in source.items():
        target = into / name
        if _same(origin, target):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_symlink() or target.exists():
            target.unlink()
        if origin.is_symlink():
            target.symlink_to(origin.readlink())
        else:
            shutil.copyfile(origin, target)
            shutil.copymode(origin, target)
        written += 1
    return written


def _same(origin: Path, target: Path) -> bool:
    if origin.is_symlink() or target.is_symlink():
        return origin.is_symlink() and target.is_symlink() and origin.readlink() == target.readlink()
    if not target.is_file():
        return False
    a, b = origin.stat(), target.stat()
    return a.st_size == b.st_size and a.st_mode == b.st_mode and origin.read_bytes() == target.read_bytes()


# --- recovery --------------------------------------------------------------------------------------------


def drop_unfinished(work: Workspace) -> int:
    """After a killed run: remove outputs that were being written and that ninja would take for finished.

    ninja cleans up when it is interrupted, not when it is killed: a library cut short by a kill is newer than
    its inputs. Every command that ended is in its log with the time of its start, so an output that is newer
    than the run's begin and has no such entry is not whole. Returns the number of files removed.
    """
    if not work.compiling.exists():
        return 0
    begin = work.compiling.stat().st_mtime_ns
    finished = _ninja_log(work.build / ".ninja_log")
    dropped = 0
    for name in _outputs(work.ninja_file):
        path = work.build / name
        if path.is_symlink() or not path.is_file() or path.stat().st_mtime_ns < begin:
            continue
        if finished.get(name, 0) < begin:
            path.unlink()
            dropped += 1
    return dropped


def _ninja_log(path: Path) -> dict[str, int]:
    """Output -> the time (ns) that ninja recorded for the last command that wrote it and ended."""
    times: dict[str, int] = {}
    if path.exists():
        for line in path.read_text(errors="replace").splitlines():
            cells = line.split("\t")
            if len(cells) == 5 and cells[2].isdigit():
                times[cells[3]] = int(cells[2])
    return times


def _outputs(ninja_file: Path) -> Iterator[str]:
    """Every output that build.ninja names, except those of CMake's own re-run."""
    if not ninja_file.exists():
        return
    for line in ninja_file.read_text(errors="replace").splitlines():
        match = re.match(r"build (.*?[^$]): (\S+)", line)
        if match and match[2] not in ("RERUN_CMAKE", "phony"):
            for name in re.split(r"(?<!\$) ", match[1]):
                if name and name != "|":
                    yield re.sub(r"\$(.)", r"\1", name)
