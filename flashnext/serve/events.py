"""What the supervisor's one queue carries: posted by readers, prober and signal handler, read by its loop."""

from __future__ import annotations

from dataclasses import dataclass

from flashnext.serve.child import Child


@dataclass(frozen=True)
class Event:
    """Something that happened. ``launch`` numbers the launch it belongs to, so that late ones are dropped."""

    launch: int
    what: object
    child: Child | None = None


@dataclass(frozen=True)
class Ended:
    """A child's output is at its end."""


@dataclass(frozen=True)
class StopSignal:
    number: int
