"""Prompts for a server: lengths log-uniform, follow-ups, edits, clients that leave, over the context."""

from __future__ import annotations

import math
import random
from typing import Literal, NamedTuple

Kind = Literal["fresh", "follow-up", "edit", "leaves", "settle", "over", "again"]


class Step(NamedTuple):
    """``settle`` follows a client that left: upstream's drafter pairs a prompt's first token with the last
    hidden row of the request before, so this prompt's drafts, not its text, depend on how far that one came.
    """

    kind: Kind
    prompt: tuple[int, ...]
    n_predict: int
    leaves_after_s: float = 0.0

    @property
    def comparable(self) -> bool:
        """Two servers that do the same answer this with the same bytes, whenever a client left before."""
        return self.kind not in ("leaves", "over")


def words(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(256) for _ in range(count))


def length(rng: random.Random, longest: int) -> int:
    return round(math.exp(rng.uniform(0, math.log(longest))))


def script(seed: int, count: int, longest: int, context: int) -> list[Step]:
    """Answers are not part of the prompts, so every arm is asked the same. Each kind occurs."""
    rng = random.Random(seed)
    kinds: list[Kind] = ["fresh", "follow-up", "edit", "again", "leaves", "over"]
    weights = [40, 20, 15, 5, 15, 5]
    steps: list[Step] = []
    last: tuple[int, ...] = ()
    for i in range(count):
        kind = kinds[i] if i < len(kinds) else rng.choices(kinds, weights)[0]
        if not last and kind in ("follow-up", "edit", "again"):
            kind = "fresh"
        if kind == "over":
            steps.append(Step(kind, words(rng, context + 1 + rng.randrange(100)), 4))
            continue
        if kind == "leaves":
            steps.append(Step(kind, words(rng, longest), 400, rng.uniform(0.05, 2.0)))
            last = ()  # how far it came is a matter of time: nothing may build on it
            steps.append(Step("settle", words(rng, 8), 4))
            continue
        if kind == "fresh":
            last = words(rng, length(rng, longest))
        elif kind == "follow-up":
            last = (last + words(rng, length(rng, 600)))[: longest + 600]
        elif kind == "edit":
            at = rng.randrange(len(last))
            last = (*last[:at], *words(rng, min(3, len(last) - at)), *last[at + 3 :])
        steps.append(Step(kind, last, rng.randrange(4, 20)))
    return steps
