"""Conversations with one server, compared between drafters.

A script is a list of turns with prompts fixed beforehand (token ids), so that every arm is asked the same,
also after its text went another way. Arms are compared turn by turn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from mtp_server import WHOLE_CHARACTERS, Completion, MtpServer

WORDS = 256  # the byte tokens; no control tokens in prompts


class Turn(NamedTuple):
    name: str
    prompt: tuple[int, ...]
    n_predict: int
    leaves: bool = False  # the client goes away in mid-stream; nothing to compare


class Divergence(NamedTuple):
    turn: str
    at: int  # index of the first token that differs
    gap: float  # distance of the two best logits there, in the run without a drafter


def words(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(WORDS) for _ in range(count))


def situations(seed: int, answers: dict[str, tuple[int, ...]]) -> list[Turn]:
    """One of each kind of turn. `answers`: texts of the run without a drafter, as far as they are known."""
    rng = random.Random(seed)

    def said(turn: str) -> tuple[int, ...]:
        return answers.get(turn, ())

    opening = words(rng, 60)
    more = words(rng, 12)
    follow_up = opening + said("fresh") + more
    edit = (*follow_up[:30], *words(rng, 3), *follow_up[33:])
    long = words(rng, 420)
    unrelated = words(rng, 40)
    tail = words(rng, 9)
    turns = [
        Turn("fresh", opening, 24),
        Turn("follow-up", follow_up, 24),
        Turn("edit-in-mid-history", edit, 24),
        Turn("chunked-prefill", long, 24),
        Turn("unrelated-after-long", unrelated, 24),
        Turn("restore-source", long[:300], 8),
        Turn("checkpoint-restore", long[:299] + tail, 24),
    ]
    history = words(rng, 30)
    for i in range(5):
        turns.append(Turn(f"five-turns-{i}", history, 12))
        history += said(f"five-turns-{i}") + words(rng, 6)
    for i in range(20):
        turns.append(Turn(f"leaver-{i}", words(rng, 25), 400, leaves=True))
    turns.append(Turn("after-leavers", words(rng, 30), 24))
    return turns


def conversation(seed: int) -> list[Turn]:
    """Three turns of random lengths; the later ones keep a random part of what came before."""
    rng = random.Random(seed)
    history: tuple[int, ...] = ()
    turns = []
    for i in range(3):
        history = history[: rng.randint(0, len(history))] + words(rng, rng.randint(4, 60))
        turns.append(Turn(f"{seed}-{i}", history, rng.randint(6, 14)))
    return turns


def ask(server: MtpServer, turn: Turn, gaps: bool = False) -> Completion | None:
    if turn.leaves:
        server.leave_after(turn.prompt, 20)
        return None
    return server.tokens(turn.prompt, turn.n_predict, gaps=gaps, **WHOLE_CHARACTERS)


def run(server: MtpServer, turns: Sequence[Turn], gaps: bool = False) -> dict[str, Completion]:
    done = {turn.name: ask(server, turn, gaps) for turn in turns}
    return {name: completion for name, completion in done.items() if completion is not None}


def divergences(off: dict[str, Completion], on: dict[str, Completion]) -> list[Divergence]:
    found = []
    for name, expected in off.items():
        got = on[name].tokens
        pairs = zip(expected.tokens, got, strict=True)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if at is not None:
            found.append(Divergence(name, at, expected.gaps[at]))
    return found
