"""Servers of a profile: by `flashnext serve`, or directly from another build by the line it prints."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flashnext import services
from flashnext.bench.arms import REHEARSAL, Arm
from flashnext.bench.facts import build_facts, model_facts
from flashnext.bench.servers import CommandServer, Server, StartedServer, UrlServer, free_port, is_healthy
from flashnext.markers import parse
from flashnext.proc import Done, environment, own_module, run, start, stop, wait_until

_URL = re.compile(r"^(http://\S+?)(/v1)?$")
# `flashnext serve` has to find the same builds, models and state as the bench.
_XDG = ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR", "PYTHONPATH", "VIRTUAL_ENV")
_PROGRAM = "llama-server"


def _reason(done: Done) -> str:
    """What a failed `--json` command says: its error is on stdout."""
    try:
        error = json.loads(done.out)
        return "; ".join([str(error["message"]), *map(str, error["context"][:3])])
    except (ValueError, KeyError, TypeError):
        return f"ended with code {done.code}: {(done.err or done.out).strip()[-400:]}"


def _serve(arm: Arm, port: int) -> list[str]:
    return own_module("flashnext", "serve", "--profile", str(arm.profile), "--port", str(port))


class ServiceServer(StartedServer):
    """`flashnext serve` of a profile: supervised, with its record in state.json."""

    def launch(self, *, limit_s: float, options: Sequence[str] = ()) -> None:
        began = time.monotonic()
        words = [*_serve(self.arm, 0), "--verbose", *options]
        self._child = start(
            words, env=environment(also=_XDG), stdout=subprocess.PIPE, stderr=self._stream.fileno()
        )
        self.address = self._first_line(began + limit_s)
        self.ready_s = time.monotonic() - began
        service = self._service()
        self.argv = service.argv
        self.pid = next((p.pid for p in service.children if p.name == "server"), None)
        if self.pid is None:
            raise self.failed("its record names no server process")

    def _first_line(self, deadline: float) -> tuple[str, int]:
        """The line on stdout with the URL, which comes when the server is ready."""
        pipe = self.child.stdout
        assert pipe is not None
        handle, text = pipe.fileno(), ""
        while time.monotonic() < deadline:
            if select.select([handle], [], [], 0.1)[0]:
                text += os.read(handle, 4096).decode("utf-8", "replace")
            match = _URL.match(text.strip())
            if match is not None and text.endswith("\n"):
                parts = urlsplit(match[1])
                return (parts.hostname or "127.0.0.1", parts.port or 80)
            if self.child.poll() is not None:
                raise self.failed(
                    f"flashnext serve ended with code {self.child.returncode} before it was ready"
                )
        raise self.failed("not ready in time")

    def _service(self) -> services.Service:
        service = services.read(self.address[1])
        if service is None:
            raise self.failed("it left no record")
        return service

    def facts(self) -> dict[str, Any]:
        service = self._service()
        return {
            "build": build_facts(service.build),
            "features": ", ".join(service.features),
            "model": model_facts(Path(service.model)),
            "head": Path(service.head).name if service.head else None,
            "deviations": len(service.deviations),
        }

    def problems(self) -> list[str]:
        found = super().problems()
        service = services.read(self.address[1])
        if service is not None and service.restarts:
            found.append(f"restarted {service.restarts} times: {service.reason}")
        return found


class BuildServer(StartedServer):
    """llama-server of a given build, with the command line that `flashnext serve` prints for the profile.

    The supervisor starts only builds of the package's own series, so arms that differ in their build are all
    started like this, without it.
    """

    def __init__(self, arm: Arm, log: Path) -> None:
        super().__init__(arm, log)
        self._devices: list[subprocess.Popen[str]] = []

    def launch(self, *, limit_s: float, options: Sequence[str] = ()) -> None:
        began = time.monotonic()
        port = free_port()
        printed = self._printed(port, options)
        endpoints = [self._device(entry) for entry in printed if entry["name"] != "server"]
        server = next(entry for entry in printed if entry["name"] == "server")
        words = [str(word) for word in server["argv"]]
        self._bin = Path(next(word for word in words if Path(word).name == _PROGRAM)).parent
        for number, endpoint in enumerate(endpoints):
            words = [w.replace(f"127.0.0.1:VGPU{number}_PORT", endpoint) for w in words]
        env = {k: v for k, v in server["env"].items() if k != REHEARSAL} | dict(self.arm.switches)
        self._child = start(words, env=env, stdout=self._stream.fileno(), stderr=subprocess.STDOUT)
        self.address, self.pid, self.argv = ("127.0.0.1", port), self._child.pid, tuple(words)
        if not wait_until(self._healthy, timeout_s=limit_s, every_s=0.05):
            raise self.failed(f"not ready within {limit_s:g} s")
        self.ready_s = time.monotonic() - began

    def _printed(self, port: int, options: Sequence[str]) -> list[dict[str, Any]]:
        words = [*_serve(self.arm, port), "--print-command", "--json", *options]
        words += ["--build", self.arm.build] if self.arm.build is not None else []
        done = run(words, env=environment(also=_XDG), timeout_s=60.0)
        if not done.ok:
            raise self.failed(f"flashnext serve --print-command: {_reason(done)}")
        return list(json.loads(done.out))

    def _device(self, entry: dict[str, Any]) -> str:
        """Start a virtual GPU and wait for its endpoint."""
        before = sum(1 for _ in self._listening())
        child = start(entry["argv"], env=entry["env"], stdout=self._stream.fileno(), stderr=subprocess.STDOUT)
        self._devices.append(child)
        if not wait_until(lambda: sum(1 for _ in self._listening()) > before, timeout_s=20.0):
            raise self.failed(f"the virtual GPU {entry['name']} does not announce its port")
        return list(self._listening())[-1]

    def _listening(self) -> Iterator[str]:
        for line in self.all_lines():
            marker = parse(line)
            if marker is not None and marker.name == "vgpu:listening":
                yield f"127.0.0.1:{marker.data.get('port')}"

    def _healthy(self) -> bool:
        code = self.child.poll()
        if code is not None:
            raise self.failed(f"the server ended with code {code} before it was ready")
        return is_healthy(self.address)

    def facts(self) -> dict[str, Any]:
        model = Path(self.argv[self.argv.index("--model") + 1])
        return {"build": build_facts(self._bin.parent.name), "model": model_facts(model), "supervised": False}

    def end(self) -> None:
        super().end()
        for child in self._devices:
            stop(child)


@contextmanager
def running(arm: Arm, log: Path, *, limit_s: float, options: Sequence[str] = ()) -> Iterator[Server]:
    """A fresh server of an arm, ready; it is ended however the block is left."""
    if arm.url is not None:
        yield UrlServer(arm, log)
        return
    kind = CommandServer if arm.command is not None else BuildServer if arm.direct else ServiceServer
    server: StartedServer = kind(arm, log)
    try:
        server.launch(limit_s=limit_s, options=options)
        server.settle()
        yield server
    finally:
        server.end()
