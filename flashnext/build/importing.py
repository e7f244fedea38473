"""Binaries that were compiled elsewhere, installed as a build: recorded is what they say of themselves.

Nothing about the source can be checked here. The series comes from the stamp inside the server (never from
this package), what nobody can read is recorded as unknown, and the key is that of the files' own content.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

from flashnext import builds
from flashnext.build import store
from flashnext.builds import Binary, Build, CompilerStamp, PinStamp, Stamp, file_sha256
from flashnext.errors import ImportRefusedError
from flashnext.proc import environment, run

SERVER = "llama-server"
UNKNOWN = "unknown"
_UPSTREAM = re.compile(r"^version: .*\bcommit ([0-9a-f]{7,40})\)", re.MULTILINE)
_COMPILER = re.compile(r"^built with (\S+) (\S+)", re.MULTILINE)


def import_folder(folder: Path, *, vanilla: bool = False) -> Build:
    """Install the programs and shared libraries of ``folder`` (or its ``bin``).

    ``vanilla``: the server is llama.cpp without any feature of ours and must carry no stamp; else it must
    carry one. Raises ImportRefusedError, InstallFailedError.
    """
    folder = folder / "bin" if (folder / "bin" / SERVER).is_file() else folder
    if not (folder / SERVER).is_file():
        raise ImportRefusedError(f"{folder} holds no {SERVER}")
    files = sorted(p for p in folder.iterdir() if p.is_file() or p.is_symlink())
    _check_links(folder, files)
    text = _version(folder / SERVER)
    stamp = builds.parse_stamp(text)
    if stamp is None and not vanilla:
        raise ImportRefusedError(
            f"{folder / SERVER} carries no stamp of flashnext",
            context=[line for line in text.splitlines() if line.strip()][-3:],
            hint="a llama.cpp without any feature of flashnext is imported with --vanilla",
        )
    if stamp is not None and vanilla:
        raise ImportRefusedError(
            f"{folder / SERVER} is not vanilla",
            context=[f"its stamp: series {stamp.series[:12]}, features {', '.join(stamp.features)}"],
            hint="import it without --vanilla",
        )
    hashes = {p.name: file_sha256(p) for p in files if not p.is_symlink()}
    key = builds.digest({"imported": hashes})[:16]
    found = store.installed(key)
    return found or store.install(key, files, lambda made: _record(key, made, text, stamp))


def _check_links(folder: Path, files: list[Path]) -> None:
    names = {p.name for p in files}
    bad = [f"{p.name} -> {p.readlink()}" for p in files if p.is_symlink() and str(p.readlink()) not in names]
    if bad:
        raise ImportRefusedError(f"links in {folder} that lead out of it, or nowhere", context=bad)


def _version(server: Path) -> str:
    done = run([server, "--version"], env=environment(), timeout_s=60.0)
    if not done.ok:
        lines = (done.err + done.out).strip().splitlines()
        raise ImportRefusedError(f"{server} --version ended with code {done.code}", context=lines[-4:])
    return f"{done.out}\n{done.err}"


def _record(key: str, folder: Path, text: str, stamp: Stamp | None) -> Build:
    upstream, compiler = _UPSTREAM.search(text), _COMPILER.search(text)
    paths = sorted(folder.iterdir())
    return Build(
        key=key,
        created=datetime.now(UTC),
        flashnext_version=stamp.version if stamp is not None else UNKNOWN,
        pin=PinStamp(
            name=UNKNOWN,
            version=UNKNOWN,
            sha256="",
            upstream_commit=upstream[1] if upstream is not None else UNKNOWN,
        ),
        series_hash=stamp.series if stamp is not None else builds.VANILLA_SERIES,
        features=dict.fromkeys(stamp.features, UNKNOWN) if stamp is not None else {},
        tests=True,  # nobody can tell: it counts as such, as with records that do not say
        imported=True,
        backend="cuda" if any(p.name.startswith("libggml-cuda") for p in paths) else "cpu",
        archs=(),
        flags={},
        compiler=CompilerStamp(
            path="",
            kind=compiler[1] if compiler is not None else UNKNOWN,
            version=compiler[2] if compiler is not None else UNKNOWN,
        ),
        cuda=None,
        binaries={
            p.name: Binary(size_bytes=p.stat().st_size, sha256=file_sha256(p))
            for p in paths
            if not p.is_symlink()
        },
        links={p.name: str(p.readlink()) for p in paths if p.is_symlink()},
    )
