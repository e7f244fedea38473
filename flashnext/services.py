"""Running services: their record (state.json), their lock, and who is alive.

``flashnext serve`` writes one folder per port; ``status``, ``stop``, ``logs`` and the bench read it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
from pydantic import Field, ValidationError

from flashnext import paths
from flashnext.artefacts import Artefact, state_written
from flashnext.errors import AlreadyServingError, NotServingError

KEEP_ENDED = 20  # records and logs of services that have ended


class Process(Artefact):
    """A process by pid and start time (seconds since the epoch), so that a reused pid is not taken for it."""

    name: str
    pid: int
    started: float

    @property
    def alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < 1.0
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


class Transition(Artefact):
    """One change of state, with its reason."""

    at: datetime
    state: str
    reason: str


class Service(Artefact):
    """Content of state.json."""

    profile: str
    kind: str
    profile_file: str
    port: int
    url: str
    state: str
    reason: str
    started: datetime
    supervisor: Process
    children: tuple[Process, ...] = ()
    transitions: tuple[Transition, ...] = ()
    restarts: int = 0
    build: str = ""
    features: tuple[str, ...] = ()
    model: str = ""
    head: str | None = None
    argv: tuple[str, ...] = ()
    deviations: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    counters: dict[str, int | float] = Field(default_factory=dict)
    lean: str = ""
    metrics: dict[str, float] = Field(default_factory=dict)
    devices: tuple[dict[str, int | str], ...] = ()
    last_lines: tuple[str, ...] = ()
    control: str = ""
    log: str = ""


def folder(port: int) -> Path:
    return paths.state_dir() / "serve" / str(port)


def state_file(port: int) -> Path:
    return folder(port) / "state.json"


def read(port: int) -> Service | None:
    """The record of the service on a port, live or past; None where there is none or it is unreadable."""
    try:
        return Service.model_validate_json(state_file(port).read_bytes())
    except (OSError, ValidationError):
        return None


def every() -> list[Service]:
    """Every record there is, live or past, by port."""
    root = paths.state_dir() / "serve"
    if not root.is_dir():
        return []
    ports = sorted(int(entry.name) for entry in root.iterdir() if entry.name.isdigit())
    return [service for port in ports if (service := read(port)) is not None]


def prune(keep: int = KEEP_ENDED) -> list[int]:
    """Drop records and logs of ended services beyond the last ``keep``; random ports would pile them up.

    What lives, or has left processes behind, stays. Returns the ports that were forgotten.
    """
    ended = sorted(
        (s for s in every() if not any(p.alive for p in (s.supervisor, *s.children))),
        key=lambda s: s.started,
        reverse=True,
    )
    forgotten = []
    for service in ended[keep:]:
        # whoever prepares to serve there holds the lock, and has no record of its own yet
        with contextlib.suppress(AlreadyServingError), PortLock(service.port):
            shutil.rmtree(folder(service.port), ignore_errors=True)
            for log in paths.logs_dir().glob(f"serve-{service.port}.log*"):
                log.unlink(missing_ok=True)
            forgotten.append(service.port)
    return forgotten


def choose(port: int | None) -> Service:
    """The live service on a port, or the only live one. Raises NotServingError."""
    live = [s for s in every() if s.supervisor.alive and port in (None, s.port)]
    if len(live) == 1:
        return live[0]
    if not live:
        place = f"on port {port}" if port is not None else "here"
        raise NotServingError(f"nothing is served {place}")
    raise NotServingError(
        f"{len(live)} services are running: name one",
        context=[f"port {s.port}: {s.profile} ({s.state}, pid {s.supervisor.pid})" for s in live],
        hint="add `--port N`",
    )


def this_process() -> Process:
    return process_record("flashnext", os.getpid())


def process_record(name: str, pid: int) -> Process:
    """Identity of a live process; start time 0 when it is gone already."""
    try:
        return Process(name=name, pid=pid, started=psutil.Process(pid).create_time())
    except psutil.Error:
        return Process(name=name, pid=pid, started=0.0)


def now() -> datetime:
    return datetime.now(UTC)


class PortLock:
    """Held while a port is served. The kernel drops it with the process, so a stale file locks nobody out."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.path = paths.run_dir() / f"serve-{port}.lock"
        self._handle: int | None = None

    def __enter__(self) -> Self:
        with state_written(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 32).decode("ascii", "replace").strip() or "unknown"
            os.close(handle)
            raise AlreadyServingError(
                f"port {self.port} is served by another flashnext",
                context=[f"pid {holder}", f"lock {self.path}"],
            ) from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        self._handle = handle
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
