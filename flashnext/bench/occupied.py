"""A flashnext service that is running: refuse to measure beside it, or stop it and start it again."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from flashnext import paths, services
from flashnext.console import tell
from flashnext.errors import GpuBusyError
from flashnext.proc import detach, is_nohup, run, wait_until

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
def free_of_services(*, stop: bool, measured: Collection[int] = ()) -> Iterator[list[str]]:
    """While the block runs no service of this user does, but those on the ports that are measured themselves.

    Yields the remarks for the report.

    Raises GpuBusyError where one is live and ``stop`` is not asked for. What was stopped is started again
    however the block ends.
    """
    live = [s for s in services.every() if s.supervisor.alive and s.port not in measured]
    if live and not stop:
        raise GpuBusyError(
            "a service is running here",
            context=[f"port {s.port}: {s.profile} ({s.state}, pid {s.supervisor.pid})" for s in live],
        )
    stopped: list[Stopped] = []
    try:
        for service in live:
            known = _describe(service)
            _say(f"stopping the service on port {service.port} for the run")
            with _signals_put_off():
                _ask_to_end(known)
                stopped.append(known)  # from here on it is started again, even if its end is not waited for
            if not _has_ended(known):
                stopped.remove(known)  # it may never end: nothing to wait for once more
                raise GpuBusyError(
                    f"the service on port {service.port} did not end within {_STOP_S:g} s",
                    hint="stop it by hand, and start it again after the bench: `flashnext stop`",
                )
        yield [f"the service on port {s.service.port} was stopped for the run" for s in stopped]
    finally:
        with _signals_put_off():
            for known in stopped:
                _start(known)


@contextmanager
def _signals_put_off() -> Iterator[None]:
    """What would end the run (Ctrl-C once more, a closed terminal) takes effect when the block is done."""
    came: list[int] = []
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {n: signal.signal(n, lambda by, _: came.append(by)) for n in ends if not is_nohup(n)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in came:
            signal.raise_signal(late)


def _say(text: str) -> None:
    """Nobody may be left to read it: a terminal that was closed, a `tee` that Ctrl-C ended before us."""
    tell(sys.stderr, text)


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


def _ask_to_end(known: Stopped) -> None:
    if known.unit:
        done = run(["systemctl", *known.unit[:-1], "--no-block", "stop", known.unit[-1]], timeout_s=30.0)
        if not done.ok:
            raise GpuBusyError(
                f"systemctl would not stop {known.unit[-1]}",
                context=[done.err.strip()],
                hint="stop it by hand before the bench",
            )
        return
    with suppress(ProcessLookupError):
        os.kill(known.service.supervisor.pid, signal.SIGTERM)


def _has_ended(known: Stopped) -> bool:
    everyone = (known.service.supervisor, *known.service.children)
    return wait_until(lambda: not any(p.alive for p in everyone), timeout_s=_STOP_S, every_s=0.1)


def _start(known: Stopped) -> None:
    port = known.service.port
    if not _has_ended(known):
        _say(f"warning: the service on port {port} has not ended yet: start it again yourself when it has")
        return
    _say(f"starting the service on port {port} again")
    if known.unit:
        done = run(["systemctl", *known.unit[:-1], "--no-block", "start", known.unit[-1]], timeout_s=30.0)
        if not done.ok:
            _say(f"warning: systemctl start {known.unit[-1]} failed: {done.err.strip()}")
        return
    there = ("--port", str(port))  # where its clients look for it, also if any port would do at first
    argv = known.argv if known.argv[-2:] == there else (*known.argv, *there)
    try:
        log = paths.logs_dir() / f"serve-{port}-restarted.log"
        detach(argv, env=known.environment, cwd=Path(known.folder), log=log)
    except OSError as error:
        _say(f"warning: it could not be started ({error}): {shlex.join(argv)}")
