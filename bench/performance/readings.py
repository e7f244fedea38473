"""What files of results say, as lines of the README's performance section. One reader for each kind.

A reader takes the file's JSON lines and gives figures with every value that stands behind them. It knows no
machine and judges nothing but a goal that was declared before the run.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Lines = list[dict[str, Any]]
FEW = 4  # up to so many values are all shown


@dataclass(frozen=True)
class Figure:
    """One line: what, ours and the other side with their values, their ratio, and the goal if there is one.

    ``reached`` is None without a goal or a verdict. ``id`` names the figure for its reason, should it miss.
    """

    id: str
    what: str
    ours: str
    against: str
    ratio: float | None = None
    goal: str = ""
    reached: bool | None = None
    interval: str = ""


def load(path: Path) -> Lines:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def values(found: Sequence[float], unit: str, digits: int = 0) -> str:
    """Few values one by one, many as median and range."""
    if len(found) <= FEW:
        return ", ".join(f"{v:,.{digits}f}" for v in found) + f" {unit}"
    low, high, middle = min(found), max(found), statistics.median(found)
    return f"{middle:,.{digits}f} {unit} ({low:,.{digits}f} to {high:,.{digits}f}, n {len(found)})"


def compared(
    id_: str, what: str, ours: Sequence[float], label: str, other: Sequence[float], unit: str, **more: Any
) -> Figure:
    """Medians of two sides. ``at_least``, ``at_most``: goal of the ratio; ``lower``: it is other / ours."""
    digits, lower = more.get("digits", 0), more.get("lower", False)
    a, b = statistics.median(ours), statistics.median(other)
    ratio = b / a if lower else a / b
    goal, reached = "", None
    if "at_least" in more:
        goal, reached = f"{more['at_least']:g} x or more", ratio >= more["at_least"]
    if "at_most" in more:
        goal, reached = f"{more['at_most']:g} x or less", ratio <= more["at_most"]
    return Figure(
        id_, what, values(ours, unit, digits), f"{label}: {values(other, unit, digits)}", ratio, goal, reached
    )


def expert_cache(lines: Lines) -> Iterator[Figure]:
    """Decode by slots, overlapped against serial, and loading (tests/gpu/expert_cache_bench.py)."""

    def speeds(part: str, schedule: str, accept: Callable[[dict[str, str]], bool]) -> list[float]:
        found = [line for line in lines if line.get("event") == "arm" and line["part"] == part]
        return [
            line["tokens_per_s"]
            for line in found
            if line["schedule"] == schedule and accept(_options(line["arm"]))
        ]

    for schedule, tokens in (("1x320", "one token"), ("4x160", "four tokens")):
        stock = speeds("decode", schedule, lambda o: o["slots"] == "0")
        if stock:
            ours = speeds("decode", schedule, lambda o: o["slots"] == "150")
            yield compared(
                f"cache-{schedule}", f"decode, {tokens} a step, 150 slots", ours, "no cache", stock, "t/s"
            )
    serial = speeds("overlap", "1x320", lambda o: "serial" in o)
    if serial:
        ours = speeds("overlap", "1x320", lambda o: "serial" not in o)
        yield compared(
            "overlap", "decode, hits and misses overlapped", ours, "one after the other", serial, "t/s",
            at_least=1.5,
        )  # fmt: skip
    yield from _loading(lines)


def _options(arm: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in arm.split(",") if "=" in word)


def _loading(lines: Lines) -> Iterator[Figure]:
    def loaded(what: str, *, stock: bool) -> list[float]:
        return [
            line["load_s"]
            for line in lines
            if line.get("what") == what
            and line.get("event") == "loaded"
            and line["experts"] == "CUDA_Host"
            and (line.get("LLAMA_MMAP_PIN_HOST") == "0") == stock
        ]

    plain = [line["seconds"] for line in lines if line.get("what") == "plain-read" and line["direct"]]
    cold = loaded("load-cold", stock=False)
    if plain and cold:
        yield compared(
            "load", "load 22 GB into pinned memory, cold", cold, "plain parallel read", plain, "s", digits=1,
            at_most=1.1,
        )  # fmt: skip
        yield compared(
            "load-stock", "the same", cold, "stock loader", loaded("load-cold", stock=True), "s", digits=1,
            lower=True,
        )  # fmt: skip


def mtp(lines: Lines) -> Iterator[Figure]:
    """Decode with a head whose drafts are all right, and all wrong (tests/gpu/mtp_bench.py)."""

    def speeds(head: str | None) -> list[float]:
        found = [line for line in lines if line["head"] == head and line["slots"] == 150]
        return [
            t["predicted_per_second"] for line in found for t in line["timings"] if t["predicted_n"] == 256
        ]

    none = speeds(None)
    for head, text in (("markov", "every draft right"), ("random", "every draft wrong")):
        if none and speeds(head):
            what = f"decode with the MTP head, depth 3, {text}"
            yield compared(f"mtp-{head}", what, speeds(head), "no head", none, "t/s")


def tiled(lines: Lines) -> Iterator[Figure]:
    """Prompts with every expert on the device, by llama-bench; the line before each result names the arm."""
    found: dict[tuple[int, int], dict[int, list[float]]] = {}
    with_topk: dict[tuple[int, int], set[tuple[int, int]]] = {}
    arm: dict[str, Any] = {}
    for line in lines:
        if "tiled" in line:
            arm = line
            continue
        key = (line["n_depth"], line["n_ubatch"])
        found.setdefault(key, {}).setdefault(arm["tiled"], []).extend(map(float, line["samples_ts"]))
        with_topk.setdefault(key, set()).add((arm["tiled"], arm["topk"]))
    for (depth, size), by_arm in sorted(found.items()):
        if not {0, 1} <= set(by_arm) or size <= 512:
            continue
        where = f"at depth {depth:,}" if depth else "from the start"
        ours = "tiled attention" + ("" if (0, 1) in with_topk[depth, size] else " and top-k")
        what = f"8,192 tokens {where}, micro-batch {size:,}, experts resident, {ours}"
        yield compared(f"tiled-{depth}-{size}", what, by_arm[1], "stock", by_arm[0], "t/s")


def topk(lines: Lines) -> Iterator[Figure]:
    """Selection of the indexer's top cells for 2,048 rows (test-fn-topk --bench)."""
    times = {(line["arm"], line["ncols"]): line["us"] for line in lines if line["nrows"] == 2048}
    for columns in (8192, 32_768, 262_144):
        if {("fn", columns), ("stock", columns)} <= set(times):
            ours, stock = times["fn", columns] / 1000, times["stock", columns] / 1000
            what = f"top-k of 2,048 rows, {columns:,} columns"
            yield compared(f"topk-{columns}", what, [ours], "stock sort", [stock], "ms", digits=2, lower=True)


