"""Installed builds: their record (build.json), listing, choosing one, and checking its files.

A build is a folder ``<builds>/<key>/`` with ``bin/`` and ``build.json``. It appears by one rename and is not
changed afterwards, so whatever is listed here was finished. `flashnext build` writes them, `flashnext serve`
reads them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from flashnext import paths
from flashnext.artefacts import Artefact
from flashnext.errors import NoSuchBuildError

RECORD_NAME = "build.json"
VANILLA_SERIES = "vanilla"
_STAMP = re.compile(r"^flashnext: version (\S+), series (\S+), features (\S*)\s*$", re.MULTILINE)


class Stamp(NamedTuple):
    """What a server of ours says of itself: the package, the series and the features it was built from."""

    version: str
    series: str
    features: tuple[str, ...]


def parse_stamp(text: str) -> Stamp | None:
    """The stamp in what ``llama-server --version`` prints; None where there is none."""
    match = _STAMP.search(text)
    return Stamp(match[1], match[2], tuple(f for f in match[3].split(",") if f)) if match else None


class PinStamp(Artefact):
    """The upstream source of a build."""

    name: str
    version: str
    sha256: str
    upstream_commit: str


class CompilerStamp(Artefact):
    """The C++ compiler of a build."""

    path: str
    kind: str
    version: str


class CudaStamp(Artefact):
    """The CUDA toolkit of a build."""

    nvcc: str
    version: str


class Binary(Artefact):
    """One installed file of ``bin/``."""

    size_bytes: int
    sha256: str


class Build(Artefact):
    """Content of build.json. ``series_hash`` is ``vanilla`` for a build without any feature.

    ``tests``: compiled with the switches that make it fail on purpose. Records that do not say count as such.
    ``imported``: compiled elsewhere (`flashnext build --import`); series and features are those of its stamp.
    """

    key: str
    created: datetime
    flashnext_version: str
    pin: PinStamp
    series_hash: str
    features: dict[str, str]
    without: tuple[str, ...] = ()
    tests: bool = True
    imported: bool = False
    backend: str
    archs: tuple[str, ...]
    flags: dict[str, str]
    compiler: CompilerStamp
    cuda: CudaStamp | None
    binaries: dict[str, Binary]
    links: dict[str, str]

    @property
    def folder(self) -> Path:
        """Where it is installed, under the user's builds folder."""
        return paths.builds_dir() / self.key

    @property
    def bin(self) -> Path:
        return self.folder / "bin"


def load_build(folder: Path) -> Build | None:
    """The record of an installed build, None where there is none or it is not one of ours."""
    try:
        build = Build.model_validate_json((folder / RECORD_NAME).read_bytes())
    except (OSError, ValidationError):
        return None
    return build if build.key == folder.name else None


def list_builds() -> list[Build]:
    """Every installed build, the newest first."""
    root = paths.builds_dir()
    if not root.is_dir():
        return []
    found = (load_build(entry) for entry in root.iterdir() if not entry.name.startswith("."))
    return sorted((b for b in found if b is not None), key=lambda b: b.created, reverse=True)


def find_build(series_hash: str, *, backend: str | None = None) -> Build | None:
    """The newest installed build of this series hash (and backend, where one is named) that looks whole.

    Builds for tests come last: they serve where there is no other one.
    """
    for build in sorted(list_builds(), key=lambda build: build.tests):
        if build.series_hash != series_hash or (backend is not None and build.backend != backend):
            continue
        if not list(damage(build, hashes=False)):
            return build
    return None


def get_build(key: str) -> Build:
    """The installed build of a key or of its unambiguous prefix. Raises NoSuchBuildError."""
    builds = list_builds()
    matches = [b for b in builds if b.key == key] or [b for b in builds if key and b.key.startswith(key)]
    if len(matches) == 1:
        return matches[0]
    what = "no installed build has" if not matches else f"{len(matches)} installed builds share"
    raise NoSuchBuildError(f"{what} the key {key!r}", context=[f"{b.key}  {b.backend}" for b in builds])


def damage(build: Build, *, hashes: bool = True) -> Iterator[str]:
    """What is wrong with an installed build's files, one line each; without ``hashes`` by size alone."""
    for name, expected in sorted(build.binaries.items()):
        path = build.bin / name
        if path.is_symlink() or not path.is_file():
            yield f"bin/{name}: missing"
        elif path.stat().st_size != expected.size_bytes:
            yield f"bin/{name}: {path.stat().st_size} bytes, not {expected.size_bytes}"
        elif hashes and (found := file_sha256(path)) != expected.sha256:
            yield f"bin/{name}: sha256 {found}, not {expected.sha256}"
    for name, target in sorted(build.links.items()):
        path = build.bin / name
        if not path.is_symlink() or path.readlink() != Path(target):
            yield f"bin/{name}: not the link to {target}"
    known = {*build.binaries, *build.links}
    if build.bin.is_dir():
        for path in sorted(build.bin.iterdir()):
            if path.name not in known:
                yield f"bin/{path.name}: not part of the build"


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest(value: object) -> str:
    """Hex sha256 of plain JSON data, independent of the order of keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
