"""Applies a run's frozen gates to its result."""

from __future__ import annotations

from collections.abc import Iterator

from flashnext.bench.gates import (
    ChecksGate,
    Gate,
    GateResult,
    Gates,
    IdenticalGate,
    LogitsGate,
    Outcome,
    QualityGate,
    RatioGate,
    TransitionGate,
    judge_ratio,
)
from flashnext.bench.result import POOLED, RatioResult, Result
from flashnext.bench.stats import Ratio


def judge(result: Result, gates: Gates, scenarios: set[str]) -> list[GateResult]:
    """Every gate whose scenario and arms are part of the run."""
    found: list[GateResult] = []
    for gate in gates.gates:
        scenario = getattr(gate, "scenario", None)
        if scenario is not None and scenario not in scenarios:
            continue
        if not isinstance(gate, ChecksGate) and not {gate.candidate, gate.control} <= set(result.arms):
            continue
        found += _judge(gate, result)
    return found


def _judge(gate: Gate, result: Result) -> list[GateResult]:
    if isinstance(gate, RatioGate):
        return list(_ratio(gate, result))
    if isinstance(gate, ChecksGate):
        return [_checks(gate, result)]
    if isinstance(gate, IdenticalGate):
        return [_identical(gate, result)]
    if isinstance(gate, LogitsGate):
        return [_logits(gate, result)]
    if isinstance(gate, QualityGate):
        return [_quality(gate, result)]
    return [_transition(gate, result)]


def _ratio(gate: RatioGate, result: Result) -> Iterator[GateResult]:
    rows: dict[str, RatioResult] = {
        r.cell: r
        for r in result.ratios
        if (r.scenario, r.metric, r.candidate, r.control)
        == (gate.scenario, gate.metric, gate.candidate, gate.control)
    }
    if gate.cells == "each":
        cells: tuple[str, ...] = tuple(c for c in rows if c != POOLED) or ("no cell",)
    elif gate.cells == "pooled":
        single = len(rows) == 1  # one cell: it is the pool
        cells = (next(iter(rows)),) if single else (POOLED,)
    else:
        cells = gate.cells
    nothing = Ratio(0, 1.0, float("nan"), float("nan"))
    for cell in cells:
        yield judge_ratio(gate, cell, rows[cell].as_ratio() if cell in rows else nothing)


def _result(gate: Gate, good: bool, text: str) -> GateResult:
    return GateResult(id=gate.id, outcome=Outcome.PASSED if good else Outcome.FAILED, text=text, why=gate.why)


def _too_little(gate: Gate, text: str) -> GateResult:
    return GateResult(id=gate.id, outcome=Outcome.TOO_LITTLE, text=text, why=gate.why)


def _checks(gate: ChecksGate, result: Result) -> GateResult:
    problems = [f"{c.arm}: {text}" for c in result.checks for text in c.problems]
    processes = sum(c.processes for c in result.checks)
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        return _result(gate, False, "; ".join(problems[:3]) + more)
    if processes < result.planned_processes:
        return _too_little(gate, f"{processes} of {result.planned_processes} processes have run")
    counts = ", ".join(f"{c.arm} {c.begins} begins {c.ends} ends {c.prompts} prompts" for c in result.checks)
    return _result(gate, True, f"{processes} processes: {counts}")


def _identical(gate: IdenticalGate, result: Result) -> GateResult:
    for row in result.identity:
        if (row.scenario, row.candidate, row.control) == (gate.scenario, gate.candidate, gate.control):
            text = f"{row.equal} of {row.items} greedy texts are equal to the byte"
            if row.items < gate.min_items:
                return _too_little(gate, f"{text}, {gate.min_items} are needed")
            return _result(gate, row.equal >= gate.at_least * row.items, text)
    return _too_little(gate, "no matched texts")


def _logits(gate: LogitsGate, result: Result) -> GateResult:
    for row in result.logits:
        if (row.scenario, row.candidate, row.control) != (gate.scenario, gate.candidate, gate.control):
            continue
        text = (
            f"largest difference {row.max_abs:.3f}, mean {row.mean_abs:.3f}, "
            f"first choice equal in {row.argmax_equal} of {row.items}"
        )
        if row.items < gate.min_items:
            return _too_little(gate, f"{text}; {gate.min_items} items are needed")
        good = (
            (gate.max_at_most is None or row.max_abs <= gate.max_at_most)
            and (gate.mean_at_most is None or row.mean_abs <= gate.mean_at_most)
            and (gate.argmax_at_least is None or row.argmax_equal >= gate.argmax_at_least * row.items)
        )
        return _result(gate, good, text)
    return _too_little(gate, "no matched log probabilities")


def _quality(gate: QualityGate, result: Result) -> GateResult:
    rows = [
        r
        for r in result.quality
        if (r.scenario, r.candidate, r.control, r.sampling)
        == (gate.scenario, gate.candidate, gate.control, "greedy")
        and r.cell != POOLED
    ]
    answers = sum(r.n for r in rows)
    if answers < gate.min_answers:
        return _too_little(gate, f"{answers} matched answers of {gate.min_answers}")
    worse = {q: n for r in rows for q, n in r.worse_questions.items() if n > gate.max_worse_seeds}
    right = f"right {sum(r.candidate_right for r in rows)} against {sum(r.control_right for r in rows)}"
    text = f"{answers} matched answers, {right}"
    text += f", lost {sum(r.lost for r in rows)}, won {sum(r.won for r in rows)}"
    if worse:
        text += "; worse on more than one seed: " + ", ".join(f"{q} ({n})" for q, n in worse.items())
    return _result(gate, not worse, text)


def _transition(gate: TransitionGate, result: Result) -> GateResult:
    for row in result.transitions:
        if row.arm == gate.candidate:
            text = f"median {row.median_ms:.0f} ms over {row.transitions} transitions"
            text += f", limit {gate.at_most_ms:g} ms"
            if row.processes < gate.min_processes:
                return _too_little(gate, f"{text}; {row.processes} processes of {gate.min_processes}")
            return _result(gate, row.median_ms <= gate.at_most_ms, text)
    return _too_little(gate, "no transition was seen")
