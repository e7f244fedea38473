"""A service under mixed requests and a fault every so often, and an account of both.

Faults: SIGKILL of server, virtual GPU and supervisor; SIGSTOP of the server (a hang); the port stolen from a
dead server; the supervisor's files failing as on a full disk. Clients that leave in mid-answer are there.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import psutil
from serve_home import Home, until

from flashnext.loopback import UnreachableError, request

FAULTS = ("server", "disk", "vgpu0", "port", "supervisor", "hang", "vgpu1")
NO_PROGRESS_S = 8  # the profile's watchdog here: a hang is noticed after so long
NOTICE_S = {"hang": NO_PROGRESS_S + 8.0}  # the others within 5 s
HELD_S = 4.0  # how long a thief keeps the port, a disk stays full
PATIENCE_S = 45.0  # how long a client waits for its answer or its error
SPARE_S = 5.0  # what a restart may take beyond a cold start


@dataclass
class Recovery:
    """One fault, in seconds since the start of the soak; bytes where it says so."""

    at_s: float
    fault: str
    noticed_s: float = 0.0  # from the fault to a state other than ready
    ready_s: float = 0.0  # from there (or from where the fault was lifted) to ready
    limit_s: float = 0.0
    restarts: int = 0
    processes: int = 0
    supervisor_bytes: int = 0
    server_bytes: int = 0
    device_bytes: list[int] = field(default_factory=list)

    @property
    def late(self) -> bool:
        return self.ready_s > self.limit_s


class Client(threading.Thread):
    """Asks again and again; each request must end by itself, with an answer or an error."""

    def __init__(self, port: int, number: int) -> None:
        super().__init__(daemon=True)
        self.url = f"http://127.0.0.1:{port}"
        self.number = number
        self.over = threading.Event()
        self.outcomes: Counter[str] = Counter()
        self.slowest_s = 0.0

    def run(self) -> None:
        chance = random.Random(self.number)
        while not self.over.wait(0.3):
            begin = time.monotonic()
            try:
                self.outcomes[self.ask(chance)] += 1
            except httpx.TimeoutException:
                self.outcomes["hung"] += 1
            except httpx.HTTPError:
                self.outcomes["error"] += 1
                self.over.wait(0.2)
            self.slowest_s = max(self.slowest_s, time.monotonic() - begin)

    def ask(self, chance: random.Random) -> str:
        kind = chance.choice(["completion", "completion", "chat", "stream", "leave"])
        text = f"{self.number} {chance.random()} " + "word " * chance.choice([5, 20, 80, 200])
        count = chance.choice([1, 16, 16, 40])
        body: dict[str, Any] = {"prompt": text, "n_predict": count, "ignore_eos": True}
        if kind == "chat":
            turn = {"role": "user", "content": text}
            body = {"messages": [turn], "max_tokens": count, "ignore_eos": True}
        path = "/v1/chat/completions" if kind == "chat" else "/completion"
        if kind in ("stream", "leave"):
            return self._stream({**body, "stream": True}, leave=kind == "leave")
        reply = httpx.post(f"{self.url}{path}", json=body, timeout=PATIENCE_S)
        if reply.status_code != 200:
            return f"status {reply.status_code}"
        data = reply.json()
        made = data["usage"]["completion_tokens"] if kind == "chat" else data["tokens_predicted"]
        return "answer" if made == count else "short"

    def _stream(self, body: dict[str, Any], *, leave: bool) -> str:
        last: dict[str, Any] = {}
        with httpx.stream("POST", f"{self.url}/completion", json=body, timeout=PATIENCE_S) as answer:
            if answer.status_code != 200:
                return f"status {answer.status_code}"
            for line in answer.iter_lines():
                if leave:
                    return "left"
                if line.startswith("data: "):
                    last = json.loads(line.removeprefix("data: "))
        return "answer" if last.get("stop") else "error"


class Thief(threading.Thread):
    """Takes a port as soon as it is free, and hangs up on whoever calls."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.port = port
        self.has_it, self.over = threading.Event(), threading.Event()

    def run(self) -> None:
        with socket.socket() as door:
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            while not self.over.is_set():
                with contextlib.suppress(OSError):
                    door.bind(("127.0.0.1", self.port))
                    door.listen()
                    break
                time.sleep(0.01)
            door.settimeout(0.1)
            self.has_it.set()
            while not self.over.is_set():
                with contextlib.suppress(TimeoutError):
                    door.accept()[0].close()


