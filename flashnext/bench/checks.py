"""What makes a process's numbers believable: its own environment, and the markers and failures in its log."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashnext.bench.arms import WATCHED, Arm
from flashnext.failures import Action, classify
from flashnext.markers import parse

# A supervisor's log names the child before its line.
_PREFIX = re.compile(r"^[a-z0-9_-]+\| ")
RECORDED = (*WATCHED, "CUDA_")


def environment_of(pid: int) -> dict[str, str]:
    """The variables that matter, as the process itself has them. Raises OSError where it cannot be read."""
    raw = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace")
    pairs = (entry.partition("=") for entry in raw.split("\0") if entry)
    return {name: value for name, _, value in pairs if name.startswith(RECORDED)}


def environment_problems(arm: Arm, found: Mapping[str, str]) -> list[str]:
    """Differences between the watched variables an arm must have and those its process has."""
    watched = {name: value for name, value in found.items() if name.startswith(WATCHED)}
    wanted = {name: value for name, value in arm.environment.items() if name.startswith(WATCHED)}
    problems = [f"{n} is {watched.get(n)!r}, must be {v!r}" for n, v in wanted.items() if watched.get(n) != v]
    return problems + [f"{n}={v!r} must not be set" for n, v in watched.items() if n not in wanted]


@dataclass
class Scan:
    """What a log says from its ready line on."""

    begins: int = 0
    ends: int = 0
    problems: list[str] = field(default_factory=list)
    transitions: list[dict[str, Any]] = field(default_factory=list)


def scan(lines: Iterable[str]) -> Scan:
    """Count phase markers, pair each begin with its end, and collect failure lines."""
    found = Scan()
    begin: Mapping[str, Any] | None = None
    for raw in lines:
        line = _PREFIX.sub("", raw.rstrip("\n"))
        marker = parse(line)
        if marker is not None:
            if marker.name == "phase:begin":
                found.begins += 1
                begin = marker.data
            elif marker.name == "phase:end":
                found.ends += 1
                found.transitions.append(_transition(begin or {}, marker.data))
                begin = None
            elif marker.event in ("failed", "refused"):
                found.problems.append(f"marker {marker.name} {dict(marker.data)}")
            continue
        finding = classify(line)
        if finding is not None and finding.action in (Action.RESTART, Action.GIVE_UP):
            found.problems.append(f"{finding.text}: {finding.line}")
    return found


def prefill_times(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Payloads of the markers of prompts whose time was taken by kind of work, in order."""
    markers = (parse(_PREFIX.sub("", raw.rstrip("\n"))) for raw in lines)
    return [dict(m.data) for m in markers if m is not None and m.name == "prefill:times"]


def _transition(begin: Mapping[str, Any], end: Mapping[str, Any]) -> dict[str, Any]:
    """One transition: its cost in ms, in two halves and in the parts that the markers name."""
    begin_ms, end_ms = _cost(begin), _cost(end)
    parts = {f"begin.{name}": value for name, value in _parts(begin).items()}
    parts |= {f"end.{name}": value for name, value in _parts(end).items()}
    return {
        "total_ms": begin_ms + end_ms,
        "begin_ms": begin_ms,
        "end_ms": end_ms,
        "parts_ms": parts,
        "begin": dict(begin),
        "end": dict(end),
    }


def _cost(data: Mapping[str, Any]) -> float:
    """``ms`` or ``total_ms`` of a marker, else the sum of its parts."""
    for name in ("ms", "total_ms"):
        if isinstance(data.get(name), int | float):
            return float(data[name])
    return sum(_parts(data).values())


def _parts(data: Mapping[str, Any]) -> dict[str, float]:
    return {
        name.removesuffix("_ms"): float(value)
        for name, value in data.items()
        if name.endswith("_ms") and name != "total_ms" and isinstance(value, int | float)
    }


def count_problems(arm: Arm, found: Scan, new_tokens: Iterable[int], *, exact: bool = True) -> list[str]:
    """begins = ends = prompts: ``new_tokens`` holds the tokens that each prompt had to compute.

    Without ``exact`` begins are not compared with prompts.
    """
    expected = 0 if arm.min_tokens is None else sum(n >= max(arm.min_tokens, 1) for n in new_tokens)
    problems = []
    if found.begins != found.ends:
        problems.append(f"{found.begins} begins, {found.ends} ends")
    if exact and found.begins != expected:
        problems.append(f"{found.begins} begins, {expected} prompts that should have had one")
    return problems
