"""Prometheus: our own series, and llama-server's, passed through and as numbers for status and watchdogs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from flashnext.serve.states import State
from flashnext.services import Service

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


_MARKER = "marker "
# What a service's counters hold beside counts of findings and markers.
_GAUGES = {
    "start_to_ready_s": ("start_to_ready_seconds", "From the last start to ready."),
    "check_tokens_per_second": ("check_tokens_per_second", "Speed of the last ready or text check."),
    "busy": ("busy", "1 while a prompt is read or an answer written."),
    "read": ("read_tokens", "Tokens read of the prompt under way."),
    "written": ("written_tokens", "Tokens written of the answer under way."),
    "prompt_share": ("prompt_ratio", "Share of the prompt under way that is read; only while one is."),
    "prompt_tokens": ("prompt_tokens", "About how long the prompt under way is."),
    "prompt_left_s": ("prompt_left_seconds", "About how long the rest of the prompt under way takes."),
    "acceptance": ("acceptance_ratio", "Share of drafts that were accepted, over the last 500 to 1,000."),
    "lean_chunk": ("lean_chunk_tokens", "Physical micro-batch of prompts that lean prefill took."),
    "lean_lent": ("lean_lent", "1 where its staging memory is lent by the expert cache."),
    "drafts": ("acceptance_drafts", "Drafts that the ratio is of."),
}


def exposition(service: Service, server_text: str = "") -> str:
    """Our own series, then llama-server's as they were polled last, labels and all."""
    lines = [*_own(service)]
    kept = [line for line in server_text.splitlines() if line]
    return "\n".join([*lines, *kept]) + "\n"


def _own(service: Service) -> Iterator[str]:
    def series(name: str, kind: str, text: str, samples: Mapping[str, float]) -> Iterator[str]:
        yield f"# HELP flashnext_{name} {text}"
        yield f"# TYPE flashnext_{name} {kind}"
        for labels, value in samples.items():
            yield f"flashnext_{name}{labels} {value:.17g}"

    states = {f'{{state="{state}"}}': float(service.state == state) for state in State}
    yield from series("state", "gauge", "1 for the state that the service is in.", states)
    yield from series("restarts_total", "counter", "Restarts of llama-server.", {"": service.restarts})
    started = {"": service.started.timestamp()}
    yield from series("start_time_seconds", "gauge", "When the supervisor started, since the epoch.", started)
    yield from series("warnings", "gauge", "Warnings that status shows.", {"": len(service.warnings)})
    for key, (name, text) in _GAUGES.items():
        if key in service.counters:
            yield from series(name, "gauge", text, {"": service.counters[key]})
    found = {k: v for k, v in service.counters.items() if k not in _GAUGES}
    marks = {f'{{marker="{k.removeprefix(_MARKER)}"}}': v for k, v in found.items() if k.startswith(_MARKER)}
    kinds = {f'{{kind="{k}"}}': v for k, v in found.items() if not k.startswith(_MARKER)}
    yield from series("markers_total", "counter", "Marker lines of the native code.", marks)
    yield from series("findings_total", "counter", "Log lines that mean something, by kind.", kinds)
    for key, text in (("memory", "Memory of a device."), ("allocated", "Memory of a device that is in use.")):
        samples = {
            f'{{device="{_label(str(d["name"]))}"}}': float(d.get(f"{key}_bytes", 0)) for d in service.devices
        }
        yield from series(f"device_{key}_bytes", "gauge", text, samples)


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
