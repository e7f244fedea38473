"""Where a prompt's time goes: what prefill-times told of the prompts of the scenario `times`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from pydantic import Field

from flashnext.artefacts import Artefact
from flashnext.bench.samples import Request, Samples

REST = "rest"
# Kinds in the order in which a report shows them, each with what it is.
KINDS = {
    "experts": "router, routed experts, shared expert",
    "attention": "full attention: projections, masks, cache",
    "indexer": "scores of the sparse attention",
    "top_k": "their selection",
    "linear_attention": "gated delta net, its projections and convolution",
    "residual": "hyper-connections",
    "upload": "copies of experts into the workspace, with the wait for their ids",
    "wait": "for staged experts (lean prefill)",
    "transfer": "inputs and activations between devices",
    "other": "embeddings, head, building graphs",
    "between": "between micro-batches: draft head, checkpoints, server",
    REST: "what the server counts beside: the last tokens, transitions",
}


class PrefillTimes(Artefact):
    """Mean over the prompts of an arm and a depth, in ms. ``kinds_ms`` with the rest adds up to prompt_ms."""

    arm: str
    cell: str
    depth: int
    prompts: int
    micro_batches: float
    prompt_ms: float = Field(description="as the server counts it")
    kinds_ms: dict[str, float]

    @property
    def label(self) -> str:
        return f"{self.arm}, {self.depth:,} tokens"


def prefill_times(samples: Samples, arms: Sequence[str]) -> list[PrefillTimes]:
    return list(_results(samples, arms))


def _results(samples: Samples, arms: Sequence[str]) -> Iterator[PrefillTimes]:
    arm_of = {p.process: p.arm for p in samples.processes}
    told = [r for r in samples.requests if r.prefill_times is not None and r.error is None]
    for cell, depth in dict.fromkeys((r.cell, r.depth) for r in told):
        for arm in arms:
            own = [r for r in told if r.cell == cell and arm_of[r.process] == arm]
            if own:
                kinds = [_kinds_ms(r) for r in own]
                yield PrefillTimes(
                    arm=arm,
                    cell=cell,
                    depth=depth,
                    prompts=len(own),
                    micro_batches=fmean((r.prefill_times or {})["micro_batches"] for r in own),
                    prompt_ms=fmean(r.timings["prompt_ms"] for r in own),
                    kinds_ms={name: fmean(k.get(name, 0.0) for k in kinds) for name in _names(kinds)},
                )


def _names(kinds: Sequence[dict[str, float]]) -> list[str]:
    """Known kinds in their order, then what a newer build may tell."""
    return [*(k for k in KINDS if k != REST), *sorted({n for k in kinds for n in k} - set(KINDS)), REST]


def _kinds_ms(request: Request) -> dict[str, float]:
    told = (request.prefill_times or {})["kinds_us"]
    found = {name: us / 1000 for name, us in told.items()}
    return {**found, REST: request.timings["prompt_ms"] - sum(found.values())}


def table(rows: Sequence[PrefillTimes]) -> list[list[str]]:
    """One line per kind: name, what it is, then ms and share for every arm and depth."""
    names = list(dict.fromkeys(name for row in rows for name in row.kinds_ms))
    lines = [
        [name.replace("_", " "), KINDS.get(name, ""), *(_share(r.kinds_ms.get(name, 0.0), r) for r in rows)]
        for name in names
    ]
    return [*lines, ["sum", "the server's own time of the prompt", *(_share(r.prompt_ms, r) for r in rows)]]


def _share(ms: float, row: PrefillTimes) -> str:
    return f"{ms:,.1f} ({ms / row.prompt_ms:.0%})" if row.prompt_ms else f"{ms:,.1f}"


def heads(rows: Sequence[PrefillTimes]) -> list[str]:
    return ["kind", "what", *(f"{row.label}: ms" for row in rows)]
