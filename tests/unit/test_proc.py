"""Starting processes of our own."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashnext import __version__, proc
from flashnext.build import index


def test_a_module_of_ours_is_not_taken_from_the_folder_a_person_stands_in(tmp_path: Path) -> None:
    (tmp_path / "flashnext").mkdir()
    (tmp_path / "flashnext" / "__main__.py").write_text("print('of another checkout')")
    (tmp_path / "json.py").write_text("raise SystemExit('a file of theirs')")
    done = proc.run(proc.own_module("flashnext", "--version"), cwd=tmp_path)
    assert (done.code, done.out.strip()) == (0, f"flashnext {__version__}"), done.err


def test_nor_is_what_pip_needs_to_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('a file of theirs')")
    monkeypatch.chdir(tmp_path)
    assert index.ask_pip().timeout > 0
