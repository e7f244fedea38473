"""The work tree follows the staged one by content."""

from __future__ import annotations

import os
from pathlib import Path

from flashnext.build.workspace import sync


def files_of(folder: Path) -> dict[str, Path]:
    return {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file() or p.is_symlink()}


def make(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_only_what_differs_is_written(tmp_path: Path) -> None:
    source, into = tmp_path / "a", tmp_path / "b"
    make(source, x="1", d__y="2", d__z="3")
    assert sync(files_of(source), into) == 3
    times = {name: path.stat().st_mtime_ns for name, path in files_of(into).items()}
    assert sync(files_of(source), into) == 0
    make(source, d__y="9")
    assert sync(files_of(source), into) == 1
    changed = {name for name, path in files_of(into).items() if path.stat().st_mtime_ns != times[name]}
    assert changed == {"d/y"}
    assert (into / "d/y").read_text() == "9"


def test_a_changed_file_is_new_whatever_time_the_original_carries(tmp_path: Path) -> None:
    """A wheel's files carry a fixed old time: ninja would not see that one has changed."""
    source, into = tmp_path / "a", tmp_path / "b"
    make(source, x="1")
    sync(files_of(source), into)
    first = (into / "x").stat().st_mtime_ns
    make(source, x="2")
    os.utime(source / "x", (1, 1))
    sync(files_of(source), into)
    assert (into / "x").stat().st_mtime_ns >= first


def test_extra_files_folders_and_local_edits_go(tmp_path: Path) -> None:
    source, into = tmp_path / "a", tmp_path / "b"
    make(source, x="1")
    make(into, x="edited", old__deep__y="2")
    (into / "link").symlink_to("nowhere")
    (into / "empty").mkdir()
    assert sync(files_of(source), into) == 1
    assert [p.name for p in into.rglob("*")] == ["x"]
    assert (into / "x").read_text() == "1"


def test_modes_and_links_follow(tmp_path: Path) -> None:
    source, into = tmp_path / "a", tmp_path / "b"
    make(source, run="#!/bin/sh\n", x="1")
    (source / "link").symlink_to("x")
    sync(files_of(source), into)
    (source / "run").chmod(0o755)
    (source / "link").unlink()
    (source / "link").symlink_to("run")
    assert sync(files_of(source), into) == 2
    assert (into / "run").stat().st_mode & 0o777 == 0o755
    assert (into / "link").readlink() == Path("run")
    (source / "x").unlink()
    (source / "x").symlink_to("run")
    assert sync(files_of(source), into) == 1
    assert (into / "x").is_symlink()
