"""Metrics of one request, from the server's raw timings and the client's clock. No judgement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flashnext.bench.samples import Request

MIN_PROMPT_TOKENS = 64  # below, the fixed cost of a request is most of its prompt time
MIN_DECODE_TOKENS = 16


@dataclass(frozen=True)
class Metric:
    """How a metric is read and shown. ``of`` returns None where the request does not carry it."""

    name: str
    unit: str
    higher_is_better: bool
    of: Callable[[Request], float | None]


def _number(timings: Mapping[str, Any], key: str) -> float:
    value = timings.get(key)
    return float(value) if isinstance(value, (int, float)) else 0.0


def prompt_tokens(request: Request) -> int:
    """Tokens of the prompt that were worked on, not reused."""
    return int(_number(request.timings, "prompt_n"))


def prefill_tps(request: Request) -> float | None:
    """Prompt tokens worked on per second of prompt time (the transition's begin and end are inside it)."""
    n, ms = _number(request.timings, "prompt_n"), _number(request.timings, "prompt_ms")
    return n / ms * 1000 if n >= MIN_PROMPT_TOKENS and ms > 0 else None


def decode_tps(request: Request) -> float | None:
    """Generated tokens per second, as llama-server counts them (from the first token on)."""
    n, ms = _number(request.timings, "predicted_n"), _number(request.timings, "predicted_ms")
    return n / ms * 1000 if n >= MIN_DECODE_TOKENS and ms > 0 else None


def ttft_ms(request: Request) -> float | None:
    """Milliseconds from the request's first byte out to the first token in, on the client's clock."""
    return request.ttft_ms if request.ttft_ms and _number(request.timings, "prompt_n") else None


def acceptance(request: Request) -> float | None:
    """Accepted share of drafted tokens."""
    drafted = _number(request.timings, "draft_n")
    return _number(request.timings, "draft_n_accepted") / drafted if drafted >= MIN_DECODE_TOKENS else None


METRICS: dict[str, Metric] = {
    m.name: m
    for m in (
        Metric("prefill_tps", "t/s", True, prefill_tps),
        Metric("ttft_ms", "ms", False, ttft_ms),
        Metric("decode_tps", "t/s", True, decode_tps),
        Metric("acceptance", "share", True, acceptance),
    )
}
