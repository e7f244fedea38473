"""From a verified sdist to a pristine llama.cpp tree: filtered and safe extraction, and its manifest."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from flashnext import artefacts, console, paths
from flashnext.build import locks
from flashnext.build.pin import Pin
from flashnext.errors import (
    CacheNotWritableError,
    FetchError,
    NoSpaceError,
    PristineChangedError,
    SdistUnreadableError,
    SdistUnsafeError,
    SourceMissingError,
)

if sys.version_info >= (3, 11, 4):
    import tarfile
else:  # the Python of Debian 12 extracts without filters
    from backports import tarfile  # type: ignore[no-redef]

# Raised when what is left out of a tree changes: trees of another format are not reused.
FORMAT = 1
_HASH_THREADS = 2
_BLOCK_BYTES = 1 << 20


def _left_out(relative: PurePosixPath) -> bool:
    """Not needed for a build: git's own data (it would stamp a foreign commit) and vocabulary models."""
    return ".git" in relative.parts or (relative.parts[0] == "models" and relative.suffix == ".gguf")


def _source_path(member: tarfile.TarInfo, source_dir: str) -> PurePosixPath | None:
    """Where a member lies below the source folder; None for everything that is not extracted."""
    parts = PurePosixPath(member.name).parts
    inside = PurePosixPath(*parts[1:]) if len(parts) > 1 else PurePosixPath()
    if not inside.is_relative_to(source_dir):
        return None
    relative = inside.relative_to(source_dir)
    if not relative.parts or _left_out(relative):
        return None
    return relative


def extract_source(sdist: Path, source_dir: str, into: Path) -> int:
    """Extract the source folder of an sdist into a new folder; returns the number of files.

    Every member goes through tarfile's ``data`` filter with ``into`` as the root: absolute paths, ``..``,
    links that lead outside and device files raise SdistUnsafeError. The whole archive is judged, not only
    what is kept. The caller gives a folder of its own and throws it away on an error.
    """
    into.mkdir(parents=True)
    count = 0
    try:
        with tarfile.open(sdist, "r:gz") as archive, console.progress() as bar:
            task = bar.add_task("extract", total=None)
            for member in archive:
                if member.name.startswith("/"):  # the filter would only cut the slash off
                    raise SdistUnsafeError("the sdist has an absolute path", context=[member.name])
                tarfile.data_filter(member, str(into))
                relative = _source_path(member, source_dir)
                if relative is None:
                    continue
                moved = member.replace(name=relative.as_posix(), deep=False)
                if moved.islnk():
                    raise SdistUnsafeError(
                        "the sdist has a hard link", context=[f"{member.name} -> {member.linkname}"]
                    )
                archive.extract(moved, into, filter="data")
                count += moved.isfile()
                bar.update(task, completed=count)
    except tarfile.FilterError as error:
        raise SdistUnsafeError("the sdist has an unsafe member", context=[f"{sdist}: {error}"]) from None
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise _extraction_error(error, sdist, into) from None
    if not (into / "CMakeLists.txt").is_file():
        raise SourceMissingError(
            f"the sdist has no {source_dir}", context=[f"{sdist}: no */{source_dir}/CMakeLists.txt"]
        )
    return count


def _extraction_error(error: Exception, sdist: Path, into: Path) -> FetchError:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return NoSpaceError("no space left to unpack the source", context=[f"{into.parent}: {error}"])
    if isinstance(error, OSError) and error.errno is not None:
        return CacheNotWritableError("the source cannot be unpacked", context=[f"{into.parent}: {error}"])
    return SdistUnreadableError("the sdist cannot be unpacked", context=[f"{sdist}: {error}"])


