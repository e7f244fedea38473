"""Context checkpoints inside a micro-batch: a prompt is computed as if no checkpoint were due."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from phase_script import script, words
from phase_server import PhaseServer

Start = Callable[..., PhaseServer]
OFF = {"FN_INLINE_CHECKPOINTS": "0"}

pytestmark = [pytest.mark.native, pytest.mark.timeout(600)]


def test_kept_states_are_those_of_prompts_that_end_there(native_build: Any, tiny_model: Path) -> None:
    argv = [native_build.bin / "test-fn-inline-checkpoints", tiny_model]
    done = subprocess.run(argv, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("kept: ") == 12


def decodes(server: PhaseServer) -> float:
    """Calls of llama_decode, each of up to a batch."""
    return server.metrics("llamacpp:n_decode_total")["llamacpp:n_decode_total"]


@pytest.mark.parametrize(
    ("options", "numbers"),
    [((), {}), (("--lean-prefill", "2048"), {}), ((), {"-ub": "2048"}), ((), {"-b": "1024"})],
)
def test_the_same_checkpoints_and_fewer_pieces(
    phase_server: Start, options: tuple[str, ...], numbers: dict[str, str]
) -> None:
    """Where a batch is full is no reason for one."""
    rng = random.Random(6)
    long = words(rng, 6000)
    prompts = [(s.prompt, s.n_predict) for s in script(2, 6, 2000, 8192) if s.comparable]
    prompts += [(long, 4), ((*long[:5900], *words(rng, 250)), 4), ((*long[:3000], *words(rng, 2600)), 4)]
    cut = phase_server(*options, numbers=numbers, switches=OFF)
    before = [cut.ask(*prompt) for prompt in prompts]
    pieces = decodes(cut)
    inline = phase_server(*options, numbers=numbers)
    after = [inline.ask(*prompt) for prompt in prompts]
    assert inline.checkpoints() == cut.checkpoints() != []
    assert [(a.cached, a.computed) for a in after] == [(a.cached, a.computed) for a in before]
    assert decodes(inline) < pieces


def test_where_a_prompt_was_cut_is_no_place_of_the_next_one(phase_server: Start) -> None:
    """With one state to keep the first prompt ends a batch at 4,096, where the second one's is full."""
    rng = random.Random(7)
    prompts = [words(rng, 4100), words(rng, 4300)]
    seen = []
    for switches in (OFF, {}):
        server = phase_server("--spec-draft-n-max", "1", switches=switches)
        for prompt in prompts:
            server.ask(prompt, 4)
        seen.append(server.checkpoints())
    assert seen[1] == seen[0] != []


@pytest.mark.parametrize("micro_batch", ["512", "2048"])
def test_text_is_that_without_checkpoints(phase_server: Start, micro_batch: str) -> None:
    """The micro-batches are the same, so all is: also what the drafter saw."""
    rng = random.Random(4)
    prompts = [words(rng, n) for n in (5, 300, 516, 517, 1500, 4100, 6000)]
    numbers = {"-ub": micro_batch, "-c": "8192"}
    without = phase_server("--ctx-checkpoints", "0", numbers=numbers)
    expected = [without.ask(p, 12) for p in prompts]
    inline = phase_server(numbers=numbers)
    assert [inline.ask(p, 12) for p in prompts] == expected
    assert len(inline.checkpoints()) > len(prompts)
    assert sum(a.drafted for a in expected) > 0


def test_a_conversation_has_its_checkpoints_at_the_same_messages(phase_server: Start) -> None:
    """Those at the last user message lie inside the batch, too."""
    rng = random.Random(5)
    talks = []
    messages: list[dict[str, str]] = []
    for n in (900, 40, 700, 30):
        text = " ".join(rng.choice(["river", "stone", "cloud", "seven", "blue"]) for _ in range(n))
        messages = [*messages, {"role": "user", "content": text}]
        talks.append(messages)
        messages = [*messages, {"role": "assistant", "content": "yes"}]
    seen = []
    for switches in (OFF, {}):
        server = phase_server(switches=switches, numbers={"-c": "16384"})
        usage = [chat(server, talk) for talk in talks]
        seen.append((server.checkpoints(), usage))
    assert seen[0] == seen[1]
    assert max(cached for cached, _ in seen[0][1]) > 0
    assert len(seen[0][0]) > 2 * len(talks), "also at a user message"


def chat(server: PhaseServer, messages: list[dict[str, str]]) -> tuple[int, int]:
    """Tokens taken from the cache, and tokens computed."""
    body = {"messages": messages, "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    timings = answer.json()["timings"]
    return timings["cache_n"], timings["prompt_n"]
