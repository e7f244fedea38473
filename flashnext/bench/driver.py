"""Runs a plan: one fresh server process after the other, every row on the disk as soon as it is known."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashnext.bench import checks
from flashnext.bench.arms import Arm, timed
from flashnext.bench.asking import Asker, TokenizeError, now
from flashnext.bench.hold import vram_limit
from flashnext.bench.launching import running
from flashnext.bench.memory import Devices, Watch, devices_of
from flashnext.bench.metrics import prompt_tokens
from flashnext.bench.plan import Item, Plan, Session, estimate_s, items
from flashnext.bench.quality import QUESTIONS
from flashnext.bench.samples import End, Process, Request, Samples, Writer
from flashnext.bench.servers import Server
from flashnext.errors import ArmCheckFailedError, ArmServerFailedError
from flashnext.proc import wait_until

_MARKER_S = 2.0


@dataclass
class Progress:
    """What is known on the way. ``left_s``: estimate of what is left, from what was measured."""

    done: int
    total: int
    session: Session
    text: str
    left_s: float


@dataclass
class Options:
    """How a plan is run.

    ``serve``: further options of `flashnext serve`; ``max_s``: when to stop early; ``limit_bytes``: what
    every device shall have free while a process of an arm that is limited runs; ``sitting``: this boot of
    this machine.
    """

    start_limit_s: float = 900.0
    serve: Sequence[str] = ()
    max_s: float | None = None
    watch_memory: bool = True
    limit_bytes: int | None = None
    sitting: str = ""
    on_progress: Callable[[Progress], None] = field(default=lambda _: None)


class Driver:
    """Runs what is left of a plan. One at a time per folder: the caller holds its lock."""

    def __init__(
        self, plan: Plan, arms: Mapping[str, Arm], folder: Path, before: Samples | None, options: Options
    ) -> None:
        self.plan, self.arms, self.folder, self.options = plan, arms, folder, options
        self._attempts = dict(before.attempts) if before is not None else {}
        self._done = before.done_for(options.sitting) if before is not None else set()
        self._pace = 1.0  # measured over planned time
        self._took_s: dict[tuple[str, int, int], float] = {}  # by half block, of this call

    @property
    def left(self) -> list[Session]:
        return [s for s in self.plan.sessions if s.index not in self._done]

    def run(self, writer: Writer) -> bool:
        """Run until the plan is done (True) or the time is used up (False).

        Raises ArmServerFailedError or ArmCheckFailedError; what was finished before stays valid.
        """
        began = time.monotonic()
        for session in list(self.left):
            if self._must_stop(session, began):
                return False
            at = time.monotonic()
            self._session(session, writer)
            self._done.add(session.index)
            took = self._took_s.get(_half(session), 0.0)
            self._took_s[_half(session)] = took + time.monotonic() - at
            planned = self._planned_s(session)
            self._pace = 0.5 * self._pace + 0.5 * (time.monotonic() - at) / max(planned, 0.1)
        return True

    def _planned_s(self, session: Session) -> float:
        questions = {s.id: QUESTIONS for s in self.plan.scenarios if s.kind == "quality"}
        return estimate_s(self.plan, session, questions=questions)

    def _must_stop(self, session: Session, began: float) -> bool:
        """Between half blocks: whether the next whole one would not fit, so that pairs stay together."""
        if self.options.max_s is None or not self._took_s:
            return False
        whole = [s for s in self.plan.sessions if _half(s) == _half(session)]
        half = [s for s in self.left if _half(s) == _half(session)]
        if len(half) < len(whole):
            return False  # in the middle of one: finish it
        alike = [s for (group, _, _), s in self._took_s.items() if group == session.group]
        need = max(alike, default=self._pace * sum(self._planned_s(s) for s in half))
        return time.monotonic() - began + need > self.options.max_s

    def _session(self, session: Session, writer: Writer) -> None:
        arm = self._arm(session)
        attempt = self._attempts.get(session.index, 0) + 1
        self._attempts[session.index] = attempt
        name = f"{session.index}.{attempt}"
        log = self.folder / "logs" / f"{name}-{session.arm.replace(':', '-')}.log"
        self._say(session, "starting the server")
        with (
            vram_limit(self.options.limit_bytes if arm.limited else None) as held,
            running(arm, log, limit_s=self.options.start_limit_s, options=self.options.serve) as server,
        ):
            devices = devices_of(list(server.all_lines()))
            writer.add(self._process(session, name, attempt, server, devices, held))
            asker = Asker(server.address, name, self._watch(session, devices))
            rows, tokens = self._ask(session, asker, server, writer)
            server.settle_end()
            used = devices.used_bytes() if devices is not None else []
            problems = server.problems()
            found = checks.scan(server.lines())
        expected = [*tokens, *(prompt_tokens(r) for r in rows if not r.cancelled)]
        # of a client that left nobody knows how far its prompt came: begins are compared with ends alone
        exact = not any(r.cancelled for r in rows) and arm.url is None
        counted = checks.count_problems(arm, found, expected, exact=exact)
        writer.add(
            End(
                used_bytes=used,
                process=name,
                ended=now(),
                requests=len(rows),
                prompts=len(expected),
                begins=found.begins,
                ends=found.ends,
                problems=tuple([*problems, *found.problems, *counted]),
                transitions=found.transitions,
            )
        )

    def _arm(self, session: Session) -> Arm:
        arm = self.arms[session.arm]
        return timed(arm) if self._is_timed(session) else arm

    def _is_timed(self, session: Session) -> bool:
        return any(s.kind == "times" and s.group == session.group for s in self.plan.scenarios)

    def _watch(self, session: Session, devices: Devices | None) -> Watch | None:
        """Memory is watched in the first half block alone: asking a driver is not free."""
        if devices is None or not self.options.watch_memory or (session.block, session.half) != (0, 0):
            return None
        return Watch(devices)

    def _process(
        self,
        session: Session,
        name: str,
        attempt: int,
        server: Server,
        devices: Devices | None,
        held: list[dict[str, Any]],
    ) -> Process:
        arm = self._arm(session)
        seen: dict[str, str] = {}
        if server.pid is not None:
            seen = checks.environment_of(server.pid)
            problems = checks.environment_problems(arm, seen)
            if problems:
                raise ArmCheckFailedError(
                    f"the server of arm {arm.name} does not have the environment of its arm", context=problems
                )
        return Process(
            process=name,
            index=session.index,
            attempt=attempt,
            arm=session.arm,
            block=session.block,
            half=session.half,
            place=session.index,
            pid=server.pid,
            started=now(),
            ready_s=round(server.ready_s, 3),
            argv=server.argv,
            environment=seen,
            facts={
                **server.facts(),
                "shared": arm.url is not None,
                "used_bytes": devices.used_bytes() if devices is not None else [],
                "devices": devices.state() if devices is not None else [],
                "held": held,
            },
        )

    def _ask(
        self, session: Session, asker: Asker, server: Server, writer: Writer
    ) -> tuple[list[Request], list[int]]:
        """Every request of a session; the rows, and the prompt tokens of the warm-up."""
        rows: list[Request] = []
        try:
            warm = self._warm_up(session, asker)
        except TokenizeError as error:
            raise ArmServerFailedError(
                f"arm {session.arm}: {error}", context=[f"log: {server.log}"]
            ) from None

        seen = len(checks.prefill_times(server.lines())) if self._is_timed(session) else 0

        def keep(row: Request) -> None:
            nonlocal seen
            if self._is_timed(session) and row.error is None:
                found = _times_after(server, seen)
                row, seen = (
                    row.model_copy(update={"prefill_times": found[-1] if found else None}),
                    seen + len(found),
                )
            writer.add(row)
            rows.append(row)
            dead = server.problems() if row.error else []
            if dead:
                raise ArmServerFailedError(
                    f"arm {session.arm}: {dead[0]}",
                    context=[f"log: {server.log}", f"{row.item}: {row.error}"],
                )

        todo = list(items(self.plan, session))
        for number, item in enumerate(i for i in todo if i.kind != "soak"):
            self._say(session, f"{item.scenario} {item.cell} ({number + 1} of {len(todo)})")
            for row in asker.rows(item):
                keep(row)
        for scenario in self.plan.scenarios:
            if scenario.kind == "soak" and scenario.group == session.group:
                own = [i for i in todo if i.scenario == scenario.id]
                self._say(session, f"{scenario.id} for {scenario.duration_s:g} s")
                for row in asker.soak(own, scenario.duration_s, self.plan.seed):
                    keep(row)
        return rows, warm

    def _warm_up(self, session: Session, asker: Asker) -> list[int]:
        """As many unrecorded requests as a scenario of the group asks for at most, of the first cell."""
        own = [s for s in self.plan.scenarios if s.group == session.group and s.kind != "soak"]
        count = max((s.warm_up for s in own), default=0)
        first: Item | None = next(
            (i for i in items(self.plan, session) if i.kind in ("speed", "times")), None
        )
        if first is None:
            return []
        tokens = []
        for number in range(count):
            self._say(session, f"warm-up {number + 1} of {count}")
            answer = asker.warm_up(first, number)
            if answer.error is not None:
                raise TokenizeError(f"the warm-up failed: {answer.error}")
            tokens.append(int(answer.timings.get("prompt_n") or 0))
        return tokens

    def _say(self, session: Session, text: str) -> None:
        left = self._pace * sum(self._planned_s(s) for s in self.left)
        total = len(self.plan.sessions)
        self.options.on_progress(Progress(total - len(self.left), total, session, text, left))


def _times_after(server: Server, seen: int) -> list[dict[str, Any]]:
    """What was told of prompts after the first ``seen``; empty where the build has no times to tell."""
    found: list[dict[str, Any]] = []

    def told() -> bool:
        found[:] = checks.prefill_times(server.lines())[seen:]
        return bool(found)

    wait_until(told, timeout_s=_MARKER_S, every_s=0.05)
    return found


def _half(session: Session) -> tuple[str, int, int]:
    return (session.group, session.block, session.half)