def hash_file(path: Path) -> str:
    """sha256 of a file, of the link's target text for a symbolic link."""
    if path.is_symlink():
        return hashlib.sha256(b"link\0" + os.fsencode(path.readlink())).hexdigest()
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def manifest(tree: Path) -> dict[str, str]:
    """``{relative path: sha256}`` of every file of a tree, sorted; ``.git`` is skipped."""
    names: list[str] = []
    for folder, folders, files in os.walk(tree):
        folders[:] = [d for d in folders if d != ".git"]
        links = [d for d in folders if (Path(folder) / d).is_symlink()]
        names.extend((Path(folder) / n).relative_to(tree).as_posix() for n in (*files, *links) if n != ".git")
    names.sort()
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: hash_file(tree / name), names), strict=True))


def tree_hash(files: Mapping[str, str]) -> str:
    """One sha256 for a whole manifest."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{files[name]}\n".encode())
    return digest.hexdigest()


def _manifest_file(pristine: Path) -> Path:
    return pristine.parent / f"{pristine.name}.json"


def read_manifest(pristine: Path) -> dict[str, str] | None:
    """The manifest written when a pristine tree was extracted; None where there is none."""
    try:
        data = json.loads(_manifest_file(pristine).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    files = data.get("files") if isinstance(data, dict) and data.get("format") == FORMAT else None
    return dict(files) if isinstance(files, dict) else None


def verify_pristine(pristine: Path) -> dict[str, str]:
    """Check a pristine tree against its manifest and return it.

    Raises PristineChangedError with the expected and the found hash and the files that differ.
    """
    expected = read_manifest(pristine)
    if expected is None:
        raise PristineChangedError(
            "the unpacked source has no manifest",
            context=[f"folder {pristine}", f"expected {_manifest_file(pristine)}"],
        )
    found = manifest(pristine)
    if found == expected:
        return found
    changed = sorted(n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n))
    lines = [
        f"{name}: {'not there' if name not in found else 'added' if name not in expected else 'edited'}"
        for name in changed[:10]
    ]
    if len(changed) > 10:
        lines.append(f"and {len(changed) - 10} more")
    raise PristineChangedError(
        "the unpacked source is not the pinned one",
        context=[
            f"folder   {pristine}",
            f"expected {tree_hash(expected)}",
            f"found    {tree_hash(found)}",
            *lines,
        ],
    )


def pristine_path(pin: Pin) -> Path:
    """Where the pristine tree of a pin is cached, whether it is there or not."""
    return paths.cache_dir() / "pristine" / f"{pin.sha256[:16]}-{FORMAT}"


def pristine_tree(pin: Pin, sdist: Callable[[], Path]) -> Path:
    """The verified pristine tree of a pin, extracted on first use.

    ``sdist()`` gives the verified sdist and is called only when the tree is not there yet. The tree appears
    under its name only when it is whole. Nobody may edit it: take a copy (see stage.stage_tree).
    """
    target = pristine_path(pin)
    with locks.held(target):
        if target.is_dir() and read_manifest(target) is not None:
            verify_pristine(target)
            return target
        archive = sdist()
        _clean(target)
        # Unpacked it is about as large as the sdist; its staged copy and the work tree come on top.
        _need_space(target.parent, 4 * pin.size_bytes)
        temp = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
        try:
            extract_source(archive, pin.source_dir, temp / "tree")
            found = manifest(temp / "tree")
            data = {
                "format": FORMAT,
                "sdist_sha256": pin.sha256,
                "tree_sha256": tree_hash(found),
                "files": found,
            }
            artefacts.write_json(_manifest_file(target), data)
            (temp / "tree").rename(target)
        finally:
            shutil.rmtree(temp, ignore_errors=True)
    return target


def _clean(target: Path) -> None:
    """Remove what an interrupted extraction left (we hold the lock, so nobody uses it)."""
    for left in target.parent.glob(f".{target.name}.*"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
    if target.exists():
        shutil.rmtree(target)


def _need_space(folder: Path, need_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < need_bytes:
        raise NoSpaceError(
            "not enough space for the source",
            context=[f"{folder}: {need_bytes / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free"],
        )
