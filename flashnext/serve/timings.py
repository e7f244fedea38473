"""What llama-server's own log lines say about a prompt under way and about accepted drafts.

``/slots`` tells neither how long the prompt is nor how many drafts were accepted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

DRAFTS_ENOUGH = 500
ACCEPTANCE_LOW = 0.05
_ACCEPTANCE = re.compile(r"draft acceptance = \d\.\d+ \(\s*(\d+) accepted /\s*(\d+) generated\)")

_PROMPT = re.compile(
    r"prompt processing, n_tokens = +(\d+), progress = (\d\.\d+), t = +\d+\.\d+ s / (\d+\.\d+) tokens"
)
# a block without one of these has no line for us
NEEDLES = ("draft acceptance", "prompt processing")


@dataclass(frozen=True)
class PromptProgress:
    """``share`` of the prompt that is read, 0 to 1, cached tokens included; ``done`` tokens were computed."""

    share: float
    done: int
    tokens_per_second: float

    def tokens(self, cached: int) -> int:
        """How long the prompt is, from a share of two digits: about."""
        return round((self.done + cached) / self.share) if self.share else 0

    def left_s(self, cached: int) -> float:
        """How long the rest takes if it goes on like this."""
        rest = max(0, self.tokens(cached) - self.done - cached)
        return rest / self.tokens_per_second if self.tokens_per_second else 0.0


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


def parse(line: str) -> Acceptance | PromptProgress | None:
    """What a line tells, None for every line that tells nothing of this."""
    match = _PROMPT.search(line)
    if match is not None:
        return PromptProgress(min(1.0, float(match[2])), int(match[1]), float(match[3]))
    match = _ACCEPTANCE.search(line)
    return Acceptance(int(match[1]), int(match[2])) if match else None