GOALS = ((100_000, 2.5), (30_000, 2.4), (8_000, 2.2))  # tokens from which the goal of the prompt holds


def phase(lines: Lines) -> Iterator[Figure]:
    """The transaction against micro-batch 512 on one memory limit (tests/gpu/phase_bench.py)."""
    prompts: dict[int, dict[str, Lines]] = {}
    for line in lines:
        if line.get("what") == "prompt":
            prompts.setdefault(line["n_prompt"], {}).setdefault(line["arm"], []).append(line)
    for length, arms in sorted(prompts.items()):
        if not {"control", "candidate"} <= set(arms):
            continue
        for metric, what in (
            ("prefill_tps", f"prompt of {length:,} tokens"),
            ("decode_tps", "decode behind it"),
        ):
            ours, base = (_numbers(arms[arm], metric) for arm in ("candidate", "control"))
            if not ours or not base:
                continue
            goal = next((g for tokens, g in GOALS if length >= tokens), None)
            more = {"at_least": 0.97} if metric == "decode_tps" else {"at_least": goal} if goal else {}
            where = "" if metric == "prefill_tps" else f" ({length:,} tokens)"
            text = f"{what}{where}, with the transaction"
            yield compared(f"phase-{metric}-{length}", text, ours, "without", base, "t/s", **more)
    yield from _transitions(lines)


def _numbers(lines: Iterable[dict[str, Any]], key: str) -> list[float]:
    return [float(line[key]) for line in lines if line.get(key) is not None]


