"""The plan of a run, made before anything starts: which server processes in which order, and their requests.

Order: a block runs every arm forwards and then backwards (for two arms A B B A), so that a linear drift of
the machine (temperature, clocks, page cache) weighs on every pair of arms once in each direction. Which arm
leads is drawn per block from the seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

from flashnext.artefacts import Artefact
from flashnext.bench.scenarios import Cell, Kind, Pace, Scenario
from flashnext.errors import UsageError

Group = str  # scenarios of one group share server processes: "shared", or the id of a scenario with its own


class PlannedScenario(Artefact):
    """A scenario as this run does it (settings of the profile, cells that fit the context)."""

    id: str
    title: str
    kind: Kind
    cell_by: str
    sampling: tuple[str, ...]
    top: int
    spread: int = 0
    warm_up: int
    cells: tuple[Cell, ...]
    duration_s: float
    group: Group


class Session(Artefact):
    """One fresh server process of one arm. ``index`` is its place in time among all of the run."""

    index: int
    group: Group
    block: int
    half: int
    arm: str


class Item(Artefact):
    """One request, or for quality one conversation. Equal in both arms of a half block."""

    scenario: str
    kind: Kind
    cell: str
    item: str
    depth: int
    seed: int
    generate: int
    sampling: str
    top: int
    spread: int = 0


class Plan(Artefact):
    profile: str
    seed: int
    arms: tuple[str, ...]
    scenarios: tuple[PlannedScenario, ...]
    sessions: tuple[Session, ...]
    left_out: tuple[str, ...]
    pace: Pace


def make_plan(
    scenarios: Sequence[Scenario],
    *,
    profile: str,
    arms: Sequence[str],
    seed: int,
    pace: Pace,
    processes: int | None = None,
    context: int | None = None,
) -> Plan:
    """Plan ``scenarios`` under ``profile`` for ``arms`` (the soak runs on the last of them alone).

    ``processes`` per arm overrides the scenarios' own; cells that do not fit in ``context`` tokens are left
    out and named in the plan.
    """
    if len(set(arms)) != len(arms) or not arms:
        raise UsageError("each arm must be named once", context=[", ".join(arms)])
    if processes is not None and processes % 2:
        raise UsageError("--processes must be even: each block runs the arms forwards and then backwards")
    planned, left_out = [], []
    wanted: dict[Group, int] = {}
    for scenario in scenarios:
        settings = scenario.for_profile(profile)
        fits = [c for c in settings.cells if context is None or c.depth + c.generate <= context]
        left_out += [
            f"{scenario.id} at {c.depth}: {c.depth + c.generate} tokens, the context holds {context}"
            for c in settings.cells
            if c not in fits
        ]
        group = scenario.id if scenario.own_process else "shared"
        if not fits and not settings.duration_s:
            left_out.append(f"{scenario.id}: nothing to do under the profile {profile}")
            continue
        planned.append(_planned(scenario, profile, tuple(fits), group))
        wanted[group] = max(wanted.get(group, 0), processes or settings.processes)
    sessions: list[Session] = []
    for group, count in wanted.items():
        kinds = {s.kind for s in planned if s.group == group}
        if kinds == {"soak"}:
            sessions.append(Session(index=len(sessions), group=group, block=0, half=0, arm=arms[-1]))
        else:
            sessions += order(arms, count // 2, group=group, seed=seed, start=len(sessions))
    return Plan(
        profile=profile,
        seed=seed,
        arms=tuple(arms),
        scenarios=tuple(planned),
        sessions=tuple(sessions),
        left_out=tuple(left_out),
        pace=pace,
    )


def order(arms: Sequence[str], blocks: int, *, group: Group, seed: int, start: int = 0) -> list[Session]:
    """Mirrored blocks: every arm once forwards, once backwards, the first order drawn from the seed."""
    rng = random.Random(f"{seed}/{group}")
    sessions: list[Session] = []
    for block in range(blocks):
        forwards = list(arms)
        rng.shuffle(forwards)
        for half, names in enumerate((forwards, forwards[::-1])):
            for arm in names:
                index = start + len(sessions)
                sessions.append(Session(index=index, group=group, block=block, half=half, arm=arm))
    return sessions


def _planned(scenario: Scenario, profile: str, cells: tuple[Cell, ...], group: Group) -> PlannedScenario:
    settings = scenario.for_profile(profile)
    return PlannedScenario(
        id=scenario.id,
        title=scenario.title,
        kind=scenario.kind,
        cell_by=scenario.cell_by,
        sampling=scenario.sampling,
        top=scenario.top,
        spread=scenario.spread,
        warm_up=settings.warm_up,
        cells=cells,
        duration_s=settings.duration_s,
        group=group,
    )


def items(plan: Plan, session: Session) -> Iterator[Item]:
    """The requests of a session, in order.

    Speed items repeat in every process, so that a cell has as many values as processes; quality items differ
    by half block, so that each (question, seed) is answered once per arm.
    """
    for scenario in plan.scenarios:
        if scenario.group != session.group:
            continue
        for cell in scenario.cells:
            for sampling in scenario.sampling:
                for k in range(cell.requests):
                    repeat = 2 * session.block + session.half if scenario.kind == "quality" else 0
                    number = repeat * cell.requests + k
                    by_seed = scenario.cell_by == "depth-and-seed"
                    yield Item(
                        scenario=scenario.id,
                        kind=scenario.kind,
                        cell=f"{cell.depth}/s{k}" if by_seed else str(cell.depth),
                        item=f"{scenario.id}/{cell.depth}/{sampling}/{number}",
                        depth=cell.depth,
                        seed=plan.seed * 1000 + number,
                        generate=cell.generate,
                        sampling=sampling,
                        top=scenario.top,
                        spread=scenario.spread,
                    )


def estimate_s(plan: Plan, session: Session, *, questions: Mapping[str, int] | None = None) -> float:
    """Seconds that a session takes at the plan's pace."""
    total = plan.pace.start_s
    for scenario in plan.scenarios:
        if scenario.group == session.group:
            total += scenario.duration_s
    for item in items(plan, session):
        turns = (questions or {}).get(item.scenario, 1)
        total += item.depth / plan.pace.prefill_tps + turns * item.generate / plan.pace.decode_tps
    return total
