"""result.json: what the samples say, computed from samples.jsonl alone (same samples, same file)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import Field

from flashnext.artefacts import Artefact
from flashnext.bench.bound import BoundResult, against_bound
from flashnext.bench.matching import (
    IdentityResult,
    LogitResult,
    QualityResult,
    arm_pairs,
    halves,
    identity,
    logits,
    quality,
)
from flashnext.bench.metrics import METRICS
from flashnext.bench.prefill_times import PrefillTimes, prefill_times
from flashnext.bench.samples import End, Process, Request, Samples
from flashnext.bench.stats import LEVEL, Pair, Ratio, Verdict, paired_ratio, summarise, verdict

NAME = "result.json"
MARGIN = 0.03  # arms within this relative difference count as the same
POOLED = "pooled"
_NOT_OF_THE_ARM = ("devices", "model", "used_bytes", "shared", "held")


class CellResult(Artefact):
    """One metric of one arm in one cell: one value (the median of its requests) per process."""

    scenario: str
    metric: str
    cell: str
    depth: int
    arm: str
    processes: int
    requests: int
    median: float
    low: float
    high: float
    values: list[float]


class RatioResult(Artefact):
    """candidate / control of a metric; bounds are null where the processes are too few for an interval."""

    scenario: str
    metric: str
    cell: str
    candidate: str
    control: str
    n: int
    ratio: float
    low: float | None
    high: float | None
    level: float = LEVEL
    verdict: Verdict

    def as_ratio(self) -> Ratio:
        low = math.nan if self.low is None else self.low
        high = math.nan if self.high is None else self.high
        return Ratio(self.n, self.ratio, low, high, self.level)


class TransitionResult(Artefact):
    """Cost of a transition in ms (begin plus end): one median per process, then over processes."""

    arm: str
    processes: int
    transitions: int
    median_ms: float
    low_ms: float
    high_ms: float
    parts_ms: dict[str, float] = Field(description="median of each part that the markers name")


class CheckResult(Artefact):
    """Problems found with the processes of an arm, and the counts that must agree."""

    arm: str
    processes: int
    prompts: int
    begins: int
    ends: int
    growth_bytes: list[int] = Field(
        description="most that the use of each device grew from a process's ready to its end"
    )
    problems: list[str]


class Result(Artefact):
    """Everything a report shows, less the plots' raw points, which are read from the samples."""

    schema_version: int = 1
    profile: str
    seed: int
    created: str
    arms: list[str]
    facts: dict[str, Any]
    left_out: list[str]
    cells: list[CellResult]
    ratios: list[RatioResult]
    identity: list[IdentityResult]
    logits: list[LogitResult]
    quality: list[QualityResult]
    transitions: list[TransitionResult]
    bounds: list[BoundResult] = Field(default=[], description="prefill against link and kernels")
    prefill_times: list[PrefillTimes] = Field(default=[], description="a prompt's time by kind of work")
    checks: list[CheckResult]
    unfinished_processes: int
    planned_processes: int


def compute(samples: Samples) -> Result:
    """The result of samples. Raises SamplesUnreadableError where there is no header."""
    header = samples.header
    arms = list(header.plan["arms"])
    facts, cells = _facts(samples, arms), list(_cells(samples, arms))
    return Result(
        profile=header.profile,
        seed=header.seed,
        created=header.created,
        arms=arms,
        facts=facts,
        left_out=list(header.plan["left_out"]),
        cells=cells,
        ratios=list(_ratios(samples, arms)),
        identity=identity(samples, arms),
        logits=logits(samples, arms),
        quality=quality(samples, arms),
        transitions=list(_transitions(samples, arms)),
        bounds=against_bound(facts, prefill_cells(cells)),
        prefill_times=prefill_times(samples, arms),
        checks=[_check(samples, arm) for arm in arms],
        unfinished_processes=samples.unfinished,
        planned_processes=len(header.plan["sessions"]),
    )


