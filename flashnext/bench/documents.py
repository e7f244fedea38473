"""Seeded documents of our own making: logs, code, configuration and prose, with places for planted lines.

The same seed and size give the same text, on every machine and Python. No name or number of the filler can be
taken for a planted fact: the two draw from disjoint vocabularies.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Style = Literal["log", "code", "config", "prose"]
STYLES: tuple[Style, ...] = ("log", "code", "config", "prose")

_SERVICES = ("ingest", "billing", "router", "indexer", "mailer", "archive", "gateway", "planner", "sampler")
_LEVELS = ("DEBUG", "INFO", "INFO", "INFO", "NOTICE", "WARN")
_LOG_VERBS = (
    "accepted",
    "queued",
    "retried",
    "flushed",
    "rotated",
    "closed",
    "merged",
    "compacted",
    "resumed",
)
_LOG_THINGS = ("batch", "segment", "session", "lease", "snapshot", "cursor", "shard", "page", "ticket")
_CODE_VERBS = ("load", "merge", "fold", "scan", "split", "rank", "trim", "pack", "trace", "align")
_CODE_THINGS = (
    "rows",
    "ranges",
    "nodes",
    "frames",
    "tokens",
    "spans",
    "edges",
    "chunks",
    "fields",
    "buckets",
)
_CONFIG_WORDS = ("timeout", "window", "depth", "budget", "interval", "limit", "threshold", "width", "quota")
_PEOPLE = (
    "The ferryman",
    "Her aunt",
    "The baker",
    "A surveyor",
    "The night porter",
    "My neighbour",
    "The pilot",
)
_ACTS = (
    "walked along the quay", "counted the lamps", "repaired a hinge", "wrote to the council",
    "waited for the tide", "carried the crates indoors", "argued about the timetable",
    "painted the railing", "listened to the rain", "measured the yard twice",
)  # fmt: skip
_WHENS = (
    "before breakfast",
    "at noon",
    "in the late afternoon",
    "after the storm",
    "on market day",
    "that winter",
)
_TAILS = (
    "and nobody thought it strange", "because the road was closed", "as it had been agreed in spring",
    "although the keys were missing", "while the kettle cooled", "and then went home by the long way",
)  # fmt: skip


@dataclass(frozen=True)
class Planted:
    """A line to plant at ``where`` (0 the beginning, 1 the end), in the middle of text of its own style."""

    where: float
    style: Style
    line: str


def filler(seed: int | str, chars: int) -> str:
    """Text without any planted line, at least ``chars`` characters (0 gives none)."""
    return document(seed, chars, ())


def document(seed: int | str, chars: int, planted: Sequence[Planted]) -> str:
    """Text of about ``chars`` characters with every planted line in it, in order of ``where``.

    Planted lines are never left out: a size below theirs gives just them.
    """
    rng = random.Random(f"document {seed}")
    budget = chars - sum(len(p.line) + 1 for p in planted)
    parts: list[str] = []
    written = 0
    todo = sorted(planted, key=lambda p: p.where)
    sections = _sections(rng)
    for fact in todo:
        while written < fact.where * budget:
            section = next(sections)
            parts.append(section)
            written += len(section)
        parts.append(_frame(rng, fact))
    while written < budget:
        section = next(sections)
        parts.append(section)
        written += len(section)
    return "".join(parts)


def _frame(rng: random.Random, fact: Planted) -> str:
    """The planted line as its style writes it; its text is untouched."""
    if fact.style == "log":
        return f"{_stamp(rng)} INFO {rng.choice(_SERVICES)}: {fact.line}\n"
    if fact.style == "code":
        return f"# {fact.line}\n"
    return f"{fact.line}\n"


def _sections(rng: random.Random) -> Iterator[str]:
    """Endless sections of four to nine lines in changing styles."""
    makers: dict[Style, Callable[[random.Random], str]] = {
        "log": _log_line,
        "code": _code_line,
        "config": _config_line,
        "prose": _prose_line,
    }
    while True:
        make = makers[rng.choice(STYLES)]
        yield "".join(make(rng) + "\n" for _ in range(rng.randint(4, 9)))


def _stamp(rng: random.Random) -> str:
    month, day, hour, minute = rng.randint(1, 12), rng.randint(1, 28), rng.randint(0, 23), rng.randint(0, 59)
    return f"2031-{month:02}-{day:02}T{hour:02}:{minute:02}"


def _log_line(rng: random.Random) -> str:
    what = f"{rng.choice(_LOG_VERBS)} {rng.choice(_LOG_THINGS)} {rng.getrandbits(24):06x}"
    return f"{_stamp(rng)} {rng.choice(_LEVELS)} {rng.choice(_SERVICES)}: {what} in {rng.randint(1, 999)} ms"


def _code_line(rng: random.Random) -> str:
    verb, thing, other = rng.choice(_CODE_VERBS), rng.choice(_CODE_THINGS), rng.choice(_CODE_THINGS)
    return rng.choice(
        (
            f"def {verb}_{thing}({other}, limit={rng.randint(2, 64)}):",
            f"    {thing} = {verb}_{other}({thing}[{rng.randint(0, 9)}:])",
            f"    if len({thing}) > {rng.randint(2, 512)}: return {verb}_{thing}({other})",
            f"    for item in {other}: {thing}.append({verb}(item, {rng.randint(1, 99)}))",
        )
    )


def _config_line(rng: random.Random) -> str:
    name = f"{rng.choice(_SERVICES)}.{rng.choice(_CODE_THINGS)}.{rng.choice(_CONFIG_WORDS)}"
    return f"{name} = {rng.randint(1, 4096)}"


def _prose_line(rng: random.Random) -> str:
    return f"{rng.choice(_PEOPLE)} {rng.choice(_ACTS)} {rng.choice(_WHENS)}, {rng.choice(_TAILS)}."


def fit(build: Callable[[int], str], count: Callable[[str], int], tokens: int) -> str:
    """The text ``build(chars)`` that comes closest to ``tokens`` from below, as ``count`` measures.

    A text that is over the limit at its smallest is returned as it is: the caller sees its length.
    """
    chars = tokens * 3
    best = build(0)
    for _ in range(4):
        text = build(chars)
        found = count(text)
        if found <= tokens:
            best = max(best, text, key=len)
            if found >= 0.98 * tokens:
                break
        chars = int(chars * 0.99 * tokens / max(found, 1))
    return best
