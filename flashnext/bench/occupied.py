"""A flashnext service that is running: refuse to measure beside it, or stop it and start it again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flashnext import paths, services
from flashnext.console import say
from flashnext.errors import GpuBusyError
from flashnext.proc import detach, run, wait_until

_STOP_S = 90.0
# a notify socket and watchdog of the old process are not the new one's
_OF_THE_OLD_PROCESS = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "INVOCATION_ID", "JOURNAL_STREAM")


@dataclass(frozen=True)
class Stopped:
    """How to start a service again: by its unit, or by its own command line and environment."""

    service: services.Service
    argv: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    unit: tuple[str, ...]  # words of systemctl before the verb's object; empty where there is no unit


@contextmanager
def free_of_services(*, stop: bool) -> Iterator[list[str]]:
    """While the block runs no service of this user does. Yields the remarks for the report.

    Raises GpuBusyError where one is live and ``stop`` is not asked for. What was stopped is started again
    however the block ends.
    """
    live = [s for s in services.every() if s.supervisor.alive]
    if live and not stop:
        raise GpuBusyError(
            "a service is running here",
            context=[f"port {s.port}: {s.profile} ({s.state}, pid {s.supervisor.pid})" for s in live],
        )
    stopped: list[Stopped] = []
    try:
        for service in live:
            known = _describe(service)
            _end(known)
            stopped.append(known)
        yield [f"the service on port {s.service.port} was stopped for the run" for s in stopped]
    finally:
        for known in stopped:
            _start(known)


def _describe(service: services.Service) -> Stopped:
    folder = Path(f"/proc/{service.supervisor.pid}")
    argv = tuple(w for w in (folder / "cmdline").read_bytes().decode().split("\0") if w)
    pairs = (entry.partition("=") for entry in (folder / "environ").read_bytes().decode().split("\0"))
    env = {name: value for name, _, value in pairs if name}
    unit = _unit(folder) if "INVOCATION_ID" in env else ()
    for name in _OF_THE_OLD_PROCESS:
        env.pop(name, None)
    return Stopped(service, argv, env, str((folder / "cwd").readlink()), unit)


def _unit(folder: Path) -> tuple[str, ...]:
    """``("--user", "flashnext.service")`` from the process's cgroup."""
    cgroup = (folder / "cgroup").read_text().strip().rsplit("/", 1)
    name = cgroup[-1]
    if not name.endswith(".service"):
        return ()
    return ("--user", name) if "user@" in cgroup[0] else (name,)


def _end(known: Stopped) -> None:
    service = known.service
    say(f"stopping the service on port {service.port} for the run")
    if known.unit:
        run(["systemctl", *known.unit[:-1], "stop", known.unit[-1]], timeout_s=_STOP_S)
    else:
        os.kill(service.supervisor.pid, signal.SIGTERM)
    everyone = (service.supervisor, *service.children)
    if not wait_until(lambda: not any(p.alive for p in everyone), timeout_s=_STOP_S, every_s=0.1):
        raise GpuBusyError(
            f"the service on port {service.port} did not end within {_STOP_S:g} s",
            hint="stop it by hand: `flashnext stop`",
        )


def _start(known: Stopped) -> None:
    say(f"starting the service on port {known.service.port} again")
    if known.unit:
        done = run(["systemctl", *known.unit[:-1], "--no-block", "start", known.unit[-1]], timeout_s=30.0)
        if not done.ok:
            say(f"warning: systemctl start {known.unit[-1]} failed: {done.err.strip()}")
        return
    log = paths.logs_dir() / f"serve-{known.service.port}-restarted.log"
    detach(known.argv, env=known.environment, cwd=Path(known.folder), log=log)
