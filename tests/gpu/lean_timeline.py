"""Plots FN_LEAN_TIMELINE: per device one row of uploads, one of computing, one of waiting.

python tests/gpu/lean_timeline.py lean.timeline.jsonl --out timeline.png [--last-passes 1]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

Span = tuple[float, float]  # begin and width in ms


def spans(lines: list[dict[str, Any]], last_passes: int) -> dict[str, list[Span]]:
    """Row name -> spans, from the first stop of the last passes on."""
    stops = [line for line in lines if line["what"] == "stop"]
    first = max(s["pass"] for s in stops) - last_passes + 1
    stops = [s for s in stops if s["pass"] >= first]
    start = stops[0]["t_reached_us"]
    end = stops[-1]["t_released_us"]
    rows: dict[str, list[Span]] = {}

    def add(row: str, begin_us: int, end_us: int) -> None:
        rows.setdefault(row, []).append(((begin_us - start) / 1e3, (end_us - begin_us) / 1e3))

    for line in lines:
        if line["what"] == "upload" and line["t_end_us"] > start and line["t_begin_us"] < end:
            add(f"device {line['device']} upload", line["t_begin_us"], line["t_end_us"])
    for stop, after in zip(stops, [*stops[1:], None], strict=True):
        add(f"device {stop['device']} wait", stop["t_reached_us"], stop["t_released_us"])
        if after is not None:
            add(f"device {stop['device']} compute", stop["t_released_us"], after["t_reached_us"])
    return rows


def summary(rows: dict[str, list[Span]]) -> dict[str, float]:
    return {row: round(sum(width for _, width in items), 3) for row, items in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("timeline", type=Path)
    parser.add_argument("--out", type=Path, help="a PNG; without it the sums alone are printed")
    parser.add_argument("--last-passes", type=int, default=1)
    args = parser.parse_args()
    lines = [json.loads(line) for line in args.timeline.read_text().splitlines()]
    rows = spans(lines, args.last_passes)
    print(json.dumps({"ms": summary(rows)}))
    if args.out is None:
        return
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    names = sorted(rows, reverse=True)
    colours = {"upload": "tab:orange", "compute": "tab:blue", "wait": "tab:red"}
    figure, axes = pyplot.subplots(figsize=(14, 1 + 0.5 * len(names)))
    for y, name in enumerate(names):
        axes.broken_barh(rows[name], (y - 0.4, 0.8), color=colours[name.split()[-1]], edgecolor="white")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("ms since the first stop")
    figure.tight_layout()
    figure.savefig(args.out, dpi=120)


if __name__ == "__main__":
    main()
