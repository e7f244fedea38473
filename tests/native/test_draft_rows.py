"""A prompt through the draft head in pieces: the same drafts as in one call, in less new memory."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from phase_server import Answer, PhaseServer

Start = Callable[..., PhaseServer]

pytestmark = [pytest.mark.native, pytest.mark.timeout(600)]
STOCK = {"FN_DRAFT_ROWS": "0"}
# what the head would write, with its logit; the text does not depend on it
CANDIDATE = re.compile(r"draft candidate +\d+, pos +\d+: .*")


def new_pages(pid: int) -> int:
    """Pages that a process has been given so far, without those read from a disk."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[7])


@pytest.mark.parametrize("phase", [None, {"UBATCH": "2048"}], ids=["plain", "transaction"])
def test_text_and_drafts_are_those_of_one_call(phase: dict[str, str] | None, phase_server: Start) -> None:
    """More than a batch of 4,096 tokens, goes on from it, less than a micro-batch, neither's multiple."""
    rng = random.Random(5)
    long = [rng.randrange(8, 250) for _ in range(5003)]
    prompts = [long, [*long, *long[:707]], long[:300], long[1000:3500]]

    def run(switches: dict[str, str]) -> tuple[list[Answer], list[str]]:
        server = phase_server("-lv", "5", phase=phase, switches=switches)
        answers = [server.ask(prompt, 24) for prompt in prompts]
        return answers, CANDIDATE.findall(server.text)

    plain, candidates = run(STOCK)
    assert len(candidates) > 24 * len(prompts) and max(a.cached for a in plain) > 0
    assert run({}) == (plain, candidates)


def test_a_long_prompt_takes_fewer_new_pages(phase_server: Start) -> None:
    def pages(switches: dict[str, str]) -> int:
        server = phase_server(switches=switches)
        server.ask([7] * 600, 2)
        before = new_pages(server.child.pid)
        server.ask([index % 240 + 8 for index in range(8000)], 2)
        return new_pages(server.child.pid) - before

    stock, ours = pages(STOCK), pages({})
    print(f"new pages: {stock} in one call, {ours} in pieces")
    assert ours < 0.8 * stock
