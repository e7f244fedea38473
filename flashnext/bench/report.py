"""report.md and report.html, rendered from the samples alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flashnext.artefacts import state_written, write_atomic, write_json
from flashnext.bench import prefill_times
from flashnext.bench import result as results
from flashnext.bench import samples as sample_files
from flashnext.bench.bound import GOAL_CHUNK, BoundResult
from flashnext.bench.extra import needed_for
from flashnext.bench.gates import GateResult, Gates, Outcome, overall
from flashnext.bench.metrics import METRICS
from flashnext.bench.plots import all_plots
from flashnext.bench.result import Result
from flashnext.bench.samples import Samples
from flashnext.bench.verdicts import judge
from flashnext.errors import SamplesUnreadableError

_TEMPLATES = Path(__file__).parent / "templates"


class Reported:
    """What was written: the result, the gates and the outcome."""

    def __init__(self, result: Result, gates: list[GateResult], folder: Path) -> None:
        self.result, self.gates, self.folder = result, gates, folder
        self.outcome: Outcome = overall(gates)


def write(folder: Path) -> Reported:
    """Read ``folder``'s samples; write result.json, report.md, report.html and plots/*.svg beside them."""
    samples = sample_files.read(sample_files.file_in(folder))
    result = results.compute(samples)
    gates = judge_samples(samples, result)
    document = {**result.model_dump(mode="json"), "gates": [g.model_dump(mode="json") for g in gates]}
    document["outcome"] = str(overall(gates))
    plots = all_plots(result, samples)
    view = _view(result, gates, samples)
    view["plots"] = [{"title": t, "svg": svg, "file": f"plots/{_slug(t)}.svg"} for t, svg in plots.items()]
    pages = {name: render(name, view) for name in ("report.md", "report.html")}
    with state_written(folder):
        write_json(results.file_in(folder), document)
        for title, svg in plots.items():
            write_atomic(folder / "plots" / f"{_slug(title)}.svg", svg)
        for name, page in pages.items():
            write_atomic(folder / name, page)
    return Reported(result, gates, folder)


def judge_samples(samples: Samples, result: Result) -> list[GateResult]:
    """The run's own frozen gates over its result."""
    header = samples.header
    try:
        gates = Gates.model_validate(header.gates)
    except ValidationError as error:
        places = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:4]]
        raise SamplesUnreadableError("the samples' header holds no gates", context=places) from None
    return judge(result, gates, {s["id"] for s in header.plan["scenarios"]})


def render(name: str, view: Mapping[str, Any]) -> str:
    with needed_for("a report"):
        import jinja2
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=name.endswith(".html"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    return str(environment.get_template(f"{name}.j2").render(view))


def _slug(title: str) -> str:
    return title.lower().replace(" ", "-")


def _view(result: Result, gates: list[GateResult], samples: Samples) -> dict[str, Any]:
    return {
        "title": f"flashnext bench, profile {result.profile}",
        "outcome": str(overall(gates)),
        "gates": [g.model_dump(mode="json") for g in gates],
        "header": list(_header(result, samples)),
        "cells": [_cell_row(c) for c in result.cells],
        "ratios": [_ratio_row(r) for r in result.ratios],
        "identity": result.identity,
        "logits": result.logits,
        "quality": result.quality,
        "transitions": result.transitions,
        "bounds": [_bound_row(b) for b in result.bounds],
        "bound_heads": _BOUND_HEADS,
        "times": prefill_times.table(result.prefill_times) if result.prefill_times else [],
        "time_heads": prefill_times.heads(result.prefill_times),
        "checks": [_check_row(c) for c in result.checks],
        "notes": _notes(result, samples),
        "level": "98%",
        "commands": [" ".join(h.command) for h in samples.headers],
    }


def _notes(result: Result, samples: Samples) -> list[str]:
    """What a reader has to know before the numbers."""
    notes = [*result.facts.get("remarks", []), *(f"left out: {line}" for line in result.left_out)]
    if samples.torn:
        notes.append(f"{samples.torn} torn lines of a killed writer were passed over")
    if result.unfinished_processes:
        notes.append(f"{result.unfinished_processes} processes were cut off; their rows are not counted")
    sittings = len(set(samples.sitting.values()))
    if sittings > 1:
        notes.append(f"{sittings} sittings (boots or machines); arms are paired within one")
    notes += _machines(samples)
    if len(samples.processes) < result.planned_processes:
        notes.append(f"{len(samples.processes)} of {result.planned_processes} processes have run")
    return notes


def _machines(samples: Samples) -> Iterator[str]:
    """Facts that a later call found otherwise than the first: then it ran on another machine."""
    first = samples.header.facts
    for header in samples.headers[1:]:
        for place, key in (("host", "cpu"), ("host", "cores"), ("gpu", "driver"), ("gpu", "cards")):
            then, now = (f.get(place, {}).get(key) for f in (first, header.facts))
            if then != now:
                yield f"the call of {header.created} had another {place} {key}: {_plain(key, now)}"


def _header(result: Result, samples: Samples) -> Iterator[tuple[str, str]]:
    """Name and value of every fact, nested names joined by a dot."""
    yield "created", result.created
    yield "profile", result.profile
    yield "arms", ", ".join(result.arms)
    yield "seed", str(result.seed)
    run = len(samples.processes)
    yield "processes", f"{run} of {result.planned_processes} planned, {len(samples.headers)} invocations"
    yield from _flat({k: v for k, v in result.facts.items() if k != "remarks"})
    yield from _ranges(samples)


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in facts.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value):
            for number, entry in enumerate(value):
                yield from _flat(entry, f"{name}[{number}].")
        else:
            yield name, _plain(name, value)


