"""What a build is made of: the configuration key of its work folder, its build key, its record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from flashnext import __version__
from flashnext.build.pin import Pin
from flashnext.build.series import Feature
from flashnext.build.toolchain import Toolchain
from flashnext.builds import Binary, Build, CompilerStamp, CudaStamp, PinStamp, digest, file_sha256
from flashnext.probe.toolchain import version_text

_KEY_LENGTH = 16


def compiler_identity(found: Toolchain) -> list[object]:
    """The compilers of a build: two that are equal here make the same objects."""
    identity: list[object] = [found.host.identity if found.host else None]
    if found.nvcc is not None:
        cuda_host = found.cuda_host.identity if found.cuda_host else None
        identity += [str(found.nvcc.path.resolve()), found.nvcc.version, cuda_host]
    return identity


def configuration_key(pin: Pin, found: Toolchain, flags: Mapping[str, str], variant: str) -> str:
    """Names the work folder. No source of ours is in it, so that an edit is an incremental build.

    ``variant`` tells apart the full series, a series without some features, and the vanilla tree.
    """
    value = ["work", pin.sha256, found.backend, compiler_identity(found), dict(flags), variant]
    return f"{found.backend}-{digest(value)[:_KEY_LENGTH]}"


def build_key(
    pin: Pin,
    found: Toolchain,
    flags: Mapping[str, str],
    series_hash: str,
    ours: Mapping[str, Path],
    *,
    tests: bool,
) -> str:
    """Names the installed build: every input by content. ``ours`` are our CMake files, by name.

    ``tests`` decides whether the switches are compiled in that make the product fail on purpose.
    """
    files = {name: file_sha256(path) for name, path in ours.items()}
    value = [
        "build",
        __version__,
        pin.sha256,
        series_hash,
        found.backend,
        compiler_identity(found),
        dict(flags),
        files,
        tests,
    ]
    return digest(value)[:_KEY_LENGTH]


def make_record(
    key: str,
    pin: Pin,
    found: Toolchain,
    flags: Mapping[str, str],
    *,
    series_hash: str,
    features: Sequence[Feature],
    without: Sequence[str],
    tests: bool,
    files: Path,
) -> Build:
    """The record of the files in a folder (regular files and links), hashed as they are there."""
    assert found.host is not None
    entries = sorted(files.iterdir())
    cuda = None
    if found.nvcc is not None:
        cuda = CudaStamp(nvcc=str(found.nvcc.path), version=version_text(found.nvcc.version or ()))
    return Build(
        key=key,
        created=datetime.now(UTC),
        flashnext_version=__version__,
        pin=PinStamp(
            name=pin.name, version=pin.version, sha256=pin.sha256, upstream_commit=pin.upstream_commit
        ),
        series_hash=series_hash,
        features={feature.id: feature.sha256 for feature in features},
        without=tuple(without),
        tests=tests,
        backend=found.backend,
        archs=found.archs,
        flags=dict(flags),
        compiler=CompilerStamp(
            path=str(found.host.cxx), kind=found.host.kind, version=version_text(found.host.version)
        ),
        cuda=cuda,
        binaries={
            path.name: Binary(size_bytes=path.stat().st_size, sha256=file_sha256(path))
            for path in entries
            if not path.is_symlink()
        },
        links={path.name: str(path.readlink()) for path in entries if path.is_symlink()},
    )
