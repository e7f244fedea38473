"""`flashnext build --import`: binaries that were compiled elsewhere, taken at their own word."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flashnext import builds
from flashnext.build import store
from flashnext.build.importing import import_folder
from flashnext.errors import BuildDamagedError, ImportRefusedError

UPSTREAM = "version: 0.5.0-dev (build 0, commit 0c1e57098)\nbuilt with GNU 12.2.0 for Linux x86_64"
STAMP = "flashnext: version 0.1.0, series " + "5e" * 32 + ", features build-stamp,topk"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path


def folder(home: Path, *lines: str, code: int = 0, cuda: bool = False) -> Path:
    found = home / "elsewhere"
    found.mkdir(exist_ok=True)
    server = found / "llama-server"
    text = "\n".join(lines)
    server.write_text(f'#!/bin/sh\n[ "$1" = --version ] && cat >&2 <<END\n{text}\nEND\nexit {code}\n')
    server.chmod(0o755)
    (found / "libggml.so.0").write_bytes(b"library")
    if not (found / "libggml.so").is_symlink():
        (found / "libggml.so").symlink_to("libggml.so.0")
    if cuda:
        (found / "libggml-cuda.so.0").write_bytes(b"cuda")
    return found


def test_series_and_features_are_those_of_the_stamp(home: Path) -> None:
    made = import_folder(folder(home, UPSTREAM, STAMP, cuda=True))
    assert (made.series_hash, tuple(made.features)) == ("5e" * 32, ("build-stamp", "topk"))
    assert (made.backend, made.imported, made.tests, made.flashnext_version) == ("cuda", True, True, "0.1.0")
    assert (made.pin.upstream_commit, made.pin.sha256) == ("0c1e57098", "")
    assert (made.compiler.kind, made.compiler.version) == ("GNU", "12.2.0")
    assert builds.get_build(made.key[:6]) == made
    assert builds.find_build("5e" * 32, backend="cuda") == made
    assert store.verify([made.key]) == [made]
    assert (made.bin / "libggml.so").readlink() == Path("libggml.so.0")
    (made.bin / "libggml.so.0").write_bytes(b"LIBRARY")
    with pytest.raises(BuildDamagedError):
        store.verify([made.key])


def test_the_key_is_that_of_the_content(home: Path) -> None:
    source = folder(home, UPSTREAM, STAMP)
    first = import_folder(source)
    assert import_folder(source) == first, "nothing is written again"
    (source / "libggml.so.0").write_bytes(b"another")
    assert import_folder(source).key != first.key
    assert import_folder(first.folder).key == first.key, "the folder above bin is as good"


def test_a_server_without_a_stamp_is_vanilla_only_where_somebody_says_so(home: Path) -> None:
    plain = folder(home, UPSTREAM)
    with pytest.raises(ImportRefusedError, match="no stamp") as caught:
        import_folder(plain)
    assert "--vanilla" in caught.value.advice
    made = import_folder(plain, vanilla=True)
    assert (made.series_hash, made.features, made.backend) == (builds.VANILLA_SERIES, {}, "cpu")
    with pytest.raises(ImportRefusedError, match="not vanilla"):
        import_folder(folder(home, UPSTREAM, STAMP), vanilla=True)


def test_what_cannot_be_imported_is_refused_and_nothing_is_installed(home: Path) -> None:
    with pytest.raises(ImportRefusedError, match="holds no llama-server"):
        import_folder(home)
    with pytest.raises(ImportRefusedError, match="ended with code 3"):
        import_folder(folder(home, UPSTREAM, STAMP, code=3))
    source = folder(home, UPSTREAM, STAMP)
    (source / "libout.so").symlink_to("/lib/libc.so.6")
    with pytest.raises(ImportRefusedError) as caught:
        import_folder(source)
    assert caught.value.context == ("libout.so -> /lib/libc.so.6",)
    assert builds.list_builds() == []


def test_the_command(home: Path) -> None:
    source = folder(home, UPSTREAM, STAMP)
    words = [sys.executable, "-m", "flashnext", "build", "--import", str(source)]
    done = subprocess.run([*words, "--json"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["series_hash"] == "5e" * 32
    again = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (
        Path(again.stdout.strip(), "llama-server").is_file() and "features build-stamp, topk" in again.stderr
    )
    both = subprocess.run([*words, "--list"], capture_output=True, text=True, timeout=60)
    assert both.returncode == 2
