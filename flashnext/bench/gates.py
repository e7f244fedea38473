"""Gates: predeclared limits, data in bench/gates.yaml, frozen into the samples when a run begins.

A gate passes, fails, or has too little data. A ratio gate decides by its estimate, and has too little data
with fewer processes per arm than stated or an interval wider than stated.
"""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from flashnext import paths
from flashnext.artefacts import Artefact
from flashnext.bench.scenarios import load_yaml
from flashnext.bench.stats import MIN_PROCESSES, Ratio


class Outcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    TOO_LITTLE = "too little data"


class GateBase(Artefact):
    id: str
    why: str = Field("", description="where the limit comes from")
    candidate: str = "candidate"
    control: str = "control"


class RatioGate(GateBase):
    """candidate / control of a metric, in each cell named or pooled over all cells of the scenario."""

    kind: Literal["ratio"]
    scenario: str
    metric: str
    cells: tuple[str, ...] | Literal["each", "pooled"]
    at_least: float | None = None
    at_most: float | None = None
    min_processes: int = Field(MIN_PROCESSES, ge=1)
    max_half_width: float = Field(0.03, gt=0, description="of the interval, relative to the ratio")


class ChecksGate(GateBase):
    """Every process of every arm: environment as demanded, begins = ends = prompts, no failure line."""

    kind: Literal["checks"]


class IdenticalGate(GateBase):
    """Greedy text of a scenario: a share of matched items whose text is equal to the byte."""

    kind: Literal["identical"]
    scenario: str
    at_least: float = 1.0
    min_items: int = 1


class LogitsGate(GateBase):
    """Log probabilities of the first token: largest and mean difference, and share of equal first choices."""

    kind: Literal["logits"]
    scenario: str
    max_at_most: float | None = None
    mean_at_most: float | None = None
    argmax_at_least: float | None = None
    min_items: int = 1


class QualityGate(GateBase):
    """No greedy question that the control answers and the candidate does not on more seeds than stated."""

    kind: Literal["quality"]
    scenario: str
    max_worse_seeds: int = 1
    min_answers: int = 1


class TransitionGate(GateBase):
    """The median cost of one transition (begin plus end) in the candidate, in ms."""

    kind: Literal["transition"]
    at_most_ms: float
    min_processes: int = Field(MIN_PROCESSES, ge=1)


Gate = Annotated[
    RatioGate | ChecksGate | IdenticalGate | LogitsGate | QualityGate | TransitionGate,
    Field(discriminator="kind"),
]


class Gates(Artefact):
    """The gates of one profile."""

    gates: tuple[Gate, ...]


class GateFile(Artefact):
    """bench/gates.yaml."""

    profiles: dict[str, tuple[Gate, ...]]


class GateResult(Artefact):
    id: str
    outcome: Outcome
    text: str
    why: str = ""


def gate_names(path: Path | None = None) -> list[str]:
    """The names that gates are declared for."""
    return list(load_yaml(path or paths.bench_dir() / "gates.yaml", GateFile).profiles)


def load_gates(profile: str, path: Path | None = None) -> Gates:
    """The gates of a profile, or of ``default`` where the profile has none of its own."""
    file = load_yaml(path or paths.bench_dir() / "gates.yaml", GateFile)
    return Gates(gates=file.profiles.get(profile, file.profiles["default"]))


def judge_ratio(gate: RatioGate, cell: str, ratio: Ratio) -> GateResult:
    """One cell of a ratio gate."""
    name = f"{gate.id} [{cell}]"
    if ratio.n < gate.min_processes or math.isnan(ratio.low):
        text = f"{ratio.n} processes per arm of {gate.min_processes} that the gate needs"
        return GateResult(id=name, outcome=Outcome.TOO_LITTLE, text=text, why=gate.why)
    text = f"{gate.metric} {gate.candidate}/{gate.control} {ratio.estimate:.3f}"
    text += f" ({ratio.low:.3f} to {ratio.high:.3f}, n {ratio.n})"
    if ratio.half_width > gate.max_half_width:
        text += f": the interval is wider than +-{gate.max_half_width:.0%}"
        return GateResult(id=name, outcome=Outcome.TOO_LITTLE, text=text, why=gate.why)
    low_ok = gate.at_least is None or ratio.estimate >= gate.at_least
    high_ok = gate.at_most is None or ratio.estimate <= gate.at_most
    text += f", limit {_limit(gate.at_least, gate.at_most)}"
    outcome = Outcome.PASSED if low_ok and high_ok else Outcome.FAILED
    return GateResult(id=name, outcome=outcome, text=text, why=gate.why)


def _limit(at_least: float | None, at_most: float | None) -> str:
    parts = [f">= {at_least:g}"] if at_least is not None else []
    parts += [f"<= {at_most:g}"] if at_most is not None else []
    return " and ".join(parts) or "none"


def overall(results: list[GateResult]) -> Outcome:
    """Failed where one failed; else too little data where one had too little, or none was declared."""
    outcomes = {r.outcome for r in results}
    if Outcome.FAILED in outcomes:
        return Outcome.FAILED
    if Outcome.TOO_LITTLE in outcomes or not outcomes:
        return Outcome.TOO_LITTLE
    return Outcome.PASSED
