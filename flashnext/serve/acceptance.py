"""How many of the drafter's tokens the model accepts, from llama-server's own line after each answer."""

from __future__ import annotations

import re
from dataclasses import dataclass

DRAFTS_ENOUGH = 500
ACCEPTANCE_LOW = 0.05
_LINE = re.compile(r"draft acceptance = \d\.\d+ \(\s*(\d+) accepted /\s*(\d+) generated\)")


@dataclass(frozen=True)
class Acceptance:
    """Of one answer."""

    accepted: int
    drafted: int


@dataclass(frozen=True)
class Drafts:
    """A running account that forgets: it is halved when it holds twice what is enough for a verdict."""

    accepted: float = 0.0
    drafted: int = 0

    @property
    def rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    def add(self, seen: Acceptance) -> Drafts:
        accepted, drafted = self.accepted + seen.accepted, self.drafted + seen.drafted
        if drafted > 2 * DRAFTS_ENOUGH:
            return Drafts(accepted * DRAFTS_ENOUGH / drafted, DRAFTS_ENOUGH)
        return Drafts(accepted, drafted)


def parse(line: str) -> Acceptance | None:
    """The account of one answer, None for every other line."""
    match = _LINE.search(line)
    return Acceptance(int(match[1]), int(match[2])) if match else None
