"""Import of `llama-bench -o json`: its runs as the rows of one process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from flashnext.bench.plan import Plan, PlannedScenario, Session
from flashnext.bench.samples import End, Header, Process, Request, Row
from flashnext.bench.scenarios import Cell, Pace
from flashnext.errors import SamplesUnreadableError

_FACTS = ("build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_filename", "model_type")


class _Test(BaseModel):
    """What is read of one test; llama-bench writes more."""

    n_prompt: int = Field(ge=0)
    n_gen: int = Field(ge=0)
    n_depth: int = Field(0, ge=0)
    samples_ns: list[Annotated[float, Field(gt=0)]] = Field(min_length=1)


_HINT = "run llama-bench with `-o json` (or jsonl) and save its stdout"


def read(path: Path) -> list[dict[str, Any]]:
    """The tests of a file, JSON or JSON lines. Raises SamplesUnreadableError for what is not llama-bench's.

    A file of which no test can be taken over (all of them mix prompt and generation) is refused, too.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SamplesUnreadableError(f"cannot read {path}", context=[str(error)], hint=_HINT) from None
    data = _parsed(path, text)
    what = f"{path} is not the output of `llama-bench -o json`"
    if not isinstance(data, list) or not data:
        raise SamplesUnreadableError(what, context=["it holds no list of tests"], hint=_HINT)
    for number, test in enumerate(data, 1):
        try:
            _Test.model_validate(test)
        except ValidationError as error:
            found = error.errors()[0]
            place = ".".join(map(str, found["loc"])) or "it"
            context = [f"test {number}: {place}: {found['msg'].lower()}"]
            raise SamplesUnreadableError(what, context=context, hint=_HINT) from None
    if not any(_is_plain(t) for t in data):
        raise SamplesUnreadableError(
            f"{path} holds no test that can be taken over",
            context=["every test mixes prompt and generation: its time is not split"],
            hint="run llama-bench with -p and -n instead of -pg",
        )
    return data


def _parsed(path: Path, text: str) -> Any:
    """JSON, or a line of JSON for each test."""
    try:
        data = json.loads(text)
        return [data] if isinstance(data, dict) else data
    except ValueError as error:
        try:
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError:
            raise SamplesUnreadableError(f"{path} is not JSON", context=[str(error)], hint=_HINT) from None


def _is_plain(test: dict[str, Any]) -> bool:
    return bool(test["n_prompt"]) != bool(test["n_gen"])


def rows(tests: Sequence[dict[str, Any]], *, arm: str, source: str, created: str) -> Iterator[Row]:
    """Header, process, one request per sample, end. Tests of prompt and generation mixed are left out."""
    kept = [t for t in tests if _is_plain(t)]
    left_out = tuple(
        f"test of {t['n_prompt']} prompt and {t['n_gen']} generated tokens together: its time is not split"
        for t in tests
        if t not in kept
    )
    plan = _plan(kept, arm, left_out)
    facts = {"imported_from": source, **{k: tests[0][k] for k in _FACTS if k in tests[0]}}
    yield Header(
        created=created,
        command=["flashnext", "bench", "import", source],
        profile="llama-bench",
        seed=0,
        plan=plan.model_dump(mode="json"),
        gates={"gates": []},
        facts=facts,
    )
    yield Process(
        process="0.1",
        index=0,
        attempt=1,
        arm=arm,
        block=0,
        half=0,
        place=0,
        pid=None,
        started=created,
        ready_s=0,
    )
    count = 0
    for test in kept:
        for number, ns in enumerate(test["samples_ns"]):
            yield _request(test, number, float(ns) / 1e6, created)
            count += 1
    yield End(process="0.1", ended=created, requests=count, prompts=0, begins=0, ends=0)


def _request(test: dict[str, Any], number: int, ms: float, created: str) -> Request:
    depth = int(test.get("n_depth") or 0)
    if test["n_prompt"]:
        scenario, size = "prefill", int(test["n_prompt"])
        timings: dict[str, Any] = {"prompt_n": size, "prompt_ms": ms}
        cell = str(size) if not depth else f"{size}@{depth}"
    else:
        scenario, size = "decode", int(test["n_gen"])
        timings = {"predicted_n": size, "predicted_ms": ms}
        cell = str(depth)
    return Request(
        process="0.1",
        scenario=scenario,
        cell=cell,
        item=f"{scenario}/{cell}/greedy/{number}",
        depth=size if test["n_prompt"] else depth,
        seed=number,
        started=created,
        wall_ms=ms,
        timings=timings,
    )


def _plan(tests: Sequence[dict[str, Any]], arm: str, left_out: tuple[str, ...]) -> Plan:
    names = {"prefill" if t["n_prompt"] else "decode" for t in tests}
    scenarios = tuple(
        PlannedScenario(
            id=name,
            title=f"{name}, by llama-bench",
            kind="speed",
            cell_by="depth",
            sampling=("greedy",),
            top=0,
            warm_up=0,
            cells=(Cell(depth=1),),
            duration_s=0,
            group="shared",
        )
        for name in sorted(names)
    )
    return Plan(
        profile="llama-bench",
        seed=0,
        arms=(arm,),
        scenarios=scenarios,
        sessions=(Session(index=0, group="shared", block=0, half=0, arm=arm),),
        left_out=left_out,
        pace=Pace(start_s=0, prefill_tps=1, decode_tps=1),
    )
