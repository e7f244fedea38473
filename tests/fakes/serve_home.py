"""A home of its own per test, and an installed build whose programs are the fake server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import yaml

from flashnext import paths
from flashnext.build.series import load_series, series_hash
from flashnext.builds import Binary, Build, CompilerStamp, PinStamp, file_sha256
from flashnext.profile.load import find

FAKE = Path(__file__).with_name("llama_server.py")
DEADLINE_S = 20.0


def until(ready: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S) -> Any:
    """Poll for a true value; a test that waits in vain says for what."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        value = ready()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"waited {timeout_s} s in vain for {what}")


class Running:
    """A ``flashnext serve`` under test."""

    def __init__(self, home: Home, process: subprocess.Popen[str], port: int) -> None:
        self.home, self.process, self.port = home, process, port
        self.out = self.err = ""

    def state(self) -> dict[str, Any]:
        file = self.home.root / "state/flashnext/serve" / str(self.port) / "state.json"
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads(file.read_text()))
        return {}

    def until_state(self, *wanted: str, timeout_s: float = DEADLINE_S) -> dict[str, Any]:
        def there() -> dict[str, Any] | None:
            over = self.process.poll() is not None
            state = self.state()
            if over and state.get("state") not in wanted:
                self.end()
                raise AssertionError(f"serve ended with {self.process.returncode}:\n{self.err}")
            if state.get("supervisor", {}).get("pid") != self.process.pid:
                return None
            return state if state.get("state") in wanted else None

        try:
            return dict(until(there, f"state {wanted}", timeout_s))
        except AssertionError as error:
            story = [f"{t['at']} {t['state']}: {t['reason']}" for t in self.state().get("transitions", ())]
            raise AssertionError("\n".join([str(error), *story])) from None

    def pids(self) -> list[int]:
        return [child["pid"] for child in self.state().get("children", [])]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, timeout_s: float = DEADLINE_S) -> int:
        """Wait for the end; the exit code."""
        self.out, self.err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode


class Home:
    """XDG folders of a user who has never used flashnext."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(root / "home"),
            "XDG_DATA_HOME": str(root / "data"),
            "XDG_CACHE_HOME": str(root / "cache"),
            "XDG_STATE_HOME": str(root / "state"),
            "XDG_CONFIG_HOME": str(root / "config"),
        }
        (root / "home").mkdir(parents=True)
        self.started: list[Running] = []

    def profile(self, **sections: dict[str, Any]) -> Path:
        """The shipped demo profile with the tiny model, and changes by section; None removes a key."""
        data = yaml.safe_load(find("demo").read_text())
        data["model"] = {"synthetic": "tiny"}
        data["context"]["size"] = 4096  # what the tiny model was made for
        data["life"] = {"backoff_s": 1, "stop_limit_s": 3, "load_limit_s": 10, "check_limit_s": 3}
        for name, values in sections.items():
            merged = {**data.get(name, {}), **values}
            data[name] = {key: value for key, value in merged.items() if value is not None}
        file = self.root / "test.yaml"
        file.write_text(yaml.safe_dump(data))
        return file

    def run(self, *args: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "flashnext", *args]
        return subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def serve(self, *args: str, port: int | None = None, profile: Path | None = None) -> Running:
        chosen = free_port() if port is None else port
        file = profile or self.profile()
        command = [sys.executable, "-m", "flashnext", "serve", "--profile", str(file), "--port", str(chosen)]
        process = subprocess.Popen(
            [*command, *args],
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        running = Running(self, process, chosen)
        self.started.append(running)
        return running

    def processes(self) -> list[int]:
        """Everything of this home that still runs: fakes by their folder, real servers by their model."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            words = " ".join(process.info["cmdline"] or ())
            if str(self.root) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        return found

    def nothing_left(self) -> None:
        until(lambda: not self.processes(), f"no process left: {self.processes()}", 5.0)

    def close(self) -> None:
        for running in self.started:
            if running.process.poll() is None:
                running.process.kill()
                running.process.communicate()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class FakeHome(Home):
    """A home with an installed build whose programs are the fake server."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.folder = root / "fake"
        self.folder.mkdir()
        self.behave({})
        self.install()

    def behave(self, plan: dict[str, Any] | list[dict[str, Any]]) -> None:
        (self.folder / "fake.json").write_text(json.dumps(plan))

    def install(self, **changes: Any) -> Build:
        features = [f.id for f in load_series(paths.patches_dir())]
        series = series_hash(load_series(paths.patches_dir()), paths.cmake_include())
        listed = ",".join(features)
        (self.folder / "stamp.txt").write_text(
            f"flashnext: version 0.1.0, series {series}, features {listed}"
        )
        folder = self.root / "data/flashnext/builds/fakebuild"
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        binaries = {}
        for name, role in (("llama-server", "server"), ("fn-vgpu", "vgpu")):
            program = folder / "bin" / name
            program.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} {role} {self.folder} "$@"\n')
            program.chmod(0o755)
            binaries[name] = Binary(size_bytes=program.stat().st_size, sha256=file_sha256(program))
        values = {
            "key": "fakebuild",
            "created": datetime.now(UTC),
            "flashnext_version": "0.1.0",
            "pin": PinStamp(name="p", version="1", sha256="0" * 64, upstream_commit="c"),
            "series_hash": series,
            "features": {name: "0" * 64 for name in [*features, "build-stamp", "fn-vgpu"]},
            "tests": False,
            "backend": "cpu",
            "archs": (),
            "flags": {},
            "compiler": CompilerStamp(path="/usr/bin/c++", kind="gcc", version="12"),
            "cuda": None,
            "binaries": binaries,
            "links": {},
            **changes,
        }
        build = Build.model_validate(values)
        (folder / "build.json").write_text(build.model_dump_json())
        return build

    def launches(self, role: str = "server") -> list[dict[str, Any]]:
        log = self.folder / f"launches-{role}.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
