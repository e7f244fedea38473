"""The plots of a report, as SVG text. Each returns None where the samples have nothing to show."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from flashnext.bench.bound import RESIDENT, bound_of, micro_batch_of
from flashnext.bench.extra import needed_for
from flashnext.bench.metrics import METRICS
from flashnext.bench.prefill_times import KINDS
from flashnext.bench.result import Result, prefill_cells
from flashnext.bench.samples import Request, Samples

# Okabe and Ito's colours: told apart without colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "flashnext",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def draw(paint: Callable[[Any], None], *, width: float = 7.2, height: float = 4.0) -> str:
    """A figure of one pair of axes, painted by ``paint``, as SVG text: the same bytes for the same data."""
    with needed_for("a plot"):
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height))
        FigureCanvasSVG(figure)
        paint(figure.subplots())
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _colour(result: Result, arm: str) -> str:
    return COLOURS[result.arms.index(arm) % len(COLOURS)]


def _legend(axes: Any) -> None:
    """Below the axes, so that it hides nothing."""
    axes.figure.legend(loc="outside lower center", ncols=2, fontsize=8)


def over_depth(result: Result, metric: str, title: str) -> str | None:
    """A metric of the prefill scenario over depth: median and range of the processes, and the bound."""
    cells = [c for c in result.cells if c.scenario == "prefill" and c.metric == metric]
    if not cells:
        return None
    scale, unit = (1000, "s") if METRICS[metric].unit == "ms" else (1, METRICS[metric].unit)

    def paint(axes: Any) -> None:
        for arm in result.arms:
            rows = sorted((c for c in cells if c.arm == arm), key=lambda c: c.depth)
            if not rows:
                continue
            y = [r.median / scale for r in rows]
            error = [[(r.median - r.low) / scale for r in rows], [(r.high - r.median) / scale for r in rows]]
            # beside each other, so that no range hides another
            shift = 1.025 ** (2 * result.arms.index(arm) - len(result.arms) + 1)
            x = [r.depth * shift for r in rows]
            axes.errorbar(x, y, yerr=error, marker="o", capsize=3, label=arm, color=_colour(result, arm))
        ticks = sorted({c.depth for c in cells})
        _draw_bounds(axes, result, metric, ticks)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{t:,}" for t in ticks])
        axes.minorticks_off()
        axes.set_ylim(0, axes.dataLim.y1 * 1.05)  # or values that are alike lie on the edge, half cut off
        axes.set_xlabel("prompt, tokens")
        axes.set_ylabel(f"{title}, {unit}")
        _legend(axes)

    return draw(paint)


def _draw_bounds(axes: Any, result: Result, metric: str, depths: list[int]) -> None:
    """One line per micro-batch that an arm uses: no such arm can be on its better side."""
    bound = bound_of(result.facts, prefill_cells(result.cells))
    if bound is None:
        return
    streaming = [arm for arm in result.arms if arm != RESIDENT]
    sizes = sorted({size for arm in streaming if (size := micro_batch_of(result.facts, arm)) is not None})
    kernels = " or the kernels" if bound.kernels_tps else ""
    for number, size in enumerate(sizes):
        speeds = [bound.prefill_tps(d, size) for d in depths]
        y = speeds if metric == "prefill_tps" else [d / s for d, s in zip(depths, speeds, strict=True)]
        style = (":", "--", "-.")[number % 3]
        axes.plot(depths, y, style, color="#555555", label=f"bound: upload once per {size} tokens{kernels}")


def decode_distribution(result: Result) -> str | None:
    """Decode speed of every process, one column per cell and arm."""
    cells = [c for c in result.cells if c.scenario == "decode" and c.metric == "decode_tps"]
    if not cells:
        return None
    names = list(dict.fromkeys(c.cell for c in cells))

    def paint(axes: Any) -> None:
        step = 0.8 / len(result.arms)
        for number, arm in enumerate(result.arms):
            for cell in (c for c in cells if c.arm == arm):
                x = names.index(cell.cell) + (number - (len(result.arms) - 1) / 2) * step
                axes.plot([x] * len(cell.values), cell.values, "o", alpha=0.6, color=_colour(result, arm))
                axes.plot([x - step / 3, x + step / 3], [cell.median] * 2, color=_colour(result, arm), lw=2)
            axes.plot([], [], "o", color=_colour(result, arm), label=arm)
        axes.set_xticks(range(len(names)), names)
        axes.set_xlabel("depth / seed")
        axes.set_ylabel("decode, t/s (one dot a process)")
        _legend(axes)

    return draw(paint)


def logit_histogram(result: Result) -> str | None:
    """Absolute differences of the first token's log probabilities, by pair of arms."""
    rows = [row for row in result.logits if row.max_abs > 0]
    if not rows:
        return None  # equal to the last bit: the text says so, and there is nothing to draw

    def paint(axes: Any) -> None:
        for number, row in enumerate(rows):
            edges = [low for low, _, _ in row.histogram] + [row.histogram[-1][1]]
            label = f"{row.candidate} against {row.control} (largest {row.max_abs:.3f})"
            colour = COLOURS[number % len(COLOURS)]
            axes.stairs(
                [n for _, _, n in row.histogram],
                edges,
                label=label,
                color=colour,
                lw=1.5,
            )
        axes.set_yscale("symlog")
        axes.set_xlim(0, max(row.max_abs for row in rows))
        axes.set_xlabel("absolute difference of log probability")
        axes.set_ylabel("tokens")
        _legend(axes)

    return draw(paint)


