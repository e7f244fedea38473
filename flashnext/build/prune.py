"""Work folders of builds that nobody needs any more: objects of another compiler, backend or set of flags."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from flashnext import paths
from flashnext.build.workspace import Workspace, locked
from flashnext.errors import BuildLockedError


@dataclass(frozen=True)
class Pruned:
    """A removed work folder; ``kept`` says why one was not removed after all."""

    folder: Path
    size_bytes: int
    kept: str = ""


def prune(keep: int = 1) -> list[Pruned]:
    """Remove all work folders but the ``keep`` used last. Installed builds need none of them.

    A folder in which a build is at work stays.
    """
    root = paths.work_dir()
    folders = [entry for entry in root.iterdir() if entry.is_dir()] if root.is_dir() else []
    folders.sort(key=_used, reverse=True)
    return [_remove(folder) for folder in folders[keep:]]


def _used(folder: Path) -> float:
    """Every build writes its holder into the lock."""
    lock = Workspace(folder).lock
    return max(folder.stat().st_mtime, lock.stat().st_mtime if lock.exists() else 0.0)


def _remove(folder: Path) -> Pruned:
    size = _size(folder)
    try:
        with locked(Workspace(folder)):
            shutil.rmtree(folder, ignore_errors=True)
    except BuildLockedError as error:
        return Pruned(folder, size, kept=error.message)
    return Pruned(folder, size)


def _size(folder: Path) -> int:
    """Bytes on disk, links not followed."""
    total = 0
    for here, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(here) / name).lstat().st_blocks * 512
            except OSError:
                continue
    return total
