"""A prompt's pass over the layers as lanes: uploads of experts over compute, from lean-prefill's JSON lines.

The native code writes two kinds of lines, times in microseconds of one clock: ``upload`` (``layer``,
``device``, ``t_begin_us``, ``t_end_us``, ``bytes_uploaded``) and ``stop`` (``pass``, ``layer``, ``device``,
``rows``, ``t_reached_us``, ``t_released_us``): where the computation stands before a layer's experts and
where it goes on. Between a layer's release and the next stop there is compute; from reaching a stop to its
release there is waiting.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from flashnext.bench.plots import COLOURS, draw
from flashnext.errors import SamplesUnreadableError, UsageError

Lane = Literal["upload", "compute", "wait"]
_HINT = "lean-prefill writes such a file where FN_LEAN_TIMELINE names one"
_COLOUR = {"upload": COLOURS[0], "compute": COLOURS[2], "wait": COLOURS[1]}


@dataclass(frozen=True)
class Span:
    """One bar: a lane of a device, from and to in microseconds."""

    lane: Lane
    device: int
    layer: int
    begin_us: int
    end_us: int
    size_bytes: int = 0

    @property
    def us(self) -> int:
        return self.end_us - self.begin_us


@dataclass(frozen=True)
class Pass:
    """One pass of a micro-batch over all layers."""

    number: int
    rows: int
    spans: tuple[Span, ...]

    def total_us(self, lane: Lane) -> int:
        return sum(s.us for s in self.spans if s.lane == lane)

    @property
    def begin_us(self) -> int:
        return min(s.begin_us for s in self.spans if s.lane != "upload")

    @property
    def end_us(self) -> int:
        return max(s.end_us for s in self.spans if s.lane != "upload")

    def summary(self) -> dict[str, Any]:
        """Totals in milliseconds, and the share of the upload that ran while something was computed."""
        upload = self.total_us("upload")
        return {
            "pass": self.number,
            "rows": self.rows,
            "ms": (self.end_us - self.begin_us) / 1000,
            "upload_ms": upload / 1000,
            "compute_ms": self.total_us("compute") / 1000,
            "wait_ms": self.total_us("wait") / 1000,
            "uploaded_bytes": sum(s.size_bytes for s in self.spans),
            "hidden_share": _overlap(self.spans) / upload if upload else None,
        }


def read(path: Path) -> list[Pass]:
    """Every pass of a file. Raises SamplesUnreadableError for what is no such file."""
    try:
        rows = _rows(path.read_text(encoding="utf-8"))
        stops = sorted((r for r in rows if r["what"] == "stop"), key=lambda r: r["t_reached_us"])
        uploads = [
            Span("upload", r["device"], r["layer"], r["t_begin_us"], r["t_end_us"], r["bytes_uploaded"])
            for r in rows
            if r["what"] == "upload"
        ]
        passes = list(_passes(stops, uploads))
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise SamplesUnreadableError(
            f"{path} is no timeline of lean-prefill", context=[reason], hint=_HINT
        ) from None
    if not passes:
        raise SamplesUnreadableError(f"{path} holds no pass", context=["no line says `stop`"], hint=_HINT)
    return passes


def _rows(text: str) -> list[Any]:
    """The lines as JSON; the last one may be cut, where its writer was ended in the middle of it."""
    lines = [line for line in text.split("\n") if line.strip()]
    rows = [json.loads(line) for line in lines[:-1]]
    try:
        rows += [json.loads(line) for line in lines[-1:]]
    except ValueError:
        if not rows or text.endswith("\n"):
            raise
    return rows


def choose(passes: Sequence[Pass], number: int | None) -> Pass:
    """The pass of a number; by default the last of those with most tokens (the first ones warm up)."""
    if number is None:
        most = max(p.rows for p in passes)
        return [p for p in passes if p.rows == most][-1]
    for found in passes:
        if found.number == number:
            return found
    raise UsageError(f"there is no pass {number}", context=[", ".join(str(p.number) for p in passes)])


def text(found: Pass) -> str:
    """A pass in one line for people."""
    s = found.summary()
    hidden = "-" if s["hidden_share"] is None else f"{s['hidden_share']:.0%}"
    return (
        f"pass {s['pass']}: {s['rows']:,} tokens in {s['ms']:.1f} ms; upload {s['upload_ms']:.1f} ms "
        f"({s['uploaded_bytes'] / 1e9:.2f} GB, {hidden} of it under compute), wait {s['wait_ms']:.1f} ms"
    )


def _passes(stops: Sequence[dict[str, Any]], uploads: Sequence[Span]) -> Iterator[Pass]:
    numbers = list(dict.fromkeys(stop["pass"] for stop in stops))
    for number in numbers:
        own = [s for s in stops if s["pass"] == number]
        spans: list[Span] = []
        for stop, after in zip(own, [*own[1:], None], strict=True):
            device, layer = stop["device"], stop["layer"]
            spans.append(Span("wait", device, layer, stop["t_reached_us"], stop["t_released_us"]))
            if after is not None:  # of the last layer nobody sees the end
                spans.append(Span("compute", device, layer, stop["t_released_us"], after["t_reached_us"]))
        begin, end = own[0]["t_reached_us"], own[-1]["t_released_us"]
        spans += [_cut(u, begin, end) for u in uploads if u.begin_us < end and u.end_us > begin]
        yield Pass(number, max(s["rows"] for s in own), tuple(spans))


def _cut(upload: Span, begin_us: int, end_us: int) -> Span:
    """Uploads run ahead of their pass: the part of one that a pass sees, and its share of the bytes."""
    begin, end = max(upload.begin_us, begin_us), min(upload.end_us, end_us)
    share = (end - begin) / upload.us if upload.us else 1.0
    size = round(upload.size_bytes * share)
    return replace(upload, begin_us=begin, end_us=end, size_bytes=size)


def _overlap(spans: Sequence[Span]) -> int:
    """Microseconds of upload during which any device computed."""
    computing = sorted((s.begin_us, s.end_us) for s in spans if s.lane == "compute")
    return sum(
        max(0, min(s.end_us, end) - max(s.begin_us, begin))
        for s in spans
        if s.lane == "upload"
        for begin, end in computing
    )


def svg(found: Pass) -> str:
    """The pass as SVG: two lanes a device, upload above compute; waits are drawn in the compute lane."""
    devices = sorted({s.device for s in found.spans})
    lanes = [(device, lane) for device in devices for lane in ("upload", "compute")]
    start = found.begin_us

    def paint(axes: Any) -> None:
        for span in found.spans:
            lane = "upload" if span.lane == "upload" else "compute"
            y = len(lanes) - 1 - lanes.index((span.device, lane))
            left, width = (span.begin_us - start) / 1000, span.us / 1000
            axes.barh(y, width, left=left, height=0.7, color=_COLOUR[span.lane], edgecolor="white", lw=0.4)
        for name, colour in _COLOUR.items():
            axes.barh(0, 0, color=colour, label=name)
        axes.set_yticks(range(len(lanes)), [f"device {d}: {lane}" for d, lane in reversed(lanes)])
        axes.set_xlabel(f"ms since the pass began ({found.rows:,} tokens; one bar a layer)")
        axes.grid(axis="y", visible=False)
        axes.figure.legend(loc="outside lower center", ncols=3, fontsize=8)

    return draw(paint, height=1.4 + 0.8 * len(lanes))