def transition_timeline(result: Result, samples: Samples) -> str | None:
    """Begin and end of the transitions, stacked, in the order in which they happened (the last 40)."""
    rows: list[dict[str, Any]] = []
    for process in samples.processes:
        rows += [{**t, "arm": process.arm} for t in samples.ends[process.process].transitions]
    rows = [r for r in rows if r.get("total_ms")][-40:]
    if not rows:
        return None

    def paint(axes: Any) -> None:
        x = range(len(rows))
        begins = [float(r.get("begin_ms", 0)) for r in rows]
        ends = [float(r.get("end_ms", 0)) for r in rows]
        axes.bar(x, begins, color=COLOURS[0], label="begin: release and reserve")
        axes.bar(x, ends, bottom=begins, color=COLOURS[4], label="end: restore and reload")
        axes.set_xlabel("transition, in order")
        axes.set_ylabel("ms")
        _legend(axes)

    return draw(paint)


def memory_timeline(result: Result, samples: Samples) -> str | None:
    """Bytes in use on each device over the deepest prompt that was watched, one line per arm and device.

    Memory that the bench itself held under a limit is left out.
    """
    arm_of = {p.process: p.arm for p in samples.processes}
    best: dict[str, Request] = {}
    for request in samples.requests:
        arm = arm_of[request.process]
        if request.memory and (arm not in best or request.depth > best[arm].depth):
            best[arm] = request
    if not best:
        return None
    lines = {arm: _in_use(samples, request) for arm, request in best.items()}
    most = max(max(line) for devices in lines.values() for line in devices)
    unit = 2**30 if most >= 2**30 else 2**20

    def paint(axes: Any) -> None:
        for arm, request in best.items():
            for device, line in enumerate(lines[arm]):
                x = [ms / 1000 for ms, _ in request.memory]
                style = ("-", "--", ":", "-.")[device % 4]
                label = f"{arm}, device {device} ({request.depth:,} tokens)"
                axes.plot(x, [used / unit for used in line], style, color=_colour(result, arm), label=label)
            if request.ttft_ms:
                axes.axvline(request.ttft_ms / 1000, color=_colour(result, arm), lw=0.8, alpha=0.5)
        axes.set_xlabel("seconds since the request (thin line: first token)")
        axes.set_ylim(0, most / unit * 1.1)
        axes.set_ylabel("in use, " + ("GiB" if unit == 2**30 else "MiB"))
        _legend(axes)

    return draw(paint)


def _in_use(samples: Samples, request: Request) -> list[list[int]]:
    """By device: bytes in use at each sample of a request, less what was held on that device."""
    process = next(p for p in samples.processes if p.process == request.process)
    held = {int(h["device"]): int(h["held_bytes"]) for h in process.facts.get("held") or []}
    count = len(request.memory[0][1])
    return [[used[d] - held.get(d, 0) for _, used in request.memory] for d in range(count)]


def prompt_times(result: Result) -> str | None:
    """A bar per arm and depth, stacked of the kinds of work; kinds that no prompt had are left out."""
    rows = result.prefill_times
    if not rows:
        return None
    names = [
        n for n in dict.fromkeys([*KINDS, *rows[0].kinds_ms]) if any(r.kinds_ms.get(n, 0) > 0 for r in rows)
    ]

    def paint(axes: Any) -> None:
        left = [0.0] * len(rows)
        for number, name in enumerate(names):
            widths = [max(r.kinds_ms.get(name, 0.0), 0.0) for r in rows]
            colour, hatch = COLOURS[number % len(COLOURS)], ("", "///")[number // len(COLOURS) % 2]
            axes.barh(
                range(len(rows)), widths, left=left, color=colour, hatch=hatch, edgecolor="white", lw=0.4,
                label=name.replace("_", " "),
            )  # fmt: skip
            left = [at + width for at, width in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(rows)), [r.label for r in rows])
        axes.invert_yaxis()
        axes.set_xlabel("ms (mean of the prompts; the device is waited for at every change of kind)")
        axes.grid(axis="y", visible=False)
        axes.figure.legend(loc="outside lower center", ncols=4, fontsize=8)

    return draw(paint, height=2.2 + 0.5 * len(rows))


def all_plots(result: Result, samples: Samples) -> dict[str, str]:
    """Title -> SVG of every plot that the samples can fill."""
    found = {
        "Reading speed over depth": over_depth(result, "prefill_tps", "prefill"),
        "Time to first token over depth": over_depth(result, "ttft_ms", "time to first token"),
        "Decode speed of each process": decode_distribution(result),
        "Time of a prompt by kind of work": prompt_times(result),
        "Cost of each transition": transition_timeline(result, samples),
        "Memory of the devices over a prompt": memory_timeline(result, samples),
        "Differences of log probabilities": logit_histogram(result),
    }
    return {title: svg for title, svg in found.items() if svg is not None}