def prefill_cells(cells: Sequence[CellResult]) -> list[CellResult]:
    """The speeds of the prefill scenario."""
    return [c for c in cells if c.scenario == "prefill" and c.metric == "prefill_tps"]


def _facts(samples: Samples, arms: Sequence[str]) -> dict[str, Any]:
    """The header's facts, and what the first process of each arm said of its build and model."""
    facts = dict(samples.header.facts)
    links = [link for h in samples.headers if "together_bytes_per_s" in (link := h.facts.get("link") or {})]
    if len(links) > 1:
        # another call, and it may be another machine: the bound takes the fastest link that was seen
        links.sort(key=lambda link: float(link["together_bytes_per_s"]))
        facts["link"] = {**links[-1], "slowest_call_bytes_per_s": links[0]["together_bytes_per_s"]}
    by_arm = {name: dict(found) for name, found in (facts.get("arms") or {}).items()}
    for arm in arms:
        first = next((p for p in samples.processes if p.arm == arm), None)
        if first is not None:
            said = {k: v for k, v in first.facts.items() if k not in _NOT_OF_THE_ARM}
            by_arm[arm] = {**by_arm.get(arm, {}), **said}
            if "model" in first.facts:
                facts.setdefault("model", first.facts["model"])
    return {**facts, "arms": by_arm}


def process_values(samples: Samples, scenario: str, metric: str, cell: str) -> dict[str, float]:
    """Process -> median of the metric over its good requests in a cell."""
    values: dict[str, list[float]] = {}
    for request in samples.requests:
        if request.scenario == scenario and request.cell == cell and usable(request):
            value = METRICS[metric].of(request)
            if value is not None and value > 0:
                values.setdefault(request.process, []).append(value)
    return {process: summarise(found).median for process, found in values.items()}


def usable(request: Request) -> bool:
    return request.error is None and not request.cancelled


def _speed_cells(samples: Samples) -> Iterator[tuple[str, str, int]]:
    """(scenario, cell, depth) of the speed scenarios, in the order of the samples."""
    kinds = {s["id"]: s["kind"] for s in samples.header.plan["scenarios"]}
    seen: dict[tuple[str, str, int], None] = {}
    for request in samples.requests:
        if kinds.get(request.scenario) == "speed":
            seen.setdefault((request.scenario, request.cell, request.depth))
    yield from seen


def _cells(samples: Samples, arms: Sequence[str]) -> Iterator[CellResult]:
    arm_of = {p.process: p.arm for p in samples.processes}
    for scenario, cell, depth in _speed_cells(samples):
        for metric in METRICS:
            by_process = process_values(samples, scenario, metric, cell)
            for arm in arms:
                values = [v for process, v in by_process.items() if arm_of[process] == arm]
                if not values:
                    continue
                summary = summarise(values)
                yield CellResult(
                    scenario=scenario,
                    metric=metric,
                    cell=cell,
                    depth=depth,
                    arm=arm,
                    processes=summary.n,
                    requests=_count(samples, scenario, cell, metric, arm, arm_of),
                    median=summary.median,
                    low=summary.low,
                    high=summary.high,
                    values=values,
                )


def _count(samples: Samples, scenario: str, cell: str, metric: str, arm: str, arm_of: dict[str, str]) -> int:
    return sum(
        r.scenario == scenario
        and r.cell == cell
        and arm_of[r.process] == arm
        and usable(r)
        and METRICS[metric].of(r) is not None
        for r in samples.requests
    )


