"""The memory transaction as its markers tell it: is it open, do begin and end match, was it rehearsed?"""

from __future__ import annotations

from dataclasses import dataclass

MISMATCH = "begin and end markers of the transaction do not match"
NEVER_ENDED = "idle, and the transaction of the last prompt never ended"
NOT_REHEARSED = "the ready check passed, and its first prompt began and ended no transaction"
_OPEN_S = 10.0  # how long an idle server may have one open


@dataclass
class Transaction:
    """Of one launch of the server; times are of a monotonic clock, in seconds."""

    opened: int = 0
    ended: int = 0
    idle_since: float = 0.0

    @property
    def rehearsed(self) -> bool:
        return self.ended > 0 and self.opened == 0

    def marked(self, event: str, now: float) -> str | None:
        """A marker ``begin`` or ``end``; what is wrong with it, else None."""
        if event == "begin":
            self.opened += 1
            self.idle_since = now
        else:
            self.opened -= 1
            self.ended += 1
        return None if self.opened in (0, 1) else MISMATCH

    def polled(self, *, busy: bool, now: float) -> str | None:
        """The server said whether it works on something; what is wrong with that, else None."""
        if busy or not self.opened:
            self.idle_since = now
        elif now - self.idle_since > _OPEN_S:
            return NEVER_ENDED
        return None
