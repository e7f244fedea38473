"""Lean prefill in llama-server, with the qualified numbers on the demo model: cache, drafter, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from native_servers import VirtualGpu
from phase_script import Step, script
from phase_server import Answer, PhaseServer

Start = Callable[..., PhaseServer]

pytestmark = [pytest.mark.native, pytest.mark.timeout(600)]


@pytest.fixture
def lean_server(
    native_build: Any, six_layers: tuple[Path, Path], phase_gpus: tuple[VirtualGpu, ...], tmp_path: Path
) -> Iterator[Start]:
    """Starts a server on both virtual GPUs; the one before is ended first.

    Each has three layers, one more than the ring has places.
    """
    with ExitStack() as stack:

        def start(*options: str, **kwargs: Any) -> PhaseServer:
            stack.pop_all().close()
            split = ("-ts", "1,1")
            server = PhaseServer(
                native_build.bin, six_layers, tmp_path, phase_gpus, *split, *options, **kwargs
            )
            return stack.enter_context(server)

        yield start


def answers(server: PhaseServer, steps: list[Step]) -> list[Answer]:
    return [server.ask(step.prompt, step.n_predict) for step in steps]


def assert_lean(server: PhaseServer, chunk: int) -> dict[str, float]:
    (marker,) = server.markers("attached", "lean")
    assert marker["chunk"] == chunk
    metrics = server.metrics("fn_lean_")
    assert metrics["fn_lean_chunk_tokens"] == chunk
    assert metrics["fn_lean_passes_total"] > 0
    assert metrics["fn_lean_reserves_total"] == 0
    devices = [value for name, value in metrics.items() if name.startswith("fn_lean_copied_bytes_total")]
    assert len(devices) == 2 and all(value > 0 for value in devices), "slots were copied on each device"
    return metrics


def test_text_and_checkpoints_are_those_without_it(lean_server: Start) -> None:
    """At the same micro-batch all is equal, also prompts that go on from a checkpoint. At 4,096 the positions
    of the checkpoints are, and so what a follow-up computes again."""
    steps = [s for s in script(2, 8, 3000, 8192) if s.comparable]
    control = lean_server()
    plain = answers(control, steps)
    positions = control.checkpoints()
    assert len(positions) > len(steps) and max(a.cached for a in plain) > 0
    assert control.metrics("fn_lean_") == {}
    hits = control.metrics("fn_expert_cache_hits_total")

    same = lean_server("--lean-prefill", "512")
    assert answers(same, steps) == plain
    assert same.checkpoints() == positions
    assert same.metrics("fn_expert_cache_hits_total") == hits
    assert_lean(same, 512)
    assert same.end() == 0

    large = lean_server("--lean-prefill", "4096")
    again = answers(large, steps)
    assert large.checkpoints() == positions
    assert [(a.cached, a.computed) for a in again] == [(a.cached, a.computed) for a in plain]
    metrics = assert_lean(large, 4096)
    assert metrics["fn_lean_plain_total"] > 0
    assert large.end() == 0


def test_a_large_chunk_gives_the_text_of_that_micro_batch(lean_server: Start) -> None:
    """Without checkpoints both cut prompts alike."""
    steps = [s for s in script(3, 4, 5000, 8192) if s.comparable]
    same = ("--ctx-checkpoints", "0")
    plain = answers(lean_server(*same, numbers={"-ub": "2048"}), steps)
    lean = lean_server(*same, "--lean-prefill", "2048")
    assert answers(lean, steps) == plain
    assert sum(a.drafted for a in plain) > 0
    assert_lean(lean, 2048)


def test_the_draft_head_has_its_memory_before_a_chunk_is_chosen(
    lean_server: Start, phase_gpus: tuple[VirtualGpu, ...], six_layers: tuple[Path, Path]
) -> None:
    """What is free when `auto` decides is free when the server is ready: nothing large comes after it."""
    server = lean_server("--lean-prefill", "auto")
    (marker,) = server.markers("attached", "lean")
    decided = [device["free_bytes"] for device in marker["devices"]]
    ready = [gpu.books()["free_bytes"] for gpu in phase_gpus]
    head = six_layers[1].stat().st_size
    assert max(a - b for a, b in zip(decided, ready, strict=True)) < head / 10


def test_both_at_once_are_refused(lean_server: Start) -> None:
    server = lean_server("--lean-prefill", "2048", phase={"UBATCH": "2048"}, ready=False)
    assert server.ended(timeout_s=60) != 0
    (marker,) = server.markers("refused", "lean")
    assert "alternatives" in marker["reason"]


@pytest.mark.parametrize("value", ["many", "8192x", "0x10", "-5", "-1", "1e4", "", "99999999999"])
def test_what_is_no_number_of_tokens_ends_the_start(value: str, lean_server: Start) -> None:
    server = lean_server("--lean-prefill", value, ready=False)
    assert server.ended(timeout_s=60) != 0
    assert f'"{value}" is neither auto nor a number of tokens' in server.text
    assert server.markers("refused", "lean") == []


def test_a_chunk_above_the_batch_ends_the_start(lean_server: Start) -> None:
    server = lean_server("--lean-prefill", "8192", ready=False)
    assert server.ended(timeout_s=60) != 0
    (marker,) = server.markers("refused", "lean")
    assert "at most the batch (4096)" in marker["reason"]
