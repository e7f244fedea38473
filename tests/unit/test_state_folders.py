"""A folder for state that cannot be written is explained, wherever it is met first."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashnext.bench.arms import from_profile
from flashnext.bench.running import folder_lock
from flashnext.errors import LockedError, StateNotWritableError
from flashnext.serve.logfile import LogFile
from flashnext.serve.prepare import empty_config_home
from flashnext.services import PortLock


@pytest.fixture
def plain_file(tmp_path: Path) -> Path:
    file = tmp_path / "file"
    file.write_text("not a folder")
    return file


@pytest.mark.parametrize("name", ["XDG_STATE_HOME", "XDG_RUNTIME_DIR"])
def test_lock_of_a_port(name: str, plain_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    # /proc takes no folder from anybody, root included
    monkeypatch.setenv(name, "/proc" if name == "XDG_RUNTIME_DIR" else str(plain_file))
    with pytest.raises(StateNotWritableError, match=r"cannot write .*serve-1\.lock") as caught, PortLock(1):
        pass
    assert name in caught.value.advice
    assert caught.value.exit_code == 4


def test_folders_of_a_service(plain_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(plain_file))
    with pytest.raises(StateNotWritableError):
        empty_config_home(1)
    with pytest.raises(StateNotWritableError):
        LogFile(plain_file / "logs" / "a.log")


def test_folder_of_a_bench(plain_file: Path) -> None:
    with pytest.raises(StateNotWritableError) as caught:
        from_profile("demo", ["candidate"], plain_file / "arms").write()
    assert "--out" in caught.value.advice
    with pytest.raises(StateNotWritableError), folder_lock(plain_file):
        pass


def test_a_bench_that_runs_is_no_unwritable_folder(tmp_path: Path) -> None:
    with folder_lock(tmp_path), pytest.raises(LockedError), folder_lock(tmp_path):
        pass