class Soak:
    """Runs faults against the service of a home. ``tell`` gets every recovery as it is done."""

    def __init__(self, home: Home, profile: Path, tell: Callable[[Recovery], None]) -> None:
        self.home, self.profile, self.tell = home, profile, tell
        self.running = home.serve(profile=profile)
        ready = self.running.until_state("ready", timeout_s=90)
        self.cold_s = float(ready["counters"]["start_to_ready_s"])
        self.limit_s = self.cold_s + SPARE_S
        self.recoveries: list[Recovery] = []
        self.clients: list[Client] = []
        self.seconds = 0.0

    def run(self, seconds: float, *, every_s: float = 20.0, clients: int = 2) -> None:
        begin = time.monotonic()
        self.clients = [Client(self.running.port, n) for n in range(clients)]
        for client in self.clients:
            client.start()
        faults = cycle(FAULTS)
        due = begin + every_s / 2
        while due < begin + seconds:
            time.sleep(max(0.0, due - time.monotonic()))
            due = max(due + every_s, time.monotonic() + every_s / 4)
            until(lambda: self._asked() == "ready", "ready before the next fault", 30)
            recovery = Recovery(
                round(time.monotonic() - begin, 1), next(faults), limit_s=round(self.limit_s, 2)
            )
            self._inflict(recovery)
            self._weigh(recovery)
            self.recoveries.append(recovery)
            self.tell(recovery)
        for client in self.clients:
            client.over.set()
        for client in self.clients:
            client.join(PATIENCE_S + 5)
            assert not client.is_alive(), "a client waits without end"
        self.seconds = time.monotonic() - begin

    @property
    def outcomes(self) -> Counter[str]:
        return sum((c.outcomes for c in self.clients), Counter())

    def summary(self) -> dict[str, Any]:
        late = [r for r in self.recoveries if r.late]
        return {
            "seconds": round(self.seconds),
            "cold_start_to_ready_s": self.cold_s,
            "limit_s": round(self.limit_s, 2),
            "faults": dict(Counter(r.fault for r in self.recoveries)),
            "slowest_ready_s": max(r.ready_s for r in self.recoveries),
            "late": [asdict(r) for r in late],
            "clients": dict(self.outcomes),
            "slowest_client_s": round(max(c.slowest_s for c in self.clients), 1),
            "supervisor_bytes": _range(r.supervisor_bytes for r in self.recoveries),
            "server_bytes": _range(r.server_bytes for r in self.recoveries),
            "device_bytes": sorted({b for r in self.recoveries for b in r.device_bytes}),
        }

    def _inflict(self, recovery: Recovery) -> None:
        fault, begin = recovery.fault, time.monotonic()
        state = self._status()
        pids = {c["name"]: c["pid"] for c in state["children"]}
        if fault == "supervisor":
            self.running.signal(signal.SIGKILL)
            self.running.end()
            self.home.nothing_left()
            recovery.noticed_s = round(time.monotonic() - begin, 2)
            self.running = self.home.serve(port=self.running.port, profile=self.profile)
            # the cold start is the supervisor's own count; starting Python comes on top
            began = time.monotonic()
            self.running.until_state("ready", timeout_s=self.limit_s + 60)
            recovery.ready_s = round(time.monotonic() - began, 2)
            return
        held = {"disk": self._full_disk, "port": self._stolen_port}.get(fault)
        if fault == "hang":
            os.kill(pids["server"], signal.SIGSTOP)
        elif held is None:
            os.kill(pids[fault], signal.SIGKILL)
        with held(pids["server"]) if held is not None else contextlib.nullcontext():
            self._noticed(NOTICE_S.get(fault, 5.0))
            recovery.noticed_s = round(time.monotonic() - begin, 2)
            lifted = time.monotonic()
            if fault == "port":
                time.sleep(HELD_S)
                lifted = time.monotonic()
            if fault == "disk":  # the restart itself has to work with a full disk
                recovery.ready_s = self._ready(lifted)
                return
        recovery.ready_s = self._ready(lifted)

    def _ready(self, since: float) -> float:
        """By the control port as well: the file is written a moment after the state has changed."""
        until(lambda: self._asked() == "ready", "ready again", self.limit_s + 60)
        return round(time.monotonic() - since, 2)

    def _noticed(self, timeout_s: float) -> None:
        until(lambda: self._asked() not in ("ready", "None"), "the fault is noticed", timeout_s)

    def _asked(self) -> str:
        return str(self._status().get("state"))

    def _status(self) -> dict[str, Any]:
        """By the control port: the record's file may be what fails."""
        port = int(self.running.state()["control"].rpartition(":")[2])
        with contextlib.suppress(UnreachableError):
            return dict(request(("127.0.0.1", port), "/status", timeout_s=10).data)
        return {}

    @contextlib.contextmanager
    def _full_disk(self, server: int) -> Any:
        own = psutil.Process(self.running.process.pid)
        hard = own.rlimit(psutil.RLIMIT_FSIZE)[1]
        own.rlimit(psutil.RLIMIT_FSIZE, (1, hard))
        try:
            os.kill(server, signal.SIGKILL)
            yield
        finally:
            own.rlimit(psutil.RLIMIT_FSIZE, (hard, hard))

    @contextlib.contextmanager
    def _stolen_port(self, server: int) -> Any:
        thief = Thief(self.running.port)
        thief.start()
        os.kill(server, signal.SIGKILL)
        try:
            assert thief.has_it.wait(5), "the port was not free"
            yield
        finally:
            thief.over.set()
            thief.join()

    def _weigh(self, recovery: Recovery) -> None:
        """What is there once it is ready again: as many processes as ever, memory as ever."""
        until(lambda: len(self.home.processes()) == 4, f"four processes: {self.home.processes()}", 5.0)
        recovery.processes = len(self.home.processes())
        state = self._status()
        recovery.restarts = state["restarts"]
        recovery.device_bytes = [d["allocated_bytes"] for d in state["devices"]]
        recovery.supervisor_bytes = psutil.Process(self.running.process.pid).memory_info().rss
        server = next(c["pid"] for c in state["children"] if c["name"] == "server")
        recovery.server_bytes = psutil.Process(server).memory_info().rss


def _range(values: Any) -> list[int]:
    found = list(values)
    return [min(found), max(found)]
