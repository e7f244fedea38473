"""`flashnext service`: whose folders a unit opens, and what `uninstall` leaves."""

from __future__ import annotations

import json
import pwd
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashnext.cli import service

UNIT = "flashnext-demo.service"


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of system-wide units; called through sudo by ada, whose home is not root's."""
    ada = SimpleNamespace(pw_name="ada", pw_dir=str(tmp_path / "ada"))
    monkeypatch.setattr(pwd, "getpwnam", {"ada": ada}.__getitem__)
    monkeypatch.setattr(service, "_SYSTEM", tmp_path / "system")
    monkeypatch.setenv("SUDO_USER", "ada")
    monkeypatch.setenv("HOME", str(tmp_path / "root"))
    return tmp_path / "system"


def test_under_sudo_the_folders_are_those_of_the_account(
    system: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ada = tmp_path / "ada"
    (ada / ".cache/flashnext").mkdir(parents=True)
    service.install("demo")
    text = (system / UNIT).read_text()
    share, cache, state = (ada / part / "flashnext" for part in (".local/share", ".cache", ".local/state"))
    assert f"\nReadWritePaths=-{share} -{cache} -{state}\n" in text and "\nUser=ada\n" in text
    assert f"first: sudo -u ada mkdir -p {share} {state}\n" in capsys.readouterr().err


def test_uninstall_leaves_no_start_at_boot(system: Path, capsys: pytest.CaptureFixture[str]) -> None:
    service.install("demo")
    link = system / "multi-user.target.wants" / UNIT
    link.parent.mkdir()
    link.symlink_to(system / UNIT)
    capsys.readouterr()
    service.uninstall("demo")
    assert not link.is_symlink() and not (system / UNIT).exists()
    out, err = capsys.readouterr()
    assert out == f"removed {link}\nremoved {system / UNIT}\n"
    assert f"next: systemctl stop {UNIT}; systemctl daemon-reload" in err
    service.uninstall("demo")
    assert f"there is no {system / UNIT}" in capsys.readouterr().err


def test_every_verb_speaks_json(system: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said() -> dict[str, Any]:
        out, err = capsys.readouterr()
        assert err == ""
        return dict(json.loads(out))

    service.show("demo", as_json=True)
    shown = said()
    assert shown["file"] == str(system / UNIT) and shown["unit"].startswith("[Unit]")
    service.install("demo", as_json=True)
    done = said()
    assert done["file"] == str(system / UNIT) and done["next"][-1].endswith(f"enable --now {UNIT}")
    assert (system / UNIT).read_text() == shown["unit"]
    service.uninstall("demo", as_json=True)
    assert said()["removed"] == [str(system / UNIT)]
    service.uninstall("demo", as_json=True)
    assert said() == {"removed": [], "next": []}
