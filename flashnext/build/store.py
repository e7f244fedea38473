"""The folder of installed builds: a build appears by one rename, whole, and is never changed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from flashnext import paths
from flashnext.artefacts import write_json
from flashnext.builds import RECORD_NAME, Build, damage, get_build, list_builds, load_build
from flashnext.errors import BuildDamagedError, InstallFailedError


def installed(key: str) -> Build | None:
    """The installed build of a key when its files are those recorded, byte by byte; None otherwise."""
    build = load_build(paths.builds_dir() / key)
    return build if build is not None and not list(damage(build)) else None


def install(key: str, files: Iterable[Path], record: Callable[[Path], Build]) -> Build:
    """Copy files (and links) into a new build and put it in place of what is there under its key.

    ``record(folder)`` makes the record of the copies. Raises InstallFailedError; then nothing has changed.
    """
    target = paths.builds_dir() / key
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _clear(target)
        temp = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{key}."))
        try:
            return _fill(temp, target, files, record)
        finally:
            shutil.rmtree(temp, ignore_errors=True)
    except OSError as error:
        raise InstallFailedError("the build cannot be installed", context=[f"{target}: {error}"]) from None


def _fill(temp: Path, target: Path, files: Iterable[Path], record: Callable[[Path], Build]) -> Build:
    folder = temp / "bin"
    folder.mkdir()
    for path in files:
        copy = folder / path.name
        if path.is_symlink():
            copy.symlink_to(path.readlink())
        else:
            shutil.copy2(path, copy)
            _flush(copy)
    build = record(folder)
    write_json(temp / RECORD_NAME, build)
    temp.chmod(0o755)
    if target.exists():
        target.rename(temp.with_name(f"{temp.name}.old"))
    temp.rename(target)
    _flush(target.parent)
    _clear(target)
    return build


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _clear(target: Path) -> None:
    """Remove what an interrupted install of this key left, and the build that a new one has replaced."""
    for left in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(left, ignore_errors=True)


def remove(key: str) -> str:
    """Remove an installed build by key or prefix, and return its key. Raises NoSuchBuildError.

    A build whose record cannot be read goes by the whole name of its folder.
    """
    broken = [folder for folder in _unrecorded() if folder.name == key]
    folder = broken[0] if broken else get_build(key).folder
    hidden = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden)
    return folder.name


def verify(keys: Sequence[str]) -> list[Build]:
    """Check builds (all of them for no key) against their records, byte by byte.

    Raises BuildDamagedError with every file that differs, NoSuchBuildError for an unknown key.
    """
    builds = [get_build(key) for key in keys] if keys else list_builds()
    lines = [f"{build.folder}: {line}" for build in builds for line in damage(build)]
    if not keys:
        lines += [f"{folder}: no usable {RECORD_NAME}" for folder in _unrecorded()]
    if lines:
        raise BuildDamagedError("an installed build is not what was built", context=lines)
    return builds


def _unrecorded() -> list[Path]:
    root = paths.builds_dir()
    if not root.is_dir():
        return []
    return sorted(p for p in root.iterdir() if not p.name.startswith(".") and load_build(p) is None)
