"""Extraction keeps to its folder, leaves out what it should, and is whole or not there."""

from __future__ import annotations

import errno
import tarfile
from pathlib import Path

import pytest
from upstream import SOURCE, SOURCE_DIR, TOP, Upstream, make_sdist, pin_of

from flashnext.build import tree
from flashnext.build.pin import load_pin
from flashnext.errors import (
    FetchError,
    NoSpaceError,
    PinInvalidError,
    PristineChangedError,
    SdistUnreadableError,
    SdistUnsafeError,
    SourceMissingError,
)


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def test_only_the_source_folder_without_git_and_models(upstream: Upstream) -> None:
    found = tree.manifest(upstream.pristine())
    assert set(found) == {
        "CMakeLists.txt",
        "common/arg.cpp",
        "src/core.cpp",
        "src/.gitattributes",
        ".gitignore",
        "models/vocab.inp",
    }
    assert tree.read_manifest(upstream.pristine()) == found


def test_extracted_once(upstream: Upstream) -> None:
    first = upstream.pristine()

    def never() -> Path:
        raise AssertionError("the sdist was asked for again")

    assert tree.pristine_tree(upstream.pin, never) == first


INSIDE = f"{TOP}/{SOURCE_DIR}"


@pytest.mark.parametrize(
    "bad",
    [
        member("/etc/flashnext-escape"),
        member("../flashnext-escape"),
        member(f"{INSIDE}/../../../../flashnext-escape"),
        member(f"{INSIDE}/link", tarfile.SYMTYPE, "/etc/passwd"),
        member(f"{INSIDE}/link", tarfile.SYMTYPE, "../../../../outside"),
        member(f"{INSIDE}/deep/link", tarfile.SYMTYPE, "../../outside-of-the-source"),
        member(f"{INSIDE}/hard", tarfile.LNKTYPE, "/etc/passwd"),
        member(f"{INSIDE}/hard", tarfile.LNKTYPE, f"{TOP}/setup.py"),
        member(f"{INSIDE}/device", tarfile.CHRTYPE),
        member(f"{INSIDE}/device", tarfile.BLKTYPE),
        member(f"{INSIDE}/pipe", tarfile.FIFOTYPE),
        member(f"{TOP}/elsewhere/device", tarfile.CHRTYPE),
    ],
    ids=lambda info: f"{info.type.decode()}-{info.name}-{info.linkname}".replace("/", "_"),
)
def test_unsafe_members_are_refused_and_nothing_is_kept(
    upstream: Upstream, tmp_path: Path, bad: tarfile.TarInfo
) -> None:
    sdist = make_sdist(tmp_path / "bad.tar.gz", extra=[bad])
    pin = pin_of(sdist)
    with pytest.raises(SdistUnsafeError) as caught:
        tree.pristine_tree(pin, lambda: sdist)
    assert caught.value.exit_code == 5
    assert caught.value.advice
    folder = tree.pristine_path(pin).parent
    assert [p.name for p in folder.iterdir() if not p.name.endswith(".lock")] == []
    assert not list(tmp_path.rglob("flashnext-escape"))


def test_a_link_inside_the_source_is_fine(upstream: Upstream, tmp_path: Path) -> None:
    sdist = make_sdist(
        tmp_path / "ok.tar.gz", extra=[member(f"{INSIDE}/src/alias.cpp", tarfile.SYMTYPE, "core.cpp")]
    )
    pristine = tree.pristine_tree(pin_of(sdist), lambda: sdist)
    assert (pristine / "src/alias.cpp").read_text() == SOURCE["src/core.cpp"]
    assert "src/alias.cpp" in tree.verify_pristine(pristine)


def test_a_file_through_a_link_does_not_leave(upstream: Upstream, tmp_path: Path) -> None:
    """First a link to a folder inside, then a file 'below' the link that would land elsewhere."""
    extra = [member(f"{INSIDE}/way", tarfile.SYMTYPE, ".."), member(f"{INSIDE}/way/escaped.txt")]
    sdist = make_sdist(tmp_path / "bad.tar.gz", extra=extra)
    with pytest.raises(SdistUnsafeError):
        tree.pristine_tree(pin_of(sdist), lambda: sdist)
    assert not list(tmp_path.rglob("escaped.txt"))


@pytest.mark.parametrize("cut", [0, 30, 400])
def test_not_a_whole_archive(upstream: Upstream, tmp_path: Path, cut: int) -> None:
    sdist = tmp_path / "cut.tar.gz"
    sdist.write_bytes(upstream.sdist.read_bytes()[:cut] or b"plain text, no archive")
    with pytest.raises(SdistUnreadableError):
        tree.pristine_tree(pin_of(sdist), lambda: sdist)
    assert not tree.pristine_path(pin_of(sdist)).exists()


def test_an_sdist_without_the_source_folder(upstream: Upstream, tmp_path: Path) -> None:
    sdist = make_sdist(tmp_path / "empty.tar.gz", {"README": "no CMakeLists"})
    with pytest.raises(SourceMissingError):
        tree.pristine_tree(pin_of(sdist), lambda: sdist)


def test_no_space_before(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        free = 10

    monkeypatch.setattr("shutil.disk_usage", lambda _: Full)
    with pytest.raises(NoSpaceError) as caught:
        upstream.pristine()
    assert "0 MB free" in caught.value.context[0]


def test_no_space_in_the_middle(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tree.tarfile.TarFile, "extract", full)
    with pytest.raises(NoSpaceError):
        upstream.pristine()
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(upstream.root / "cache"))
    assert tree.verify_pristine(upstream.pristine())


def test_an_interrupted_extraction_is_cleaned_up(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tree.pristine_path(upstream.pin)
    left = target.parent / f".{target.name}.killed" / "tree"
    left.mkdir(parents=True)
    target.mkdir()  # without a manifest: not one of ours that is finished
    (target / "half").write_text("")
    assert set(tree.manifest(upstream.pristine())) == set(tree.verify_pristine(target))
    assert not left.parent.exists()


def test_an_edited_tree_is_named_file_by_file(upstream: Upstream) -> None:
    pristine = upstream.pristine()
    (pristine / "CMakeLists.txt").unlink()
    (pristine / "added.txt").write_text("")
    with pytest.raises(PristineChangedError) as caught:
        upstream.pristine()
    assert "CMakeLists.txt: not there" in caught.value.context
    assert "added.txt: added" in caught.value.context
    assert issubclass(PristineChangedError, FetchError)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('sha256 = "', 'sha256 = "x'),
        ("size_bytes = ", "size_bytes = -"),
        ('source_dir = "', 'source_dir = "../'),
        ('source_dir = "', 'source_dir = "/'),
        ('filename = "', 'filename = "a/'),
        ('name = "', 'nmae = "'),
        ('name = "', "name = "),
    ],
)
def test_a_broken_pin(upstream: Upstream, old: str, new: str) -> None:
    text = upstream.pin_file.read_text()
    upstream.pin_file.write_text(text.replace(old, new, 1))
    with pytest.raises(PinInvalidError) as caught:
        load_pin(upstream.pin_file)
    assert str(upstream.pin_file) in caught.value.context[0]
    assert caught.value.exit_code == 5


def test_the_shipped_pin_is_valid() -> None:
    pin = load_pin()
    assert (pin.size_bytes, pin.filename) == (76_589_250, "llama_cpp_python-0.3.36.tar.gz")
