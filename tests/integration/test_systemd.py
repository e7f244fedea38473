"""The unit under a real service manager: a `systemd --user` of our own, in namespaces of our own.

Runs where root may make such namespaces and systemd is installed; elsewhere it is skipped with the reason.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from serve_home import FakeHome, free_port, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SYSTEMD = Path("/lib/systemd/systemd")
PROGRAM = Path(sys.executable).with_name("flashnext")
UNIT = "flashnext-demo.service"
# A manager wants control groups that it may write to, and /run/systemd/system as a sign of being at home.
MANAGER = f"""
set -e
mount -t cgroup2 none /sys/fs/cgroup
mount -t tmpfs none /run
mkdir -p /run/systemd/system /sys/fs/cgroup/$GROUP
echo $$ > /sys/fs/cgroup/$GROUP/cgroup.procs
exec {SYSTEMD} --user --log-target=null
"""
TIDY = """
mount -t cgroup2 none /sys/fs/cgroup
find /sys/fs/cgroup/$GROUP -depth -type d -exec rmdir {} +
"""


class Manager:
    """A running service manager of one user."""

    def __init__(self, home: FakeHome) -> None:
        self.runtime = home.root / "run"
        self.runtime.mkdir(mode=0o700)
        self.group = f"flashnext-test-{os.getpid()}"
        self.env = {**home.env, "XDG_RUNTIME_DIR": str(self.runtime), "GROUP": self.group}
        self.process = subprocess.Popen(
            ["unshare", "-mC", "--propagation", "private", "bash", "-c", MANAGER],
            env=self.env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def up(self) -> str | None:
        """None once it answers, else why it does not."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            if self.process.poll() is not None:
                assert self.process.stderr is not None
                return self.process.stderr.read().strip() or f"it ended with {self.process.returncode}"
            if (self.runtime / "systemd/private").exists() and self.ctl("is-system-running").stdout.strip():
                return None
            time.sleep(0.1)
        return "it does not answer"

    def ctl(self, *words: str, timeout_s: float = 90) -> subprocess.CompletedProcess[str]:
        inside = [
            "nsenter",
            "-t",
            str(self.process.pid),
            "-m",
            "-C",
            "systemctl",
            "--user",
            "--no-pager",
            *words,
        ]
        return subprocess.run(
            inside, env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def show(self, name: str) -> str:
        return self.ctl("show", UNIT, "--property", name, "--value").stdout.strip()

    def close(self) -> None:
        if self.process.poll() is None:
            self.ctl("stop", UNIT)
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        tidy = ["unshare", "-mC", "--propagation", "private", "bash", "-c", TIDY]
        subprocess.run(tidy, env=self.env, capture_output=True, timeout=30, check=False)


@pytest.fixture
def manager(home: FakeHome) -> Iterator[Manager]:
    missing = [p for p in ("unshare", "nsenter", "systemctl") if shutil.which(p) is None]
    missing += [str(p) for p in (SYSTEMD, PROGRAM) if not p.exists()]
    if missing or os.geteuid():
        pytest.skip(f"needs root and {', '.join(missing) or 'nothing else'}")
    made = Manager(home)
    try:
        if (reason := made.up()) is not None:
            pytest.skip(f"no service manager can be started here: {reason}")
        yield made
    finally:
        made.close()


def install(home: FakeHome, manager: Manager, port: int, **life: int) -> None:
    """The demo's unit, for a profile of the tiny model on a port of its own."""
    file = home.profile(server={"port": port}, life={"load_limit_s": 20, **life})
    line = [str(PROGRAM), "service", "install", "--user", "--profile", str(file), "--json"]
    done = subprocess.run(line, env=manager.env, capture_output=True, text=True, check=True)
    assert Path(json.loads(done.stdout)["file"]).name == UNIT
    assert manager.ctl("daemon-reload").returncode == 0


def test_started_watched_and_stopped(home: FakeHome, manager: Manager) -> None:
    port = free_port()
    install(home, manager, port)
    home.behave({"load_s": 3, "load_line_every_s": 0.3})
    assert manager.ctl("start", "--no-block", UNIT).returncode == 0
    until(lambda: manager.show("StatusText").startswith("starting: "), "its own words while it loads")
    assert manager.show("ActiveState") == "activating", "not started before it is ready"
    until(lambda: manager.show("ActiveState") == "active", "active")
    assert manager.show("StatusText").startswith("ready: answers sanely")
    status = json.loads(home.run("status", "--json").stdout)[0]
    first = int(manager.show("MainPID"))
    assert (status["state"], status["supervisor"]["pid"]) == ("ready", first)

    # a killed supervisor is the manager's to mend; nothing of it stays behind
    os.kill(first, signal.SIGKILL)
    until(lambda: manager.show("MainPID") not in ("0", str(first)), "another supervisor", 30)
    until(lambda: manager.show("ActiveState") == "active", "active again", 30)
    assert manager.show("NRestarts") == "1"
    until(lambda: len(home.processes()) == 4, f"one supervisor, three children: {home.processes()}")

    begin = time.monotonic()
    assert manager.ctl("stop", UNIT).returncode == 0
    assert time.monotonic() - begin < 15
    assert (manager.show("ActiveState"), manager.show("Result")) == ("inactive", "success")
    home.nothing_left()


def test_what_a_restart_cannot_mend_is_not_restarted(home: FakeHome, manager: Manager) -> None:
    install(home, manager, free_port())
    home.behave({"exit_now": "argument"})
    assert manager.ctl("start", UNIT).returncode != 0
    assert manager.show("ExecMainStatus") == "3"
    # one that waits for its restart is "activating (auto-restart)"
    assert (manager.show("ActiveState"), manager.show("SubState")) == ("failed", "failed")
    assert manager.show("NRestarts") == "0"
    assert len(home.launches()) == 1
    home.nothing_left()


def test_a_supervisor_that_stands_still_is_replaced(home: FakeHome, manager: Manager) -> None:
    install(home, manager, free_port())
    faster = home.root / "config/systemd/user" / f"{UNIT}.d/faster.conf"
    faster.parent.mkdir()
    faster.write_text("[Service]\nWatchdogSec=3\nTimeoutAbortSec=2\nRestartSec=1\n")
    assert manager.ctl("daemon-reload").returncode == 0
    assert manager.ctl("start", UNIT).returncode == 0
    first = int(manager.show("MainPID"))
    time.sleep(4)
    assert int(manager.show("MainPID")) == first, "fed in time while all is well"
    os.kill(first, signal.SIGSTOP)
    until(lambda: manager.show("MainPID") not in ("0", str(first)), "another supervisor", 30)
    until(lambda: manager.show("ActiveState") == "active", "active again", 30)
    until(lambda: len(home.processes()) == 4, f"one supervisor, three children: {home.processes()}")
