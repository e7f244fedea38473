"""The transaction in llama-server, with the exact qualified numbers on the demo model."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable

import httpx
import phase_record
import pytest
from native_servers import VirtualGpu
from phase_script import Step, script, words
from phase_server import Answer, PhaseServer

from flashnext import proc

Start = Callable[..., PhaseServer]
COUNT = int(os.environ.get("FLASHNEXT_PHASE_PROMPTS", "40"))
LONGEST = int(os.environ.get("FLASHNEXT_PHASE_LONGEST", "6000"))
CONTEXT = 8192 if LONGEST <= 6000 else 32768

pytestmark = [pytest.mark.native, pytest.mark.timeout(600 if LONGEST <= 6000 else 7200)]


def run(
    server: PhaseServer, steps: list[Step], gpus: tuple[VirtualGpu, ...]
) -> tuple[list[Answer], list[list[int]]]:
    """Answers of the comparable steps, and the devices' allocated bytes while idle after each step."""
    answers, memory = [], []
    for step in steps:
        if step.kind == "leaves":
            server.leave(step.prompt, step.leaves_after_s)
            time.sleep(1.1)
            server.idle()
        elif step.kind == "over":
            refused = server.post(step.prompt, 4)
            assert refused.status_code == 400
            assert refused.json()["error"]["type"] == "exceed_context_size_error"
        else:
            answers.append(server.ask(step.prompt, step.n_predict))
        memory.append([gpu.books()["allocated_bytes"] for gpu in gpus])
    return answers, memory


def test_prompts_at_the_large_micro_batch(phase_server: Start, phase_gpus: tuple[VirtualGpu, ...]) -> None:
    """Text and acceptance equal a server with -ub 2048: without checkpoints both cut prompts alike."""
    steps = script(3, COUNT, LONGEST, CONTEXT)
    same = ("--ctx-checkpoints", "0")
    numbers = {"-c": str(CONTEXT)}
    start = time.monotonic()
    control = phase_server(*same, numbers={**numbers, "-ub": "2048"})
    plain, _ = run(control, [s for s in steps if s.comparable], phase_gpus)
    assert control.begins_and_ends() == (0, 0) and control.metrics() == {}

    between = time.monotonic()
    phase = phase_server(*same, phase={"UBATCH": "2048"}, numbers=numbers)
    texts, memory = run(phase, steps, phase_gpus)
    phase_record.keep(
        f"prompts-{COUNT}",
        prompts=COUNT, longest=LONGEST, context=CONTEXT, kinds=Counter(step.kind for step in steps),
        compared=len(texts), tokens=sum(len(s.prompt) for s in steps if s.comparable),
        computed=sum(a.computed for a in texts), cached=sum(a.cached for a in texts),
        same_text=[a.tokens for a in texts] == [a.tokens for a in plain],
        drafted=sum(a.drafted for a in texts), accepted=sum(a.accepted for a in texts),
        drafted_without=sum(a.drafted for a in plain), accepted_without=sum(a.accepted for a in plain),
        stopped=len(phase.markers("stopped")), begins_and_ends=phase.begins_and_ends(),
        device_bytes_after_each=sorted({tuple(m) for m in memory}),
        seconds={"control": round(between - start, 1), "transaction": round(time.monotonic() - between, 1)},
        begin_ms=phase_record.parts(phase.markers("begin")), end_ms=phase_record.parts(phase.markers("end")),
    )  # fmt: skip
    assert [a.tokens for a in texts] == [a.tokens for a in plain]
    kinds = [step.kind for step in steps if step.comparable]
    drafts = [
        [(a.drafted, a.accepted) for a, kind in zip(answers, kinds, strict=True) if kind != "settle"]
        for answers in (texts, plain)
    ]
    assert drafts[0] == drafts[1]
    assert sum(a.drafted for a in texts) > COUNT, "the drafter worked"
    assert memory[1:] == memory[:-1], "flat after the first"
    begins, ends = phase.begins_and_ends()
    assert begins == ends >= len(texts)
    metrics = phase.metrics()
    assert (metrics["fn_phase_begins_total"], metrics["fn_phase_ends_total"]) == (begins, ends)
    assert metrics["fn_phase_failures_total"] == 0 and metrics["fn_phase_active"] == 0
    assert metrics["fn_phase_last_begin_ms"] > 0 and metrics["fn_phase_last_end_ms"] > 0
    for marker in phase.markers("begin"):
        assert marker["micro_batch"] == 2048 and marker["capacity"] == 0 and marker["bytes"] > 0
    for marker in phase.markers("end"):
        assert marker["micro_batch"] == 512 and marker["capacity"] == 150 * 2, "slots of both layers"
    assert phase.end() == 0


def test_checkpoints_stay_where_they_are(phase_server: Start, phase_gpus: tuple[VirtualGpu, ...]) -> None:
    """At 512 all is equal, also prompts that go on from a checkpoint; at 2048 the positions are."""
    steps = [s for s in script(2, 14, 3000, CONTEXT) if s.comparable]
    control = phase_server()
    plain, _ = run(control, steps, phase_gpus)
    positions = control.checkpoints()
    assert len(positions) > len(steps) and max(a.cached for a in plain) > 0
    small = phase_server(phase={"UBATCH": "512"})
    texts, _ = run(small, steps, phase_gpus)
    assert texts == plain
    assert small.checkpoints() == positions
    large = phase_server(phase={"UBATCH": "2048"})
    texts, _ = run(large, steps, phase_gpus)
    assert large.checkpoints() == positions
    assert [(a.cached, a.computed) for a in texts] == [(a.cached, a.computed) for a in plain]


