"""Installed builds: atomic install, verification byte by byte, the choice of one, removal."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from flashnext import builds, paths
from flashnext.build import store
from flashnext.builds import Binary, Build, CompilerStamp, PinStamp, file_sha256
from flashnext.errors import BuildDamagedError, InstallFailedError, NoSuchBuildError

START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path


def record(
    key: str, folder: Path, *, series: str = "s1", backend: str = "cpu", age_h: int = 0, tests: bool = False
) -> Build:
    return Build(
        key=key,
        created=START - timedelta(hours=age_h),
        flashnext_version="0.1.0",
        pin=PinStamp(name="p", version="1", sha256="0" * 64, upstream_commit="c"),
        series_hash=series,
        features={},
        tests=tests,
        backend=backend,
        archs=(),
        flags={},
        compiler=CompilerStamp(path="/usr/bin/c++", kind="gcc", version="12"),
        cuda=None,
        binaries={
            p.name: Binary(size_bytes=p.stat().st_size, sha256=file_sha256(p))
            for p in folder.iterdir()
            if not p.is_symlink()
        },
        links={p.name: str(p.readlink()) for p in folder.iterdir() if p.is_symlink()},
    )


def install(tmp_path: Path, key: str, text: str = "program", **values: object) -> Build:
    source = tmp_path / "objects"
    source.mkdir(exist_ok=True)
    (source / "llama-server").write_text(text)
    (source / "llama-server").chmod(0o755)
    (source / "libx.so.1").write_text("library")
    (source / "libx.so").unlink(missing_ok=True)
    (source / "libx.so").symlink_to("libx.so.1")
    return store.install(key, sorted(source.iterdir()), lambda folder: record(key, folder, **values))  # type: ignore[arg-type]


def test_an_installed_build_is_whole_and_reads_back(tmp_path: Path) -> None:
    made = install(tmp_path, "k1")
    assert builds.load_build(paths.builds_dir() / "k1") == made
    assert store.installed("k1") == made
    assert store.verify([]) == [made]
    assert (made.bin / "llama-server").stat().st_mode & 0o111
    assert (made.bin / "libx.so").readlink() == Path("libx.so.1")
    assert [p.name for p in paths.builds_dir().iterdir()] == ["k1"]


def flip(made: Build) -> None:
    path = made.bin / "libx.so.1"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)


def shorten(made: Build) -> None:
    (made.bin / "llama-server").write_text("prog")


def lose(made: Build) -> None:
    (made.bin / "llama-server").unlink()


def relink(made: Build) -> None:
    (made.bin / "libx.so").unlink()
    (made.bin / "libx.so").symlink_to("llama-server")


def smuggle(made: Build) -> None:
    (made.bin / "libssl.so").write_text("not of this build")


def break_record(made: Build) -> None:
    file = made.folder / "build.json"
    file.write_text(file.read_text()[:-20])


@pytest.mark.parametrize(
    ("harm", "word"),
    [
        (flip, "bin/libx.so.1: sha256"),
        (shorten, "bin/llama-server: 4 bytes, not 7"),
        (lose, "bin/llama-server: missing"),
        (relink, "bin/libx.so: not the link to libx.so.1"),
        (smuggle, "bin/libssl.so: not part of the build"),
        (break_record, "no usable build.json"),
    ],
)
def test_verify_finds(harm: Callable[[Build], None], word: str, tmp_path: Path) -> None:
    good = install(tmp_path, "good")
    made = install(tmp_path, "k1")
    harm(made)
    with pytest.raises(BuildDamagedError) as caught:
        store.verify([])
    assert len(caught.value.context) == 1 and word in caught.value.context[0]
    assert caught.value.exit_code == 7
    assert store.verify(["good"]) == [good]


def test_a_damaged_build_is_not_taken_for_installed_and_not_chosen(tmp_path: Path) -> None:
    old = install(tmp_path, "old", age_h=5)
    made = install(tmp_path, "new")
    assert builds.find_build("s1") == made
    lose(made)
    assert store.installed("new") is None
    assert builds.find_build("s1") == old


def test_a_flipped_bit_is_not_taken_for_installed(tmp_path: Path) -> None:
    made = install(tmp_path, "k1")
    assert store.installed("k1") == made
    flip(made)
    assert store.installed("k1") is None


def test_installing_over_a_damaged_build_mends_it(tmp_path: Path) -> None:
    lose(install(tmp_path, "k1"))
    made = install(tmp_path, "k1", text="again")
    assert store.verify(["k1"]) == [made]
    assert [p.name for p in paths.builds_dir().iterdir()] == ["k1"]


def test_a_failed_install_leaves_the_old_one(tmp_path: Path) -> None:
    made = install(tmp_path, "k1")
    with pytest.raises(InstallFailedError):
        store.install("k1", [tmp_path / "not-there"], lambda folder: record("k1", folder))
    assert store.verify([]) == [made]
    assert [p.name for p in paths.builds_dir().iterdir()] == ["k1"]


def test_what_an_interrupted_install_left_is_no_build_and_goes(tmp_path: Path) -> None:
    install(tmp_path, "k1")
    left = paths.builds_dir() / ".k2.abc"
    (left / "bin").mkdir(parents=True)
    assert [b.key for b in builds.list_builds()] == ["k1"]
    store.verify([])
    install(tmp_path, "k2")
    assert not left.exists()


def test_a_build_under_a_name_that_is_not_its_key_is_none(tmp_path: Path) -> None:
    made = install(tmp_path, "k1")
    made.folder.rename(paths.builds_dir() / "k9")
    assert builds.list_builds() == []


def test_the_newest_of_the_series_and_backend(tmp_path: Path) -> None:
    install(tmp_path, "a", age_h=3)
    b = install(tmp_path, "b", age_h=2)
    c = install(tmp_path, "c", age_h=1, backend="cuda")
    install(tmp_path, "d", series="s2")
    assert builds.find_build("s1") == c
    assert builds.find_build("s1", backend="cpu") == b
    assert builds.find_build("s3") is None
    assert [x.key for x in builds.list_builds()] == ["d", "c", "b", "a"]


def test_a_build_for_tests_serves_only_where_there_is_no_other(tmp_path: Path) -> None:
    tests = install(tmp_path, "a", age_h=1, tests=True)
    assert builds.find_build("s1") == tests
    product = install(tmp_path, "b", age_h=9)
    assert builds.find_build("s1") == product
    # a record from before the field says nothing, and counts as one for tests
    file = product.folder / builds.RECORD_NAME
    data = json.loads(file.read_text())
    del data["tests"]
    file.write_text(json.dumps(data))
    assert builds.find_build("s1") == tests


def test_keys_may_be_shortened_while_that_is_clear(tmp_path: Path) -> None:
    install(tmp_path, "abc1")
    install(tmp_path, "abd2")
    assert builds.get_build("abc").key == "abc1"
    for key, words in (
        ("ab", "2 installed builds share"),
        ("x", "no installed build has"),
        ("", "no installed"),
    ):
        with pytest.raises(NoSuchBuildError, match=words):
            builds.get_build(key)


def test_remove(tmp_path: Path) -> None:
    install(tmp_path, "k1")
    store.remove("k1")
    assert list(paths.builds_dir().iterdir()) == []
    with pytest.raises(NoSuchBuildError) as caught:
        store.remove("k1")
    assert caught.value.exit_code == 2


def test_a_build_whose_record_is_broken_goes_by_its_whole_name(tmp_path: Path) -> None:
    install(tmp_path, "good")
    break_record(install(tmp_path, "k1"))
    with pytest.raises(NoSuchBuildError):
        store.remove("k")
    assert store.remove("k1") == "k1"
    assert [p.name for p in paths.builds_dir().iterdir()] == ["good"]
    for key in ("", ".", "..", "../builds"):
        with pytest.raises(NoSuchBuildError):
            store.remove(key)


def test_a_record_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    made = install(tmp_path, "k1")
    file = made.folder / "build.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "surprise": 1}))
    assert builds.load_build(made.folder) is None
