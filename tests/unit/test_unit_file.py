"""The systemd unit: as a snapshot, and as systemd itself reads it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from flashnext import paths
from flashnext.errors import HostError, LockedError, ProfileError
from flashnext.profile import load
from flashnext.serve import unit

WRITABLE = [Path("/home/ada/.local/share/flashnext"), Path("/home/ada/my state")]


@pytest.mark.parametrize("account", ["ada", None])
def test_unit(account: str | None, snapshot: SnapshotAssertion) -> None:
    profile = load.load("2x3090").profile
    command = ["/home/ada/flash next/.venv/bin/flashnext", "serve", "--profile", "2x3090"]
    assert unit.render(profile, command, writable=WRITABLE, account=account) == snapshot


def test_limits_agree_with_the_supervisors_own() -> None:
    profile = load.load("2x3090").profile
    text = unit.render(profile, ["/x"], writable=[], account=None)
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    assert int(values["TimeoutStopSec"]) > profile.life.stop_limit_s
    assert int(values["TimeoutStartSec"]) > profile.life.load_limit_s
    prevented = {int(code) for code in values["RestartPreventExitStatus"].split()}
    assert {ProfileError.exit_code, HostError.exit_code, LockedError.exit_code} <= prevented
    assert 8 not in prevented
    assert values["LimitMEMLOCK"] == "infinity" and values["Type"] == "notify"


@pytest.mark.parametrize("account", ["root", None])
def test_systemd_accepts_it(account: str | None, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    profile = load.load("demo").profile
    text = unit.render(profile, [sys.executable, "-m", "x y"], writable=WRITABLE, account=account)

    def complaints(text: str) -> list[str]:
        file = tmp_path / unit.name(profile)
        file.write_text(text)
        done = subprocess.run(
            [analyze, *([] if account else ["--user"]), "verify", str(file)],
            env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return [line for line in (done.stdout + done.stderr).splitlines() if file.name in line]

    assert complaints(text.replace("LimitMEMLOCK", "LimitMEMLOK")), "systemd does not look at the file at all"
    assert complaints(text) == []


def test_the_shipped_unit_is_the_rendered_one() -> None:
    """An example for packagers; `flashnext service` writes one for this machine."""
    profile = load.load("2x3090").profile
    folders = [Path("/var/lib/flashnext/.local"), Path("/var/lib/flashnext/.cache")]
    command = ["/opt/flashnext/bin/flashnext", "serve", "--profile", "2x3090"]
    text = unit.render(profile, command, writable=folders, account="flashnext")
    assert (paths.data_root() / "launch/systemd/flashnext.service").read_text() == text
