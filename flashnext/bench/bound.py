"""The physical bound of reading a prompt: experts cross the link once per micro-batch, and kernels run.

Upload and compute can overlap, so a prompt takes at least the longer of the two. The upload comes from the
link as it was measured in the run and the model's expert bytes, the kernels from the arm ``resident``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import Field

from flashnext.artefacts import Artefact

RESIDENT = "resident"
GOAL_CHUNK = 8192  # tokens per upload in the goal for prompts


class PrefillCell(Protocol):
    """What is needed of a cell of the prefill scenario: median speed of an arm at a depth."""

    @property
    def arm(self) -> str: ...
    @property
    def depth(self) -> int: ...
    @property
    def median(self) -> float: ...


@dataclass(frozen=True)
class Bound:
    """What has to cross for one micro-batch, and how fast all devices' links together take it."""

    expert_bytes: int
    link_bytes_per_s: float
    kernels_tps: Mapping[int, float]
    """By depth: speed with every expert on the devices, where it was measured."""

    def upload_tps(self, depth: int, micro_batch: int) -> float:
        """Tokens per second when the upload is all there is."""
        return depth / (math.ceil(depth / micro_batch) * self.expert_bytes / self.link_bytes_per_s)

    def prefill_tps(self, depth: int, micro_batch: int) -> float:
        """The slower of upload and kernels; the upload alone at depths where kernels were not measured."""
        return min(self.upload_tps(depth, micro_batch), self.kernels_tps.get(depth, math.inf))


class BoundResult(Artefact):
    """One cell of the prefill scenario against its bound."""

    depth: int
    arm: str
    micro_batch: int
    measured_tps: float
    upload_tps: float
    kernels_tps: float | None
    bound_tps: float
    times_bound: float = Field(description="measured time over the bound's")
    times_goal: float = Field(description=f"the same with one upload per {GOAL_CHUNK} tokens")


def bound_of(facts: Mapping[str, Any], cells: Iterable[PrefillCell] = ()) -> Bound | None:
    """The bound of a run; None where the link or the model's expert bytes were not measured."""
    expert_bytes = (facts.get("model") or {}).get("expert_bytes")
    link = (facts.get("link") or {}).get("together_bytes_per_s")
    if not expert_bytes or not link:
        return None
    kernels = {cell.depth: cell.median for cell in cells if cell.arm == RESIDENT}
    return Bound(int(expert_bytes), float(link), kernels)


def against_bound(facts: Mapping[str, Any], cells: Iterable[PrefillCell]) -> list[BoundResult]:
    """Every streaming arm's cells of the prefill speed against the bound; empty where there is none."""
    listed = list(cells)
    bound = bound_of(facts, listed)
    found = []
    for cell in listed:
        size = micro_batch_of(facts, cell.arm)
        if bound is None or size is None or cell.arm == RESIDENT:
            continue
        limit = bound.prefill_tps(cell.depth, size)
        found.append(
            BoundResult(
                depth=cell.depth,
                arm=cell.arm,
                micro_batch=size,
                measured_tps=cell.median,
                upload_tps=bound.upload_tps(cell.depth, size),
                kernels_tps=bound.kernels_tps.get(cell.depth),
                bound_tps=limit,
                times_bound=limit / cell.median,
                times_goal=bound.prefill_tps(cell.depth, GOAL_CHUNK) / cell.median,
            )
        )
    return found


def micro_batch_of(facts: Mapping[str, Any], arm: str) -> int | None:
    """Tokens per pass of a long prompt in an arm, from the arm's facts."""
    value = ((facts.get("arms") or {}).get(arm) or {}).get("prefill_micro_batch")
    return int(value) if value else None
