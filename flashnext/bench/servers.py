"""Server processes of the arms: started fresh, ready when they answer, ended whatever happens."""

from __future__ import annotations

import http.client
import shlex
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from flashnext.artefacts import state_written
from flashnext.bench.arms import Arm
from flashnext.errors import ArmServerFailedError
from flashnext.loopback import UnreachableError, request
from flashnext.proc import environment, start, stop, wait_until

QUIET_S = 0.15  # a log that grew by nothing for so long is quiet


class Server(ABC):
    """A running server of an arm. ``pid`` is llama-server's own, None where it is not ours to know."""

    address: tuple[str, int]
    pid: int | None = None
    argv: tuple[str, ...] = ()
    ready_s: float = 0.0
    offset: int = 0  # of the log, at the moment the server was ready

    def __init__(self, log: Path) -> None:
        self.log = log

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What the server says of itself: build, features, restarts."""

    @abstractmethod
    def problems(self) -> list[str]:
        """What is wrong with its life so far: ended, restarted."""

    @abstractmethod
    def end(self) -> None:
        """End it. Harmless when it is gone."""

    def lines(self) -> Iterator[str]:
        """Lines of its log from ready on."""
        if self.log.exists():
            with self.log.open("rb") as stream:
                stream.seek(self.offset)
                for raw in stream:
                    yield raw.decode("utf-8", "replace")

    def settle_end(self) -> None:
        """Wait until what the last request caused is in the log."""
        offset = self.offset
        self.settle()
        self.offset = offset

    def all_lines(self) -> Iterator[str]:
        if self.log.exists():
            yield from self.log.read_text(errors="replace").splitlines()

    def settle(self) -> None:
        """Wait until the log is quiet, and take what comes next as this run's own."""
        size = -1

        def quiet() -> bool:
            nonlocal size
            now = self.log.stat().st_size if self.log.exists() else 0
            same, size = now == size, now
            return same

        wait_until(quiet, timeout_s=5.0, every_s=QUIET_S)
        self.offset = max(size, 0)


class StartedServer(Server):
    """A server that is a child of ours."""

    def __init__(self, arm: Arm, log: Path) -> None:
        super().__init__(log)
        self.arm = arm
        with state_written(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            self._stream: IO[bytes] = log.open("ab")
        self._child: subprocess.Popen[str] | None = None

    @property
    def child(self) -> subprocess.Popen[str]:
        assert self._child is not None
        return self._child

    def failed(self, reason: str) -> ArmServerFailedError:
        tail = list(self.all_lines())[-8:]
        return ArmServerFailedError(f"arm {self.arm.name}: {reason}", context=[f"log: {self.log}", *tail])

    @abstractmethod
    def launch(self, *, limit_s: float, options: Sequence[str] = ()) -> None:
        """Start it and wait until it is ready. Raises ArmServerFailedError after ``limit_s``."""

    def problems(self) -> list[str]:
        code = self.child.poll()
        return [] if code is None else [f"the server ended with code {code}"]

    def end(self) -> None:
        if self._child is not None:
            stop(self._child, term_s=20.0, again_s=5.0)
        self._stream.close()


class CommandServer(StartedServer):
    """A llama-server started by its own command line."""

    def launch(self, *, limit_s: float, options: Sequence[str] = ()) -> None:
        began = time.monotonic()
        port = free_port()
        words = shlex.split((self.arm.command or "").replace("{port}", str(port)))
        env = environment(self.arm.environment)
        self._child = start(words, env=env, stdout=self._stream.fileno(), stderr=subprocess.STDOUT)
        self.address, self.pid, self.argv = ("127.0.0.1", port), self._child.pid, tuple(words)
        if not wait_until(self._healthy, timeout_s=limit_s, every_s=0.05):
            raise self.failed(f"not ready within {limit_s:g} s")
        self.ready_s = time.monotonic() - began

    def _healthy(self) -> bool:
        code = self.child.poll()
        if code is not None:
            raise self.failed(f"the server ended with code {code} before it was ready")
        return is_healthy(self.address)

    def facts(self) -> dict[str, Any]:
        return {}


class UrlServer(Server):
    """A server that somebody else runs: nothing is started, checked or ended."""

    def __init__(self, arm: Arm, log: Path) -> None:
        super().__init__(log)
        parts = urlsplit(arm.url or "")
        self.address = (parts.hostname or "127.0.0.1", parts.port or 80)
        if not is_healthy(self.address):
            raise ArmServerFailedError(f"arm {arm.name}: {arm.url} does not answer")

    def facts(self) -> dict[str, Any]:
        return {"note": "not started by the bench: no process of its own, no check of its environment"}

    def problems(self) -> list[str]:
        return []

    def end(self) -> None:
        return None


def is_healthy(address: tuple[str, int]) -> bool:
    try:
        return request(address, "/health", timeout_s=2.0).status == http.client.OK
    except UnreachableError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
