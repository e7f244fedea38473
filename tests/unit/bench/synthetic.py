"""Samples of a run that never ran, with speeds and answers of our choosing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from flashnext.bench.gates import Gates
from flashnext.bench.plan import Item, Plan, Session, items, make_plan
from flashnext.bench.samples import End, Header, Process, Request, Row, Samples
from flashnext.bench.scenarios import Pace, Scenario

NOW = "2026-01-02T03:04:05Z"
PACE = Pace(start_s=1, prefill_tps=1000, decode_tps=50)
Speed = Callable[[Session, random.Random], float]


def scenario(name: str, kind: str = "speed", **more: Any) -> Scenario:
    settings = {"default": {"processes": 6, "cells": more.pop("cells", [{"depth": 1024, "generate": 64}])}}
    return Scenario.model_validate({"id": name, "title": name, "kind": kind, "settings": settings, **more})


def plan(*scenarios: Scenario, arms: Iterable[str] = ("control", "candidate"), seed: int = 1) -> Plan:
    return make_plan(scenarios, profile="demo", arms=tuple(arms), seed=seed, pace=PACE)


def header(made: Plan, gates: Gates | None = None, **facts: Any) -> Header:
    return Header(
        created=NOW,
        command=["flashnext", "bench", "all"],
        profile=made.profile,
        seed=made.seed,
        plan=made.model_dump(mode="json"),
        gates=(gates or Gates(gates=())).model_dump(mode="json"),
        facts=facts,
    )


def process(session: Session, attempt: int = 1) -> Process:
    return Process(
        process=f"{session.index}.{attempt}",
        index=session.index,
        attempt=attempt,
        arm=session.arm,
        block=session.block,
        half=session.half,
        place=session.index,
        pid=1000 + session.index,
        started=NOW,
        ready_s=1.0,
    )


def request(session: Session, item: Item, prefill: float, decode: float, **more: Any) -> Request:
    return Request(
        process=more.pop("process", f"{session.index}.1"),
        scenario=item.scenario,
        cell=item.cell,
        item=more.pop("named", item.item),
        depth=item.depth,
        seed=item.seed,
        started=NOW,
        wall_ms=1000.0,
        ttft_ms=item.depth / prefill * 1000,
        timings={
            "prompt_n": item.depth,
            "prompt_ms": item.depth / prefill * 1000,
            "predicted_n": item.generate,
            "predicted_ms": item.generate / decode * 1000,
            "draft_n": 60,
            "draft_n_accepted": 48,
        },
        text=more.pop("text", f"text of {item.item}"),
        **more,
    )


def end(name: str, requests: int, **more: Any) -> End:
    values: dict[str, Any] = {"prompts": requests, "begins": 0, "ends": 0, **more}
    return End(process=name, ended=NOW, requests=requests, **values)


def rows(
    made: Plan,
    gates: Gates | None = None,
    *,
    effect: float = 1.0,
    prefill_effect: float = 1.0,
    drift: float = 0.0,
    noise: float = 0.005,
    seed: int = 1,
    **facts: Any,
) -> list[Row]:
    """A complete run: decode 100 t/s and prefill 1000 t/s in every arm, times the effects in `candidate`."""
    rng = random.Random(seed)
    found: list[Row] = [header(made, gates, **facts)]
    for session in made.sessions:
        of_process = 1 + rng.gauss(0, noise) + drift * session.index
        candidate = session.arm == "candidate"
        found.append(process(session))
        asked = list(items(made, session))
        for item in asked:
            prefill = 1000 * of_process * (prefill_effect if candidate else 1)
            decode = 100 * of_process * (effect if candidate else 1)
            found.append(request(session, item, prefill, decode))
        found.append(end(f"{session.index}.1", len(asked)))
    return found


def samples(made: Plan, gates: Gates | None = None, **more: Any) -> Samples:
    return Samples(rows(made, gates, **more))
