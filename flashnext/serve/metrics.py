"""llama-server's Prometheus text, as numbers for status and watchdogs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{[^}]*\})? (?P<value>\S+)")
_OURS = ("llamacpp:", "fn_")


def parse(text: str) -> dict[str, float]:
    """Value per series name, summed over its labels (devices); lines that are no sample are skipped."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.fullmatch(line)
        if match is None or not match["name"].startswith(_OURS):
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        if math.isfinite(value):
            found[match["name"]] = found.get(match["name"], 0.0) + value
    return found


def summary(metrics: Mapping[str, float]) -> list[str]:
    """What a person wants to know, as short phrases; nothing where there was nothing to count."""
    lines = []
    read, read_s = (
        metrics.get("llamacpp:prompt_tokens_total", 0),
        metrics.get("llamacpp:prompt_seconds_total", 0),
    )
    if read and read_s:
        lines.append(f"prompts {read / read_s:,.0f} t/s")
    made = metrics.get("llamacpp:tokens_predicted_total", 0)
    made_s = metrics.get("llamacpp:tokens_predicted_seconds_total", 0)
    if made and made_s:
        lines.append(f"answers {made / made_s:,.1f} t/s")
    hits, misses = (metrics.get(f"fn_expert_cache_{name}_total", 0) for name in ("hits", "misses"))
    if hits + misses:
        lines.append(f"cache hits {hits / (hits + misses):.1%}")
    drafted = metrics.get("llamacpp:spec_decode_num_draft_tokens_total", 0)
    if drafted:
        accepted = metrics.get("llamacpp:spec_decode_num_accepted_tokens_total", 0)
        lines.append(f"acceptance {accepted / drafted:.1%}")
    return lines
