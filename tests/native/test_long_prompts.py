"""What long prompts need of the server: memory that was reserved for the whole context, and signs of life."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import httpx
import pytest
from native_servers import LlamaServer, VirtualGpu

pytestmark = [pytest.mark.native, pytest.mark.timeout(120)]

CONTEXT = 4096
Start = Callable[..., LlamaServer]


def words(count: int) -> list[int]:
    return [random.Random(count).randrange(256) for _ in range(count)]


@pytest.mark.parametrize("tiles", ["1", "0"])
def test_a_cold_prompt_of_the_whole_context_needs_no_more_memory(
    tiles: str, vgpu: Callable[..., VirtualGpu], llama_server: Start
) -> None:
    """A conversation that grew to the context can be read again from nothing: nothing is allocated for it."""
    gpu = vgpu("--memory", "1GiB")
    server = llama_server(
        "-c", str(CONTEXT), "-ub", "256", "-fa", "on", on=(gpu,), env={"FN_TILED_QSA": tiles}
    )
    server.complete("a", n_predict=1)
    held = gpu.books()["allocated_bytes"]
    gpu.control(f"memory {held}")  # not a byte is left
    body = {"prompt": words(CONTEXT - 1), "n_predict": 1, "cache_prompt": False}
    answer = httpx.post(f"{server.url}/completion", json=body, timeout=90)
    assert answer.status_code == 200, answer.text
    assert answer.json()["timings"]["prompt_n"] == CONTEXT - 1
    books = gpu.books()
    assert (books["allocated_bytes"], books["refusals"]) == (held, 0)


def test_a_stream_shows_signs_of_life_while_the_prompt_is_read(
    vgpu: Callable[..., VirtualGpu], llama_server: Start
) -> None:
    """Clients give up after a silence; by default a comment comes every 30 s. Here every second is asked for:
    the server looks once a second whether more than that has passed."""
    gpu = vgpu("--compute-delay-us", "150000")
    server = llama_server("-ub", "64", on=(gpu,), experts_on_devices=True)
    body = {"prompt": words(1900), "n_predict": 2, "stream": True, "sse_ping_interval": 1}
    start = time.monotonic()
    pings = []
    with httpx.stream("POST", f"{server.url}/completion", json=body, timeout=90) as answer:
        for line in answer.iter_lines():
            if line.startswith("data:"):
                break
            if line == ":":
                pings.append(time.monotonic() - start)
    waited = time.monotonic() - start
    assert waited > 3, "the prompt was too quick to tell"
    silences = [b - a for a, b in zip([0.0, *pings], [*pings, waited], strict=True)]
    assert max(silences) < 3.5
