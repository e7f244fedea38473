"""Locks on the shared cache folders: one writer at a time, and a person is told what is waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from flashnext import console
from flashnext.errors import CacheLockedError, CacheNotWritableError


@contextmanager
def held(target: Path, *, timeout_s: float = 3600.0) -> Iterator[None]:
    """Hold the lock of a cache file or folder: ``.<name>.lock`` beside it, freed by the kernel if we die.

    Raises CacheLockedError when another process still holds it after ``timeout_s`` seconds.
    """
    path = target.parent / f".{target.name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            console.say(f"waiting for another flashnext that works on {target}")
            lock.acquire(timeout=timeout_s)
    except filelock.Timeout:
        raise CacheLockedError(
            f"{target} is in use by another flashnext", context=[f"waited {timeout_s:g} s for {path}"]
        ) from None
    except OSError as error:
        raise CacheNotWritableError("the cache cannot be written", context=[f"{path}: {error}"]) from None
    try:
        yield
    finally:
        lock.release()
