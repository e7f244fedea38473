"""The cache in llama-server: options, metrics, ownership beside a draft model, and every refusal at start."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import NativeBuild
from expert_cache_runs import model
from native_servers import LlamaServer, VirtualGpu

from flashnext.model.synth import SynthRequest, synthesise

pytestmark = pytest.mark.native

Vgpu = Callable[..., VirtualGpu]
Server = Callable[..., LlamaServer]
TOPIC = "the cat sat on the mat and the cat saw the mat. "


def markers(server: LlamaServer, event: str) -> list[dict[str, Any]]:
    found = re.findall(rf"^fn:cache:{event} (\{{.*\}})$", server.text, re.MULTILINE)
    return [json.loads(data) for data in found]


def metrics(server: LlamaServer) -> dict[str, float]:
    """Series with their labels -> value."""
    text = httpx.get(f"{server.url}/metrics", timeout=10).text
    lines = [line for line in text.splitlines() if line.startswith("fn_expert_cache_")]
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def total(values: dict[str, float], name: str) -> float:
    return sum(value for key, value in values.items() if key.startswith(f"fn_expert_cache_{name}{{"))


def test_metrics_per_device_and_a_hit_rate_that_rises(vgpu: Vgpu, llama_server: Server) -> None:
    server = llama_server("--metrics", "--moe-expert-cache", "24", on=(vgpu(), vgpu()))
    (attached,) = markers(server, "attached")
    assert attached["n_devices"] == 2 and attached["capacity"] == 24 * 8
    rates: list[float] = []
    before = metrics(server)
    devices = {key for key in before if key.startswith("fn_expert_cache_capacity_slots{")}
    assert len(devices) == 2
    assert total(before, "capacity_slots") == 24 * 8
    assert total(before, "size_bytes") == attached["size_bytes"] > 0
    for _ in range(4):
        server.complete(TOPIC * 4, n_predict=24)
        after = metrics(server)
        hits, misses = (total(after, n) - total(before, n) for n in ("hits_total", "misses_total"))
        rates.append(hits / (hits + misses))
        before = after
    assert rates[0] > 0 and rates[-1] > rates[0], rates
    assert before["fn_expert_cache_cpu_rows_total"] == total(before, "misses_total")
    assert total(before, "uploads_total") > 0
    assert before['fn_expert_cache_phase{phase="ready"}'] == 1
    assert server.end() == 0
    (stats,) = markers(server, "stats")
    assert stats["hits"] == total(before, "hits_total")


def test_off_by_default_and_the_same_text_with_it(vgpu: Vgpu, llama_server: Server) -> None:
    off = llama_server("--metrics", on=(vgpu(),))
    assert metrics(off) == {} and markers(off, "attached") == []
    text = off.complete(TOPIC, n_predict=32)["content"]
    off.stop()
    zero = llama_server("--metrics", "--moe-expert-cache", "0", on=(vgpu(),))
    assert metrics(zero) == {}
    assert zero.complete(TOPIC, n_predict=32)["content"] == text
    zero.stop()


@pytest.mark.parametrize("kind", ["draft-simple", "draft-mtp"])
def test_the_target_owns_the_cache_beside_a_draft(
    kind: str, native_build: NativeBuild, vgpu: Vgpu, tmp_path: Path
) -> None:
    """The draft, a model of its own or the MTP head, has experts too, on the same device."""
    if kind == "draft-simple":
        target, draft = model("tiny", tmp_path / "target"), model("tiny", tmp_path / "draft", seed=7)
    else:
        request = SynthRequest(kind="tiny", out=tmp_path, mtp="shared")
        made = synthesise(request, lambda _total: None, lambda _bytes: None)
        assert made.head is not None
        target, draft = made.model, made.head
    options = ["--metrics", "--moe-expert-cache", "16", "-md", str(draft), "--spec-type", kind]
    options += ["-ngld", "99", "--spec-draft-n-max", "3"]
    with LlamaServer(native_build.bin, target, tmp_path, *options, on=(vgpu(),)) as server:
        assert len(markers(server, "attached")) == 1
        before = metrics(server)
        answer = server.complete(TOPIC * 2, n_predict=32)
        after = metrics(server)
    assert answer["timings"]["draft_n"] > 0
    assert total(before, "capacity_slots") == total(after, "capacity_slots") == 16 * 8
    hits, misses = (total(after, n) - total(before, n) for n in ("hits_total", "misses_total"))
    steps = after["fn_expert_cache_steps_total"] - before["fn_expert_cache_steps_total"]
    assert hits > 0
    # A step is a decode call of the target: a row or more of four experts in each of eight layers. The draft
    # makes more calls than the target, and none of its lanes are in the sums.
    assert 0 < steps <= answer["timings"]["predicted_n"] + 4
    assert steps * 8 * 4 <= hits + misses <= steps * 32 * 8 * 4


def refused(server: LlamaServer) -> dict[str, Any]:
    assert server.ended(timeout_s=60) != 0
    (marker,) = markers(server, "refused")
    return marker


def test_more_slots_than_experts(vgpu: Vgpu, llama_server: Server) -> None:
    marker = refused(llama_server("--moe-expert-cache", "33", on=(vgpu(),), ready_s=None))
    assert "33" in marker["reason"] and "32 experts" in marker["reason"]


@pytest.mark.parametrize("inserts", ["0", "65", "-1"])
def test_inserts_out_of_range(inserts: str, vgpu: Vgpu, llama_server: Server) -> None:
    options = ["--moe-expert-cache", "16", "--moe-expert-cache-inserts", inserts]
    marker = refused(llama_server(*options, on=(vgpu(),), ready_s=None))
    assert "inserts" in marker["reason"]


def test_experts_that_are_not_in_host_memory(vgpu: Vgpu, llama_server: Server) -> None:
    server = llama_server("--moe-expert-cache", "16", on=(vgpu(),), experts_on_devices=True, ready_s=None)
    assert "plain host memory" in refused(server)["reason"]


def test_layers_on_the_cpu(llama_server: Server) -> None:
    marker = refused(llama_server("--moe-expert-cache", "16", ready_s=None))
    assert "-ngl" in marker["reason"]


def test_slots_that_do_not_fit(
    native_build: NativeBuild, vgpu: Vgpu, llama_server: Server, tmp_path: Path
) -> None:
    """Refused with what is needed, what is free and the largest number that fits; that number then starts,
    the next one does not."""
    gguf = model("demo", tmp_path)

    def start(slots: int, ready_s: float | None) -> LlamaServer:
        gpus = (vgpu("--memory", "56MiB"), vgpu("--memory", "56MiB"))
        return LlamaServer(
            native_build.bin, gguf, tmp_path, "--moe-expert-cache", str(slots), on=gpus, ready_s=ready_s
        )

    with start(512, None) as server:
        marker = refused(server)
    largest = marker["largest_n"]
    assert 0 < largest < 512
    assert len(marker["devices"]) == 2
    for device in marker["devices"]:
        assert (device["needed_bytes"] > device["free_bytes"]) == (device["largest_n"] < 512)
    with start(largest, 60.0) as server:
        assert markers(server, "attached")[0]["capacity"] == largest * 8
        server.complete(TOPIC, n_predict=4)
    with start(largest + 1, None) as server:
        assert refused(server)["largest_n"] == largest
