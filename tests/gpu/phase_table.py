"""What the lines of the bench of the transaction say, in few words."""

from __future__ import annotations

import statistics
from typing import Any


def compare(firsts: list[tuple[str, dict[int, float]]]) -> list[dict[str, Any]]:
    """How far apart the first tokens of two arms are, as log-probabilities: the worst pair of processes."""
    pairs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for i, (left, a) in enumerate(firsts):
        for right, b in firsts[i + 1 :]:
            names = min(left, right), max(left, right)
            pairs.setdefault(names, []).append(_apart(a, b))
    return [
        {
            "pair": names,
            "processes": len(group),
            "max": max(one["max"] for one in group),
            "mean": max(one["mean"] for one in group),
            "same_best": all(one["same_best"] for one in group),
            **{key: group[0][key] for key in ("tokens", "gap_of_best_two", "spread")},
        }
        for names, group in sorted(pairs.items())
    ]


def _apart(a: dict[int, float], b: dict[int, float]) -> dict[str, Any]:
    apart = [abs(a[token] - b[token]) for token in a.keys() & b.keys()]
    second, first = sorted(a.values())[-2:]
    return {
        "tokens": len(apart),
        "max": max(apart),
        "mean": statistics.fmean(apart),
        "same_best": max(a, key=a.__getitem__) == max(b, key=b.__getitem__),
        "gap_of_best_two": first - second,
        "spread": first - min(a.values()),
    }


def table(lines: list[dict[str, Any]]) -> str:
    out: list[str] = []
    prompts: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for line in lines:
        if line["what"] == "prompt":
            prompts.setdefault((line["n_prompt"], line["arm"]), []).append(line)
    if prompts:
        out.append(
            f"{'tokens':>8} {'arm':>10} {'n':>2} {'prefill t/s':>12} {'first s':>8} {'decode t/s':>10}"
            "  prefill, decode / control"
        )
    for (length, arm), group in sorted(prompts.items()):
        prefill, first, decode = (
            _median(group, key) for key in ("prefill_tps", "first_token_s", "decode_tps")
        )
        base = prompts.get((length, "control"), [])
        ratio = (
            f"{prefill / _median(base, 'prefill_tps'):.2f} {decode / _median(base, 'decode_tps'):.3f}"
            if base
            else "-"
        )
        out.append(
            f"{length:>8} {arm:>10} {len(group):>2} {prefill:>12.1f} {first:>8.2f} {decode:>10.1f}  {ratio}"
        )
    out += _transitions(lines)
    for line in lines:
        if line["what"] == "first-token":
            out.append(
                f"first token {'/'.join(line['pair'])}: max {line['max']:.4f} mean {line['mean']:.5f} "
                f"best {'same' if line['same_best'] else 'DIFFERS'} (gap {line['gap_of_best_two']:.3f})"
            )
        if line["what"] == "tight-end":
            out.append(
                f"{line['less_mib']:g} MiB less than it needs: ready {line['ready'] is not None}, "
                f"{line.get('answers')}, {[m['event'] for m in line.get('events', [])]}, "
                f"exit {line['ended_by_itself']}{' ABORTED' if line['aborted'] else ''}"
            )
        if line["what"] in (
            "size",
            "held",
            "both-fits",
            "link",
            "memcheck",
            "memcheck-left-out",
            "budget-over",
        ):
            out.append(
                f"{line['what']}: "
                + ", ".join(f"{k}={v}" for k, v in line.items() if k not in ("what", "tail"))
            )
        if line.get("failed"):
            out.append(
                f"FAILED {line['what']} {line.get('arm')}: {line['failed']} "
                f"(ended {line.get('ended_before')})"
            )
    return "\n".join(out)


def _median(group: list[dict[str, Any]], key: str) -> float:
    values = [line[key] for line in group if line[key] is not None]
    return statistics.median(values) if values else float("nan")


def _transitions(lines: list[dict[str, Any]]) -> list[str]:
    """Medians of the parts, of all prompts, and what is left of device memory after each of the many."""
    markers = [m for line in lines for m in line.get("markers", [])]
    markers += [
        line[e] for line in lines if line["what"] == "transition" for e in ("begin", "end") if line[e]
    ]
    out = []
    for event in ("begin", "end"):
        group = [m for m in markers if m["event"] == event]
        keys = [key for key in (group[0] if group else {}) if key.endswith("ms")]
        if group:
            parts = ", ".join(f"{key} {statistics.median(m[key] for m in group):.1f}" for key in keys)
            out.append(f"{event} x {len(group)}: {parts}, bytes {group[-1]['bytes']}")
    many = [line for line in lines if line["what"] == "transition"]
    if many:
        for device, free in enumerate(zip(*(line["free_after"] for line in many), strict=True)):
            out.append(
                f"{len(many)} transitions, device {device}: free after the first {free[0]}, "
                f"fifth {free[min(4, len(free) - 1)]}, last {free[-1]}, lowest {min(free)}, "
                f"highest {max(free)}; values {len(set(free))}"
            )
    for line in lines:
        if line["what"] == "transitions-metrics":
            out.append(f"prompts {line['prompts']}, begins {line['begins']}, ends {line['ends']}")
    return out
