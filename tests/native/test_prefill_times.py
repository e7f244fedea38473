"""Where a prompt's time goes: the kinds add up, and asking for them changes nothing that is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from native_servers import VirtualGpu
from phase_server import PhaseServer

Start = Callable[..., PhaseServer]

pytestmark = [pytest.mark.native, pytest.mark.timeout(600)]

ON = {"FN_PREFILL_TIMES": "1"}
PROMPT = [(i * i * 31 + i) % 256 for i in range(1500)]
# of a prompt whose experts cross to a virtual GPU only with lean prefill: there is no upload without CUDA
COMPUTED = ("experts", "attention", "indexer", "top_k", "linear_attention", "transfer", "other")


@pytest.fixture
def server(
    native_build: Any, six_layers: tuple[Path, Path], phase_gpus: tuple[VirtualGpu, ...], tmp_path: Path
) -> Iterator[Start]:
    """Starts a server on both virtual GPUs, or on the CPU; the one before is ended first."""
    with ExitStack() as stack:

        def start(*options: str, on_cpu: bool = False, **kwargs: Any) -> PhaseServer:
            stack.pop_all().close()
            split = () if on_cpu else ("-ts", "1,1")
            gpus = () if on_cpu else phase_gpus
            started = PhaseServer(native_build.bin, six_layers, tmp_path, gpus, *split, *options, **kwargs)
            return stack.enter_context(started)

        yield start


def ask(server: PhaseServer, prompt: list[int], n_predict: int = 12) -> dict[str, Any]:
    answer = server.post(prompt, n_predict, n_probs=40, cache_prompt=False)
    assert answer.status_code == 200, answer.text
    data: dict[str, Any] = answer.json()
    return data


def computed(answer: dict[str, Any]) -> list[Any]:
    """Tokens and the log probabilities of forty candidates for each, to the last digit that is sent."""
    return [answer["tokens"], answer["content"], answer["completion_probabilities"]]


def times_of(server: PhaseServer, number: int = 1) -> list[dict[str, Any]]:
    found = server.markers("times", "prefill")
    assert len(found) == number, server.text[-3000:]
    for marker in found:
        assert marker["us"] == sum(marker["kinds_us"].values())
        assert min(marker["kinds_us"].values()) >= 0
        assert marker["lost"] == 0, "every node came in the order of its graph"
    return found


def assert_close_to_the_servers(marker: dict[str, Any], answer: dict[str, Any]) -> None:
    """The server's own clock starts before the first micro-batch and stops behind the first token."""
    prompt_ms = answer["timings"]["prompt_ms"]
    assert 0.7 * prompt_ms < marker["us"] / 1000 < 1.02 * prompt_ms, (marker, prompt_ms)


@pytest.mark.parametrize("tiled", ["0", "1"])
def test_the_kinds_add_up_and_nothing_else_changes(tiled: str, server: Start) -> None:
    """Stock micro-batches of 512, with the stock and the tiled attention, cache and drafter."""
    off = server(switches={"FN_TILED_QSA": tiled})
    plain = ask(off, PROMPT)
    assert off.markers("times", "prefill") == [] and off.metrics("fn_prefill_") == {}

    on = server(switches={"FN_TILED_QSA": tiled, **ON})
    answer = ask(on, PROMPT)
    assert computed(answer) == computed(plain)
    (marker,) = times_of(on)
    print(marker)
    assert all(marker["kinds_us"][kind] > 0 for kind in COMPUTED), marker
    assert marker["kinds_us"]["upload"] == marker["kinds_us"]["wait"] == 0
    assert marker["micro_batches"] >= 3 and len(PROMPT) - 32 < marker["tokens"] <= len(PROMPT)
    assert_close_to_the_servers(marker, answer)

    series = on.metrics("fn_prefill_")
    for kind, us in marker["kinds_us"].items():
        assert series[f'fn_prefill_seconds_total{{kind="{kind}"}}'] == pytest.approx(us / 1e6, abs=1e-6)
    assert series["fn_prefill_tokens_total"] == marker["tokens"]
    assert series["fn_prefill_prompts_total"] == 1

    # decode is not timed, nor is a prompt of fewer than 32 tokens
    ask(on, PROMPT[:20], 40)
    assert on.metrics("fn_prefill_") == series
    times_of(on)
    ask(on, PROMPT[300:900], 4)
    assert times_of(on, 2)[1]["tokens"] <= 600
    assert on.end() == 0