def test_bypass_says_what_the_transaction_says(
    phase_server: Start, phase_gpus: tuple[VirtualGpu, ...]
) -> None:
    """Without adding lane by lane: the cache holds the same experts, so even the roundings agree."""
    steps = [s for s in script(3, 8, 1500, CONTEXT) if s.comparable]
    bypass = phase_server(phase={"UBATCH": "2048", "MODE": "bypass"}, merge=False)
    plain, memory = run(bypass, steps, phase_gpus)
    assert {m["micro_batch"] for m in bypass.markers("begin")} == {512}
    assert {m["bytes"] for m in bypass.markers("begin")} == {0}
    transaction = phase_server(phase={"UBATCH": "512"}, merge=False)
    texts, again = run(transaction, steps, phase_gpus)
    assert texts == plain
    assert memory[1:] == memory[:-1] and again[1:] == again[:-1]
    assert bypass.begins_and_ends() == transaction.begins_and_ends() == (len(steps), len(steps))


@pytest.mark.parametrize(("tokens", "begins"), [(2047, 0), (2048, 1)])
def test_the_minimum_is_about_tokens_to_compute(phase_server: Start, tokens: int, begins: int) -> None:
    one = phase_server(phase={"UBATCH": "2048", "MIN_TOKENS": "2048"})
    prompt = words(random.Random(1), tokens)
    one.ask(prompt, 4)
    assert one.begins_and_ends() == (begins, begins)
    (decided,) = one.markers("decided")
    assert (decided["n_tokens"], decided["n_cached"], decided["begin"]) == (tokens, 0, begins == 1)
    one.ask((*prompt, *words(random.Random(2), 200)), 4)
    assert one.begins_and_ends() == (begins, begins), "2,247 tokens, most of them cached"
    assert one.markers("decided")[1]["n_cached"] > 0


def test_the_first_prompt_rehearses(phase_server: Start, phase_gpus: tuple[VirtualGpu, ...]) -> None:
    one = phase_server(phase={"UBATCH": "2048", "MIN_TOKENS": "2048", "REHEARSE": "1"})
    before = [gpu.books()["allocated_bytes"] for gpu in phase_gpus]
    text = one.ask(words(random.Random(1), 5), 24)
    assert one.begins_and_ends() == (1, 1)
    assert one.markers("begin")[0]["micro_batch"] == 2048 and one.markers("end")[0]["capacity"] == 150 * 2
    assert [gpu.books()["allocated_bytes"] for gpu in phase_gpus] == before
    one.ask(words(random.Random(2), 2000), 4)
    assert one.begins_and_ends() == (1, 1), "the first and no other"
    plain = phase_server(phase={"UBATCH": "2048", "MIN_TOKENS": "2048"})
    assert plain.ask(words(random.Random(1), 5), 24).tokens == text.tokens
    assert plain.begins_and_ends() == (0, 0)


def test_a_client_that_leaves_costs_one_micro_batch(
    phase_server: Start, phase_gpus: tuple[VirtualGpu, ...]
) -> None:
    rng = random.Random(5)
    one = phase_server(phase={"UBATCH": "512"})
    one.ask(words(rng, 20), 4)
    base = [gpu.books()["allocated_bytes"] for gpu in phase_gpus]
    for after_s in (0.1, 0.4, 0.8):
        one.leave(words(rng, 7000), after_s)
        time.sleep(1.1)
        one.idle()
    begins, ends = one.begins_and_ends()
    assert begins == ends == 4
    stopped = one.markers("stopped")
    assert stopped, "no batch was cut: the machine is faster than the test"
    for marker in stopped:
        assert marker["n_tokens"] % 512 == 0 and marker["n_tokens"] < marker["n_batch"]
    assert [gpu.books()["allocated_bytes"] for gpu in phase_gpus] == base
    assert one.ask(words(rng, 900), 8).computed == 900


def test_metrics_answer_during_a_transition(phase_server: Start, phase_gpus: tuple[VirtualGpu, ...]) -> None:
    """A device that does not answer holds the begin up; whoever reads metrics and slots is not held up."""
    one = phase_server(phase={"UBATCH": "2048"})
    prompt = words(random.Random(6), 300)
    one.ask(prompt[:20], 4)
    client = threading.Thread(target=one.ask, args=(prompt, 4))
    phase_gpus[0].child.send_signal(signal.SIGSTOP)
    try:
        client.start()
        assert proc.wait_until(lambda: len(one.markers("decided")) == 2, timeout_s=30, every_s=0.02)
        start = time.monotonic()
        metrics = [one.metrics("fn_") for _ in range(5)]
        slots = httpx.get(f"{one.url}/slots", timeout=5).json()
        assert time.monotonic() - start < 1
        assert one.begins_and_ends() == (1, 1), "still in the transition"
        assert {m["fn_phase_begins_total"] for m in metrics} == {1}
        assert slots[0]["is_processing"]
    finally:
        phase_gpus[0].child.send_signal(signal.SIGCONT)
        client.join()
    assert one.begins_and_ends() == (2, 2)


def test_two_clients_take_turns(phase_server: Start) -> None:
    one = phase_server(phase={"UBATCH": "2048"})
    prompts = [words(random.Random(i), 700 + i) for i in range(4)]
    got: dict[int, Answer] = {}
    threads = [threading.Thread(target=lambda i=i: got.update({i: one.ask(prompts[i], 8)})) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == [0, 1, 2, 3]
    assert one.begins_and_ends() == (4, 4)


def test_shutdown_in_mid_prompt_is_a_clean_exit(phase_server: Start) -> None:
    one = phase_server(phase={"UBATCH": "512"})
    # upstream's server waits for its clients, so this one leaves
    gone = threading.Thread(target=one.leave, args=(words(random.Random(1), 7000), 3.0))
    gone.start()
    assert proc.wait_until(lambda: bool(one.markers("begin")), timeout_s=30)
    assert one.end() == 0
