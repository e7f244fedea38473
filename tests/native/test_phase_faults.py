"""A transition that fails in llama-server: a stable answer, the exit code, and nothing that hangs."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from native_servers import VirtualGpu
from phase_script import words
from phase_server import PhaseServer

from flashnext import proc

pytestmark = [pytest.mark.native, pytest.mark.timeout(300)]

Start = Callable[..., PhaseServer]
EXIT_CODE = 75
CHECKS = {
    "begin": "quiesce",
    "reserve": "reserve",
    "restore": "restore",
    "upload": "upload",
    "generation": "generation",
}


def expect_failure(server: PhaseServer, check: str, ask: Callable[[], httpx.Response]) -> None:
    answer = ask()
    answered = time.monotonic()
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert error["type"] == "unavailable_error"
    assert error["message"].startswith(f"fn-phase-failed: {check}: ")
    assert server.ended(timeout_s=5) == EXIT_CODE
    assert time.monotonic() - answered < 3
    (failed,) = server.markers("failed")
    assert failed["check"] == check
    begins, ends = server.begins_and_ends()
    assert (failed["begins"], failed["ends"]) == (begins, ends)


@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("point", sorted(CHECKS))
def test_each_point(phase_server: Start, point: str, at: int) -> None:
    rng = random.Random(at)
    one = phase_server(phase={"UBATCH": "512", "FAULT": f"{point}:{at}"})
    for n in range(1, at):
        one.ask(words(rng, 20 + n), 3)
        assert one.begins_and_ends() == (n, n)
    expect_failure(one, CHECKS[point], lambda: one.post(words(rng, 30), 3, timeout_s=10))
    expected = (at - 1, at - 1) if point in ("begin", "reserve") else (at, at - 1)
    assert one.begins_and_ends() == expected


def test_a_device_that_refuses_a_workspace(phase_server: Start, phase_gpus: tuple[VirtualGpu, ...]) -> None:
    one = phase_server(phase={"UBATCH": "2048"})
    rng = random.Random(1)
    one.ask(words(rng, 20), 3)
    phase_gpus[1].control("fault alloc:1")
    expect_failure(one, "reserve", lambda: one.post(words(rng, 30), 3))


def test_a_device_that_has_no_room_for_the_slots_any_more(
    phase_server: Start, phase_gpus: tuple[VirtualGpu, ...]
) -> None:
    one = phase_server(phase={"UBATCH": "2048"})
    rng = random.Random(1)
    one.ask(words(rng, 20), 3)
    answers: list[httpx.Response] = []
    client = threading.Thread(target=lambda: answers.append(one.post(words(rng, 3500), 3)))
    client.start()
    assert proc.wait_until(lambda: len(one.markers("begin")) == 2, timeout_s=30, every_s=0.02)
    # somebody else takes all that is given back
    for gpu in phase_gpus:
        assert "error" not in gpu.control("memory 1MiB")
    client.join()
    expect_failure(one, "restore", lambda: answers[0])


def test_everybody_who_waits_is_told(phase_server: Start) -> None:
    one = phase_server(phase={"UBATCH": "512", "FAULT": "restore:1"})
    answers: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda i=i: answers.append(one.post(words(random.Random(i), 1500), 4)))
        for i in range(3)
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    assert [a.status_code for a in answers] == [503] * 3
    assert one.ended(timeout_s=5) == EXIT_CODE


def test_those_who_come_while_it_gives_up_are_told_too(phase_server: Start) -> None:
    """Requests keep coming, ever more of them after the failure, until the process is gone."""
    one = phase_server(phase={"UBATCH": "512", "FAULT": "restore:1"})
    answers: list[tuple[float, float, int, str]] = []

    def hammer(seed: int) -> None:
        body = {"prompt": list(words(random.Random(seed), 5)), "n_predict": 4}
        with httpx.Client(timeout=10) as client:  # made once: the next request follows at once
            while one.child.poll() is None:
                start = time.monotonic()
                try:
                    answer = client.post(f"{one.url}/completion", json=body)
                except httpx.TransportError:
                    continue  # the process has ended, or ends
                answers.append((start, time.monotonic(), answer.status_code, answer.text))

    threads = [threading.Thread(target=hammer, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    assert one.ended(timeout_s=10) == EXIT_CODE
    for thread in threads:
        thread.join()
    first = min(end for _, end, _, _ in answers)
    late = [one for one in answers if one[0] > first]
    assert len(late) > 3, "nobody came after the failure"
    assert {code for _, _, code, _ in answers} == {503}
    assert all("fn-phase-failed: restore" in text for *_, text in answers)
    assert max(end - start for start, end, *_ in late) < 1


def test_a_pool_that_cannot_grow_costs_one_prompt(
    phase_server: Start, phase_gpus: tuple[VirtualGpu, ...]
) -> None:
    """What the guard around a CUDA pool makes of it, without CUDA: the batch fails, nothing else is lost."""
    one = phase_server(phase={"UBATCH": "512", "FAULT": "pool:2"})
    rng = random.Random(3)
    first = words(rng, 700)
    text = one.ask(first, 6)
    memory = [gpu.books()["allocated_bytes"] for gpu in phase_gpus]
    refused = one.post(words(rng, 900), 6)
    assert (refused.status_code, refused.json()["error"]["message"]) == (500, "Compute error.")
    one.idle()
    assert one.begins_and_ends() == (2, 2) and one.markers("failed") == []
    assert [gpu.books()["allocated_bytes"] for gpu in phase_gpus] == memory
    again = one.ask(first, 6)
    assert (again.cached, again.computed) == (0, 700), "the prompt that failed is forgotten"
    assert again.content == text.content
    assert one.begins_and_ends() == (3, 3)


def test_a_stream_gets_the_error_too(phase_server: Start) -> None:
    one = phase_server(phase={"UBATCH": "512", "FAULT": "generation:1"})
    body: dict[str, Any] = {"prompt": [1, 2, 3] * 20, "n_predict": 4, "stream": True}
    with httpx.stream("POST", f"{one.url}/completion", json=body, timeout=20) as answer:
        text = "".join(answer.iter_text())
    assert "fn-phase-failed: generation" in text
    assert one.ended(timeout_s=5) == EXIT_CODE


def test_verify_in_the_server(phase_server: Start) -> None:
    one = phase_server(phase={"UBATCH": "512", "VERIFY": "1", "FAULT": "corrupt:2"})
    rng = random.Random(1)
    one.ask(words(rng, 40), 3)
    expect_failure(one, "verify", lambda: one.post(words(rng, 40), 3))


def test_logits_of_the_first_token(phase_server: Start, tmp_path: Any) -> None:
    folder = tmp_path / "logits"
    folder.mkdir()
    one = phase_server(phase={"UBATCH": "512", "LOGIT_DUMP": str(folder)})
    rng = random.Random(1)
    first = one.ask(words(rng, 600), 2)
    one.ask(words(rng, 5), 2)
    files = sorted(folder.iterdir())
    assert [f.name for f in files] == ["000001.f32", "000002.f32"]
    values = memoryview(files[0].read_bytes()).cast("f")
    (marker, _) = one.markers("logits")
    assert marker["n_vocab"] == len(values) and marker["n_prompt"] == 600
    assert max(range(len(values)), key=values.__getitem__) == first.tokens[0]