def _transitions(lines: Lines) -> Iterator[Figure]:
    """One transition, begin and end, against the slots' bytes over the measured link, plus 0.3 s."""
    link = next((x["together_bytes_per_s"] for x in lines if "together_bytes_per_s" in x), None)
    both = list(_pairs(lines))
    if not both:
        return
    parts = {
        f"{name} {event}": statistics.median(marker[f"{name}_ms"] for marker in column)
        for event, column in zip(("begin", "end"), zip(*both, strict=True), strict=True)
        for name in ("release", "restore", "reserve")
        if f"{name}_ms" in column[0]
    }
    found = [begin["ms"] + end["ms"] for begin, end in both]
    goal, reached = "", None
    if link:
        end = both[-1][1]  # what crosses the link: all that was given back, less the workspace
        limit = (end["bytes"] - end["workspace_bytes"]) / link * 1000 + 300
        goal, reached = f"{limit:,.0f} ms or less", statistics.median(found) <= limit
    text = ", ".join(f"{name} {ms:,.0f}" for name, ms in parts.items())
    yield Figure(
        "transition", "one transition", values(found, "ms"), f"of it: {text} ms", None, goal, reached
    )


def _pairs(lines: Lines) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Begin and end markers that belong together, of prompts and of the many transitions in a row."""
    for line in lines:
        if line.get("what") == "transition" and line.get("begin") and line.get("end"):
            yield line["begin"], line["end"]
        elif line.get("what") == "prompt":
            markers = {m["event"]: m for m in line.get("markers", [])}
            if {"begin", "end"} <= set(markers):
                yield markers["begin"], markers["end"]


LEAN_OVER_STOCK = {0: 7.5, 65_536: 5.0}  # goals of the speed over micro-batch 512, by depth
LEAN_PAIRS = (  # other arm, ours, what the other is, what ours is
    ("stock-512", "lean-8192", "stock, micro-batch 512", "lean prefill"),
    ("tiled-8192", "lean-8192", "tiled attention alone, micro-batch 8,192", "lean prefill"),
    ("stock-512", "lean-auto-held", "stock, micro-batch 512", "lean prefill, slots lent"),
)
LEAN_GOAL = 1.15  # times the longer of one upload per chunk and the kernels


def lean(lines: Lines) -> Iterator[Figure]:
    """Prompts with uploads under compute (tests/gpu/lean_bench.py): against stock, tiled, the bound.

    What comes behind a line ``held`` ran in the memory that was left free then.
    """
    by_arm: dict[str, dict[int, list[float]]] = {}
    runs = _lean_runs(lines)
    for name, processes in runs.items():
        for steps in processes:
            for depth, seconds in _chunks(steps):
                by_arm.setdefault(name, {}).setdefault(depth, []).append(8192 / seconds)
    ours = by_arm.get("lean-8192", {})
    for name, arm, label, text in LEAN_PAIRS:
        for depth, speeds in sorted(by_arm.get(arm, {}).items()):
            if depth in by_arm.get(name, {}):
                where = f"8,192 tokens {f'at depth {depth:,}' if depth else 'from the start'}"
                goal = LEAN_OVER_STOCK.get(depth) if name == "stock-512" else None
                more = {"at_least": goal} if goal else {}
                id_ = f"{arm.removesuffix('-8192')}-{name}-{depth}"
                yield compared(id_, f"{where}, {text}", speeds, label, by_arm[name][depth], "t/s", **more)
    yield from _lean_bound(lines, ours, by_arm.get("resident-8192", {}))
    for arm, text in (("lean-8192", "lean prefill"), ("lean-auto-held", "slots lent")):
        mine, plain = (
            [s for p in runs.get(a, []) for s in p if s["step"] == "200"] for a in (arm, "tiled-8192")
        )
        if mine and plain:
            speeds, others = ([200 / s["seconds"] for s in side] for side in (mine, plain))
            what = f"a follow-up of 200 tokens, {text}"
            yield compared(
                f"{arm}-follow", what, speeds, "tiled attention alone", others, "t/s", at_least=1.0
            )
    yield from _lean_decode(lines)


def _lean_runs(lines: Lines) -> dict[str, list[Lines]]:
    """Arm -> the steps of each of its processes; an arm in held memory is called <arm>-held."""
    found: dict[str, list[Lines]] = {}
    held = False
    for line in lines:
        held = held or line.get("what") == "held"
        if line.get("what") == "arm" and line.get("part") == "speed":
            found.setdefault(line["name"] + ("-held" if held else ""), []).append(line["steps"])
    return found


def _lean_decode(lines: Lines) -> Iterator[Figure]:
    """One token a step behind a prompt of 8,192, against tiled attention alone."""
    speeds: dict[str, list[float]] = {}
    for line in lines:
        if line.get("what") == "arm" and line.get("part") == "decode":
            steps = [s for s in line["steps"] if s["step"] == "1x512"]
            speeds.setdefault(line["name"], []).extend(s["tokens"] / s["seconds"] for s in steps)
    for arm, text in (("lean-8192", "lean prefill"), ("lean-8192-lent", "lean prefill, slots lent")):
        if arm in speeds and "tiled-8192" in speeds:
            what = f"512 tokens of decode behind a prompt, {text}"
            other = speeds["tiled-8192"]
            yield compared(
                f"{arm}-decode", what, speeds[arm], "tiled attention alone", other, "t/s", at_least=0.97
            )


def _chunks(steps: Lines) -> Iterator[tuple[int, float]]:
    """(depth, seconds) of the measured chunks of 8,192: from empty, and behind each 32,768 tokens."""
    depth: int | None = None  # the first chunk warms up
    for step in steps:
        if step["step"] == "4096":
            depth = 0
        elif step["step"] == "8192x3" and depth is not None:
            depth += 32_768
        elif step["step"] == "8192" and depth is not None:
            yield depth, float(step["seconds"])


def _lean_bound(
    lines: Lines, ours: dict[int, list[float]], kernels: dict[int, list[float]]
) -> Iterator[Figure]:
    """Time of a chunk over the longer of its upload and its kernels, both measured in the same sitting."""
    rates = [rate for line in lines if line.get("what") == "upload" for rate in line["gb_per_s"]]
    sizes = [
        sum(d["uploaded"] for d in line["lean"]["devices"]) / line["lean"]["passes"]
        for line in lines
        if line.get("what") == "arm"
        and line.get("name") == "lean-8192"
        and line.get("lean", {}).get("passes")
    ]
    for depth, speeds in sorted(ours.items()):
        if not rates or not sizes or depth not in kernels:
            continue
        upload_s = statistics.median(sizes) / 1e9 / statistics.median(rates)
        kernels_s = 8192 / statistics.median(kernels[depth])
        bound_s = max(upload_s, kernels_s)
        times = 8192 / statistics.median(speeds) / bound_s
        yield Figure(
            f"lean-bound-{depth}",
            f"8,192 tokens at depth {depth:,}, lean prefill, time over its bound",
            values(speeds, "t/s"),
            f"upload {upload_s * 1000:,.0f} ms, kernels {kernels_s * 1000:,.0f} ms",
            times,
            f"{LEAN_GOAL:g} x or less",
            times <= LEAN_GOAL,
        )


def kill_switch(lines: Lines) -> Iterator[Figure]:
    """Every switch off against a build without features; page-locked experts against mapped ones."""

    def speeds(arm: str, metric: str) -> list[float]:
        found = [t for line in lines if line["arm"] == arm for t in line["timings"]]
        return [t[metric] for t in found if t["prompt_n"] == max(t["prompt_n"] for t in found)]

    for ours, other, text, label in (
        ("off", "vanilla", "every switch off", "build without features"),
        ("pinned", "mapped", "experts page-locked", "mapped file"),
    ):
        for metric, what in (("prompt_per_second", "prompt"), ("predicted_per_second", "decode")):
            if speeds(ours, metric) and speeds(other, metric):
                name = f"{what}, micro-batch 2,048, {text}"
                yield compared(
                    f"{ours}-{what}", name, speeds(ours, metric), label, speeds(other, metric), "t/s"
                )


READERS: dict[str, Callable[[Lines], Iterator[Figure]]] = {
    "phase": phase,
    "lean": lean,
    "expert-cache": expert_cache,
    "mtp": mtp,
    "tiled": tiled,
    "topk": topk,
    "kill-switch": kill_switch,
}