def _plain(name: str, value: Any) -> str:
    if value is None:
        return "not known"
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value / 2**30:.2f} GiB"
    if name.endswith("_bytes_per_s") and isinstance(value, int | float):
        return f"{value / 1e9:.2f} GB/s"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _ranges(samples: Samples) -> Iterator[tuple[str, str]]:
    """Smallest to largest of what was read before every process: clocks, temperature, power."""
    seen: dict[str, list[float]] = {}
    for process in samples.processes:
        for number, device in enumerate(process.facts.get("devices") or []):
            for key, value in device.items():
                if isinstance(value, int | float):
                    seen.setdefault(f"device {number} {key}", []).append(float(value))
    for name, values in seen.items():
        yield f"over the run: {name}", f"{min(values):g} to {max(values):g}"


def _cell_row(cell: results.CellResult) -> dict[str, str]:
    return {
        "scenario": cell.scenario,
        "metric": f"{cell.metric}, {METRICS[cell.metric].unit}",
        "cell": cell.cell,
        "arm": cell.arm,
        "n": f"{cell.processes} ({cell.requests})",
        "median": _short(cell.median),
        "range": f"{_short(cell.low)} to {_short(cell.high)}",
    }


def _check_row(check: results.CheckResult) -> list[str]:
    growth = ", ".join(f"{n / 2**20:+.1f} MiB" for n in check.growth_bytes) or "not read"
    counts = [check.processes, check.prompts, check.begins, check.ends]
    return [check.arm, *map(str, counts), growth, "; ".join(check.problems) or "none"]


_BOUND_HEADS = (
    "depth", "arm", "micro-batch", "measured, t/s", "upload alone, t/s", "kernels alone, t/s",
    "time over the bound", f"over the goal's (one upload per {GOAL_CHUNK:,} tokens)",
)  # fmt: skip


def _bound_row(row: BoundResult) -> list[str]:
    kernels = "not measured" if row.kernels_tps is None else _short(row.kernels_tps)
    speeds = [_short(row.measured_tps), _short(row.upload_tps), kernels]
    ratios = [f"{row.times_bound:.2f} x", f"{row.times_goal:.2f} x"]
    return [f"{row.depth:,}", row.arm, str(row.micro_batch), *speeds, *ratios]


def _ratio_row(row: results.RatioResult) -> dict[str, str]:
    interval = "too few processes" if row.low is None else f"{row.low:.3f} to {row.high:.3f}"
    return {
        "scenario": row.scenario,
        "metric": row.metric,
        "cell": row.cell,
        "arms": f"{row.candidate} / {row.control}",
        "ratio": f"{row.ratio:.3f}",
        "interval": interval,
        "n": str(row.n),
        "verdict": str(row.verdict),
    }


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 10 else f"{value:.1f}"