def _ratios(samples: Samples, arms: Sequence[str]) -> Iterator[RatioResult]:
    cells = list(_speed_cells(samples))
    ordered = sorted(cells, key=lambda c: (c[0], c[2], c[1]))
    for scenario, group in groupby(ordered, key=lambda c: c[0]):
        names = [cell for _, cell, _ in group]
        for metric in METRICS:
            tables = {cell: process_values(samples, scenario, metric, cell) for cell in names}
            tables = {cell: table for cell, table in tables.items() if table}
            for control, candidate in arm_pairs(arms):
                rows = [_ratio(samples, t, control, candidate) for t in tables.values()]
                for cell, ratio in zip(tables, rows, strict=True):
                    if ratio.n:
                        yield _ratio_result(scenario, metric, cell, candidate, control, ratio)
                if len(tables) > 1:
                    pooled = _ratio(samples, _pool(tables), control, candidate)
                    if pooled.n:
                        yield _ratio_result(scenario, metric, POOLED, candidate, control, pooled)


def _pool(tables: dict[str, dict[str, float]]) -> dict[str, float]:
    """Process -> geometric mean over cells, of processes that have every cell."""
    common = set.intersection(*(set(t) for t in tables.values()))
    return {p: math.exp(sum(math.log(t[p]) for t in tables.values()) / len(tables)) for p in sorted(common)}


def _ratio(samples: Samples, values: dict[str, float], control: str, candidate: str) -> Ratio:
    pairs = []
    for first, second in halves(samples, control, candidate):
        if first.process in values and second.process in values:
            pairs.append(_pair(first, second, values))
    return paired_ratio(pairs, seed=samples.header.seed)


def _pair(control: Process, candidate: Process, values: dict[str, float]) -> Pair:
    return Pair(control.place < candidate.place, values[control.process], values[candidate.process])


def _ratio_result(
    scenario: str, metric: str, cell: str, candidate: str, control: str, ratio: Ratio
) -> RatioResult:
    say = verdict(ratio, higher_is_better=METRICS[metric].higher_is_better, margin=MARGIN)
    return RatioResult(
        scenario=scenario,
        metric=metric,
        cell=cell,
        candidate=candidate,
        control=control,
        n=ratio.n,
        ratio=ratio.estimate,
        low=None if math.isnan(ratio.low) else ratio.low,
        high=None if math.isnan(ratio.high) else ratio.high,
        level=ratio.level,
        verdict=say,
    )


def _transitions(samples: Samples, arms: Sequence[str]) -> Iterator[TransitionResult]:
    for arm in arms:
        parts: dict[str, list[float]] = {}
        totals, count = [], 0
        for process in samples.processes:
            found = [t for t in samples.ends[process.process].transitions if process.arm == arm]
            if not found:
                continue
            count += len(found)
            totals.append(summarise([float(t["total_ms"]) for t in found]).median)
            for transition in found:
                for name, ms in transition.get("parts_ms", {}).items():
                    parts.setdefault(name, []).append(float(ms))
        if totals:
            summary = summarise(totals)
            yield TransitionResult(
                arm=arm,
                processes=summary.n,
                transitions=count,
                median_ms=summary.median,
                low_ms=summary.low,
                high_ms=summary.high,
                parts_ms={name: summarise(values).median for name, values in parts.items()},
            )


def _check(samples: Samples, arm: str) -> CheckResult:
    own = [p for p in samples.processes if p.arm == arm]
    ends = [samples.ends[p.process] for p in own]
    return CheckResult(
        arm=arm,
        processes=len(own),
        prompts=sum(e.prompts for e in ends),
        begins=sum(e.begins for e in ends),
        ends=sum(e.ends for e in ends),
        growth_bytes=_growth(own, ends),
        problems=[f"process {e.process}: {text}" for e in ends for text in e.problems]
        + [
            f"process {r.process}: {r.item}: {r.error}"
            for r in samples.requests
            if r.error and r.process in {p.process for p in own}
        ],
    )


def _growth(processes: Sequence[Process], ends: Sequence[End]) -> list[int]:
    pairs = [(p.facts.get("used_bytes") or [], e.used_bytes) for p, e in zip(processes, ends, strict=True)]
    grown = [[b - a for a, b in zip(x, y, strict=True)] for x, y in pairs if x and len(x) == len(y)]
    return [max(column) for column in zip(*grown, strict=True)]


def file_in(folder: Path) -> Path:
    return folder / NAME
