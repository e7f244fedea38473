"""The states of a service and the only ways between them."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    STOPPED = "stopped"
    STARTING = "starting"
    WARMING = "warming"
    READY = "ready"
    DEGRADED = "degraded"
    BACKOFF = "backoff"
    FATAL = "fatal"
    STOPPING = "stopping"


_S = State
# fatal is an end: the record keeps it, with its reason, until the next start.
TRANSITIONS: dict[State, frozenset[State]] = {
    _S.STOPPED: frozenset({_S.STARTING}),
    _S.STARTING: frozenset({_S.WARMING, _S.BACKOFF, _S.FATAL, _S.STOPPING}),
    _S.WARMING: frozenset({_S.READY, _S.BACKOFF, _S.FATAL, _S.STOPPING}),
    _S.READY: frozenset({_S.DEGRADED, _S.BACKOFF, _S.FATAL, _S.STOPPING}),
    _S.DEGRADED: frozenset({_S.READY, _S.BACKOFF, _S.FATAL, _S.STOPPING}),
    _S.BACKOFF: frozenset({_S.STARTING, _S.FATAL, _S.STOPPING}),
    _S.STOPPING: frozenset({_S.STOPPED}),
    _S.FATAL: frozenset(),
}


def check_transition(old: State, new: State) -> None:
    """Raises AssertionError for a way that does not exist: a bug of the supervisor, never of its input."""
    if new not in TRANSITIONS[old]:
        raise AssertionError(f"no way from {old} to {new}")
