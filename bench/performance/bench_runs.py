"""A folder of `flashnext bench` as lines of the performance section: cells, and the gates it had frozen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from readings import Figure, values

from flashnext.bench import result as results
from flashnext.bench import samples as sample_files
from flashnext.bench.gates import (
    ChecksGate,
    GateResult,
    Gates,
    LogitsGate,
    Outcome,
    RatioGate,
    TransitionGate,
)
from flashnext.bench.matching import LogitResult
from flashnext.bench.report import judge_samples
from flashnext.bench.result import POOLED, CellResult, RatioResult, Result
from flashnext.bench.samples import Samples

METRICS = {"prefill_tps": "t/s", "decode_tps": "t/s"}


def read(folder: Path) -> tuple[Samples, list[Figure]]:
    """The samples and what they say; ids begin with the folder's name."""
    samples = sample_files.read(sample_files.file_in(folder))
    result = results.compute(samples)
    gates = Gates.model_validate(samples.header.gates)
    judged = {g.id: g for g in judge_samples(samples, result)}
    arms = samples.header.facts.get("arms", {})
    return samples, list(_figures(folder.name, result, gates, judged, _called(arms)))


def _called(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """What a reader calls an arm: the candidate is what its profile makes of a prompt."""
    features = arms.get("candidate", {}).get("features", "")
    names = {"lean-prefill": "lean prefill", "phase-prefill": "transaction"}
    return {"candidate": next((name for id_, name in names.items() if id_ in features), "candidate")}


def _figures(
    name: str, result: Result, gates: Gates, judged: dict[str, GateResult], called: Mapping[str, str]
) -> Iterator[Figure]:
    goals = {
        (gate.candidate, gate.control, gate.scenario, gate.metric, cell): (gate, found)
        for gate in gates.gates
        if isinstance(gate, RatioGate)
        for cell, found in _cells(gate, judged)
    }
    pairs = {("candidate", "control"), *(key[:2] for key in goals)}
    for row in result.ratios:
        key = (row.candidate, row.control, row.scenario, row.metric, row.cell)
        one_seed = row.scenario == "decode" and row.cell != POOLED
        if not _shown(row, pairs) or (one_seed and key not in goals):
            continue
        goal, reached = "", None
        if key in goals:
            gate, found = goals[key]
            count = f"n {row.n} of {gate.min_processes}"
            why = count if row.n < gate.min_processes else f"wider than +-{gate.max_half_width:.0%}"
            goal, reached = _judged(f"{gate.at_least:g} x or more", found, why)
        arm = called.get(row.candidate, row.candidate)
        other = "" if row.candidate in ("candidate", "control") else f"-{row.candidate}"
        yield Figure(
            f"{name}/{row.scenario}-{row.metric}-{row.cell}{other}",
            f"{_what(row.metric, row.cell)}, {arm} ({name})",
            _speeds(result, row.scenario, row.metric, row.cell, row.candidate),
            f"{row.control}: {_speeds(result, row.scenario, row.metric, row.cell, row.control)}",
            row.ratio,
            goal,
            reached,
            "" if row.low is None else f" ({row.low:.2f} to {row.high:.2f})",
        )
    yield from _others(name, result, gates, judged, called)
    yield from _bounds(name, result)


def _shown(row: RatioResult, pairs: set[tuple[str, str]]) -> bool:
    """Prompts by depth, and decode: behind them, and behind short ones all seeds and each."""
    against = (row.candidate, row.control) in pairs or row.control == "vanilla"
    if not against or row.candidate == "resident":
        return False
    if row.scenario == "decode":
        return row.metric == "decode_tps"
    return row.scenario == "prefill" and row.metric in METRICS and row.cell != POOLED


def _cells(gate: RatioGate, judged: dict[str, GateResult]) -> Iterator[tuple[str, GateResult]]:
    for id_, found in judged.items():
        if id_.startswith(f"{gate.id} ["):
            yield id_[len(gate.id) + 2 : -1], found


def _judged(limit: str, found: GateResult, why: str) -> tuple[str, bool | None]:
    """A gate's limit and outcome; with too little data what is missing, instead of a verdict."""
    if found.outcome == Outcome.TOO_LITTLE:
        return f"{limit}: no verdict ({why})", None
    return limit, found.outcome == Outcome.PASSED


def _what(metric: str, cell: str) -> str:
    """``2048/s1``, ``8192`` or the pool in words."""
    if cell == POOLED:
        return "decode, all seeds and depths"
    depth, _, seed = cell.partition("/s")
    if metric == "prefill_tps":
        return f"prompt of {int(depth):,} tokens"
    return f"decode behind {int(depth):,} tokens{f', seed {seed}' if seed else ''}"


def _speeds(result: Result, scenario: str, metric: str, cell: str, arm: str) -> str:
    """One value a process; of a pool the medians of its cells."""
    rows: list[CellResult] = [
        c for c in result.cells if (c.scenario, c.metric, c.arm) == (scenario, metric, arm)
    ]
    if cell == POOLED:
        return values([c.median for c in rows], METRICS[metric])
    return values(next(c.values for c in rows if c.cell == cell), METRICS[metric])


def _others(
    name: str, result: Result, gates: Gates, judged: dict[str, GateResult], called: Mapping[str, str]
) -> Iterator[Figure]:
    for gate in gates.gates:
        found = judged.get(gate.id)
        if found is None:
            continue
        if isinstance(gate, TransitionGate):
            for row in (r for r in result.transitions if r.arm == gate.candidate):
                parts = ", ".join(f"{part} {ms:.0f}" for part, ms in row.parts_ms.items() if ms >= 1)
                of = f"{row.processes} processes, {row.transitions} transitions"
                ours = f"{row.median_ms:.0f} ms (median of {of})"
                count = f"n {row.processes} of {gate.min_processes}"
                goal, reached = _judged(f"{gate.at_most_ms:g} ms or less", found, count)
                what = f"one transition ({name})"
                yield Figure(f"{name}/{gate.id}", what, ours, f"of it: {parts} ms", None, goal, reached)
        elif isinstance(gate, LogitsGate):
            for logits in result.logits:
                if (logits.candidate, logits.control) == (gate.candidate, gate.control):
                    yield _logits(name, gate, logits, found, called)
        elif isinstance(gate, ChecksGate) and found.outcome == Outcome.FAILED:
            yield Figure(
                f"{name}/{gate.id}", f"processes in order ({name})", found.text, "", None, "all", False
            )


def _logits(
    name: str, gate: LogitsGate, row: LogitResult, found: GateResult, called: Mapping[str, str]
) -> Figure:
    ours = f"differ by {row.max_abs:.3f} at most, {row.mean_abs:.3f} in the mean"
    same = f"likeliest token the same in {row.argmax_equal} of {row.items} prompts"
    limits = [(gate.max_at_most, "at most"), (gate.mean_at_most, "in the mean")]
    limit = ", ".join(f"{value:g} {word}" for value, word in limits if value is not None)
    goal, reached = _judged(limit, found, f"{row.items} of {gate.min_items} prompts")
    arm = called.get(row.candidate, row.candidate)
    what = f"log probabilities of a first token, {arm} and {row.control} ({name})"
    return Figure(f"{name}/{gate.id}", what, ours, same, None, goal, reached)


def _bounds(name: str, result: Result) -> Iterator[Figure]:
    for row in result.bounds:
        if row.arm == "candidate":
            if row.kernels_tps is None:
                continue  # the upload alone is no bound where kernels may take longer
            kernels = f", kernels alone {row.kernels_tps:,.0f}"
            yield Figure(
                f"{name}/bound-{row.depth}",
                f"prompt of {row.depth:,} tokens, time over its bound ({name})",
                f"{row.measured_tps:,.0f} t/s",
                f"upload alone {row.upload_tps:,.0f}{kernels} t/s",
                row.times_bound,
            )
