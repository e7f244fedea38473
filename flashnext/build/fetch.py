"""The pinned sdist on disk: from ``--sdist``, from the cache, or from the index that pip uses; verified."""

from __future__ import annotations

import hashlib
from pathlib import Path

from flashnext import console, net, paths
from flashnext.build import index, locks
from flashnext.build.pin import Pin
from flashnext.errors import (
    CacheNotWritableError,
    FetchError,
    NoSpaceError,
    SdistHashMismatchError,
    SdistNotFoundError,
    SdistSizeMismatchError,
)


def cached_path(pin: Pin) -> Path:
    """Where a download of the pin is kept, whether it is there or not."""
    return paths.downloads_dir() / pin.sha256[:16] / pin.filename


def check_sdist(path: Path, pin: Pin) -> None:
    """Compare a file with the pin.

    Raises SdistNotFoundError, SdistSizeMismatchError or SdistHashMismatchError, with expected and found.
    """
    try:
        size_bytes = path.stat().st_size
        if not path.is_file():
            raise SdistNotFoundError("the sdist is not a file", context=[str(path)])
        if size_bytes != pin.size_bytes:
            raise SdistSizeMismatchError(
                "the sdist has not the pinned size",
                context=[str(path), f"expected {pin.size_bytes} bytes", f"found    {size_bytes} bytes"],
            )
        with path.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise SdistNotFoundError("the sdist cannot be read", context=[f"{path}: {error.strerror}"]) from None
    if found != pin.sha256:
        raise SdistHashMismatchError(
            "the sdist is not the pinned one",
            context=[str(path), f"expected sha256 {pin.sha256}", f"found    sha256 {found}"],
        )


def fetch_sdist(pin: Pin, *, sdist: Path | None = None) -> Path:
    """The path of the verified sdist; nothing is downloaded where ``sdist`` or the cache has it.

    Raises a FetchError of the kind that fits; what a failed download leaves is a ``.part`` to be resumed.
    """
    if sdist is not None:
        check_sdist(sdist, pin)
        return sdist
    target = cached_path(pin)
    with locks.held(target):
        if target.exists():
            try:
                check_sdist(target, pin)
                return target
            except FetchError as error:
                console.say(f"the cached sdist is damaged ({error.message}): fetching it again")
                target.unlink()
        return _from_places(pin, target)


def _from_places(pin: Pin, target: Path) -> Path:
    settings = index.ask_pip()
    errors: list[FetchError] = []
    with net.Downloader(settings.access()) as web:
        for place, is_index in index.places(settings):
            try:
                file = index.find(pin, place, web, is_index=is_index)
                local = index.local_file(file)
                if local is not None:
                    check_sdist(local, pin)
                    return local
                _download(web, file, pin, target)
                return target
            except (NoSpaceError, CacheNotWritableError):
                raise  # no other place can help
            except FetchError as error:
                errors.append(error)
    raise index.most_telling(errors, pin)


def _download(web: net.Downloader, file: index.File, pin: Pin, target: Path) -> None:
    console.say(f"fetching {pin.filename} ({pin.size_bytes / 1e6:.0f} MB)")
    with console.progress(bytes_=True) as bar:
        task = bar.add_task(pin.filename, total=pin.size_bytes)
        web.download(
            file.url,
            target,
            size_bytes=pin.size_bytes,
            sha256=pin.sha256,
            at=lambda have: bar.update(task, completed=have),
        )
