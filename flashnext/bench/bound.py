"""The physical bound of reading a prompt: the experts have to cross the link once per micro-batch.

No arm can be faster than this without experts kept on the devices; the kernels' own time is a second bound,
measured as an arm of its own with the experts resident, where they fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bound:
    """What has to cross for one micro-batch, and how fast all devices' links together take it."""

    expert_bytes: int
    link_bytes_per_s: float

    def prefill_tps(self, depth: int, micro_batch: int) -> float:
        """Tokens per second when the upload is all there is."""
        return depth / (math.ceil(depth / micro_batch) * self.expert_bytes / self.link_bytes_per_s)


def bound_of(facts: Mapping[str, Any]) -> Bound | None:
    """The bound from a run's facts; None where the link or the model's expert bytes were not measured."""
    expert_bytes = (facts.get("model") or {}).get("expert_bytes")
    link = (facts.get("link") or {}).get("together_bytes_per_s")
    return Bound(int(expert_bytes), float(link)) if expert_bytes and link else None


def micro_batch_of(facts: Mapping[str, Any], arm: str) -> int | None:
    """Tokens per pass of a long prompt in an arm, from the arm's facts."""
    value = ((facts.get("arms") or {}).get(arm) or {}).get("prefill_micro_batch")
    return int(value) if value else None