def test_lean_prefill_waits_at_its_stops(server: Start) -> None:
    lean = ("--lean-prefill", "2048")
    plain = ask(server(*lean), PROMPT)
    waits = []
    for late_ms in (0, 500):  # each upload begins so much later
        late = server(*lean, switches={**ON, "FN_LEAN_LATE_MS": str(late_ms)})
        answer = ask(late, PROMPT)
        assert computed(answer) == computed(plain)
        (marker,) = times_of(late)
        waits.append(marker["kinds_us"]["wait"])
    assert waits[0] > 0 and waits[1] > waits[0] + 300_000, waits
    assert_close_to_the_servers(marker, answer)
    assert all(marker["kinds_us"][kind] > 0 for kind in COMPUTED), marker
    assert late.end() == 0


def test_the_transaction_is_not_part_of_a_prompts_times(server: Start) -> None:
    phase = {"UBATCH": "2048", "MIN_TOKENS": "512"}
    plain = ask(server(phase=phase), PROMPT)
    on = server(phase=phase, switches=ON)
    answer = ask(on, PROMPT)
    assert computed(answer) == computed(plain)
    assert on.begins_and_ends() == (1, 1)
    (marker,) = times_of(on)
    assert marker["us"] / 1000 < answer["timings"]["prompt_ms"] * 1.02


def test_without_any_device(server: Start) -> None:
    number = {"--moe-expert-cache": "0"}
    prompt = PROMPT[:600]
    plain = ask(server(on_cpu=True, numbers=number), prompt)
    on = server(on_cpu=True, numbers=number, switches=ON)
    assert computed(ask(on, prompt)) == computed(plain)
    (marker,) = times_of(on)
    assert all(marker["kinds_us"][k] > 0 for k in COMPUTED if k != "transfer"), marker


def test_two_prompts_without_a_token_between(server: Start) -> None:
    """One token is sampled from the prompt itself: the second prompt ends the first."""
    on = server("--ctx-checkpoints", "0", switches=ON)
    for _ in range(2):
        ask(on, PROMPT[:700], 1)
    assert on.end() == 0
    assert [m["tokens"] for m in times_of(on, 2)] == [700, 700]


def test_a_slow_device_and_a_slow_link_are_told_apart(
    native_build: Any, six_layers: tuple[Path, Path], vgpu: Callable[..., VirtualGpu], tmp_path: Path
) -> None:
    """A virtual GPU does not answer when it gets a graph, so its time could land on whatever comes next."""
    found, stock = [], {**ON, "FN_TILED_QSA": "0"}
    for options in ((), ("--compute-delay-us", "10000"), ("--upload-delay-us", "3000")):
        gpu = vgpu("--memory", "2GiB", *options)
        with PhaseServer(native_build.bin, six_layers, tmp_path, (gpu,), switches=stock) as server:
            ask(server, PROMPT[:600], 2)
            found.append(times_of(server)[0])
        gpu.stop()
    n = found[0]["micro_batches"]
    plain, computing, copying = (marker["kinds_us"] for marker in found)
    # One of six layers has full attention; router and shared expert are computed on the device, too.
    # The state of linear attention may begin with views of nothing, which no device can be asked for.
    pieces = {"linear_attention": 5, "attention": 2, "indexer": 2, "top_k": 1, "residual": 13, "experts": 13}
    for kind, number in pieces.items():
        found_pieces = (computing[kind] - plain[kind]) / (10_000 * n)
        assert found_pieces == pytest.approx(number, rel=0.25), kind
    assert computing["transfer"] < plain["transfer"] + 10_000 * n, "a graph that was not waited for"
    assert copying["transfer"] - plain["transfer"] > 3_000 * 6 * n
    assert copying["residual"] < plain["residual"] + 3_000 * 6 * n, (plain, copying)


@pytest.mark.parametrize("value", ["abc", "2", "", "-1"])
def test_what_is_neither_on_nor_off_ends_the_start(value: str, server: Start) -> None:
    refused = server(switches={"FN_PREFILL_TIMES": value}, ready=False)
    assert refused.ended(timeout_s=60) != 0
    assert f"FN_PREFILL_TIMES={value}: neither 0 nor 1" in refused.text


def test_off_by_value(server: Start) -> None:
    off = server(switches={"FN_PREFILL_TIMES": "0"})
    ask(off, PROMPT[:200], 4)
    assert off.markers("times", "prefill") == [] and off.metrics("fn_prefill_") == {}
