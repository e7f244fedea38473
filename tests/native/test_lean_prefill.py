"""Lean prefill against the stock graph of the same binary: logits, uploads, and what is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from expert_cache_runs import PLAIN_KERNELS, model, virtual_gpus
from gguf import GGUFReader
from native_servers import LlamaServer, VirtualGpu

pytestmark = pytest.mark.native

LAYERS, EXPERTS, USED = 8, 32, 4  # of the tiny model
# Odd last micro-batches, micro-batches too short for it, decode and verify batches in between.
STEPS = "300;1x8;131;4x3;40;1;20;65;1x2"


class Arm(dict[str, Any]):
    """The driver's line of one arm; `logits` is [tokens, vocabulary]."""

    logits: np.ndarray[Any, np.dtype[np.float32]]


def drive(
    bin_dir: Path, gguf: Path, endpoints: str, steps: str, arms: Sequence[str], *options: str
) -> subprocess.CompletedProcess[str]:
    argv = [bin_dir / "fn-lean-run", "-m", gguf, "--steps", steps, *options]
    argv += ["--rpc", endpoints] if endpoints else []
    for arm in arms:
        argv += ["--arm", arm]
    env = {key: value for key, value in os.environ.items() if not key.startswith("FN_LEAN")}
    return subprocess.run(
        [str(a) for a in argv], capture_output=True, text=True, timeout=250, env={**env, **PLAIN_KERNELS}
    )


def run(
    bin_dir: Path, gguf: Path, endpoints: str, folder: Path, steps: str, arms: Sequence[str], *options: str
) -> list[Arm]:
    files = [folder / f"logits-{i}.bin" for i in range(len(arms))]
    full = [f"{arm},logits={file}" for arm, file in zip(arms, files, strict=True)]
    done = drive(bin_dir, gguf, endpoints, steps, full, "--all-logits", *options)
    assert done.returncode == 0, f"{done.args}\n{done.stdout}\n{done.stderr}"
    results = [Arm(json.loads(line)) for line in done.stdout.splitlines()]
    assert len(results) == len(arms)
    for result, file in zip(results, files, strict=True):
        tokens = sum(step["tokens"] for step in result["steps"])
        result.logits = np.fromfile(file, np.float32).reshape(tokens, -1)
        file.unlink()
        assert result["nan"] == 0
    return results


def markers(text: str, event: str) -> list[dict[str, Any]]:
    return [json.loads(data) for data in re.findall(rf"^fn:lean:{event} (\{{.*\}})$", text, re.MULTILINE)]


def assert_same_bytes(stock: Arm, *others: Arm) -> None:
    assert "lean" not in stock
    assert np.ptp(stock.logits) > 0.1
    for other in others:
        assert other["lean"]["passes"] > 0
        worst = np.abs(other.logits - stock.logits).max()
        assert other.logits.tobytes() == stock.logits.tobytes(), f"{other['arm']}: apart by {worst}"


@pytest.fixture(scope="module")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model("demo", tmp_path_factory.mktemp("lean-demo"))


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("chunk", [32, 100, 512])
def test_logits_are_those_of_the_stock_graph(
    chunk: int, devices: int, native_build: Any, tiny_model: Path, tmp_path: Path
) -> None:
    """Also with uploads that come late into staging memory that holds NaN before them. Staged experts are
    compared with host memory when they are handed over and again when the device has read them."""
    flash = (
        ("--flash",) if (chunk // 32 + devices) % 2 else ()
    )  # every chunk and every count with and without
    late_ms = {32: 6, 100: 12, 512: 25}[chunk]  # longer than a layer computes, where that is affordable
    arms = [
        f"ub={chunk}",
        f"lean={chunk}",
        f"lean={chunk},FN_LEAN_LATE_MS={late_ms},FN_LEAN_VERIFY=1",
        f"lean={chunk},FN_LEAN_RING=3,FN_LEAN_VERIFY=1",
    ]
    with virtual_gpus(native_build.bin, tmp_path, devices) as endpoints:
        stock, *lean = run(native_build.bin, tiny_model, endpoints, tmp_path, STEPS, arms, *flash)
    assert_same_bytes(stock, *lean)
    micro_batches = [n for total in (300, 131, 40, 65) for n in split(total, chunk) if n >= 32]
    for arm in lean:
        counts = arm["lean"]
        assert counts["passes"] == len(micro_batches)
        assert counts["tokens"] == sum(micro_batches)
        assert counts["reserves"] == 0
        assert [d["layers_run"] for d in counts["devices"]] == [
            d["layers"] * len(micro_batches) for d in counts["devices"]
        ]
        assert sum(d["layers"] for d in counts["devices"]) == LAYERS
        assert len(counts["devices"]) == devices
    # 32 experts are all compared, twice, but for the last layer read
    assert lean[1]["lean"]["verified"] >= (2 * LAYERS * len(micro_batches) - devices) * EXPERTS * 0.9


def split(total: int, chunk: int) -> list[int]:
    return [min(chunk, total - at) for at in range(0, total, chunk)]


def test_many_experts(native_build: Any, demo_model: Path, tmp_path: Path) -> None:
    """512 experts, 10 per token: micro-batches that use nearly all of them, and some that do not, for which
    the routed ones alone are uploaded."""
    arms = ["ub=256", "lean=256,FN_LEAN_LATE_MS=1", "lean=256,FN_LEAN_VERIFY=1"]
    steps = "600;1x3;40;150"
    with virtual_gpus(native_build.bin, tmp_path, 2) as endpoints:
        stock, *lean = run(native_build.bin, demo_model, endpoints, tmp_path, steps, arms, "--flash")
    assert_same_bytes(stock, *lean)
    layers = sum(d["layers"] for d in lean[1]["lean"]["devices"])
    # 600 = 256 + 256 + 88, then 40 and 150: those of 256 and 150 are whole, those of 88 and 40 routed
    assert lean[1]["lean"]["passes"] == 5
    handed_over = lean[1]["lean"]["verified"] / 2
    assert 3 * layers * 512 < handed_over + layers * 512 and handed_over < 5 * layers * 512


def test_cached_experts_are_copied_on_the_device(native_build: Any, tiny_model: Path, tmp_path: Path) -> None:
    """Decode fills the slots between prompts: its hits, misses and logits stay what they are without lean
    prefill, and what the slots hold is not uploaded."""
    cache = "slots=8,FN_EXPERT_CACHE_MERGE=1"
    arms = [
        f"{cache},ub=64",
        f"{cache},lean=64,FN_LEAN_VERIFY=1",
        f"{cache},lean=64,FN_LEAN_VERIFY=1,FN_LEAN_LATE_MS=2,FN_EXPERT_CACHE_TEST_LATE=2",
    ]
    steps = "300;1x30;131;4x10;40;1x8;20;65;1x4"
    with virtual_gpus(native_build.bin, tmp_path, 2) as endpoints:
        stock, *lean = run(native_build.bin, tiny_model, endpoints, tmp_path, steps, arms)
    assert_same_bytes(stock, *lean)
    for arm in lean:
        assert all(d["copied"] > 0 for d in arm["lean"]["devices"])
        assert [arm[key] for key in ("hits", "misses", "uploads")] == [
            stock[key] for key in ("hits", "misses", "uploads")
        ]


def test_lent_slots_are_given_back(native_build: Any, tiny_model: Path, tmp_path: Path) -> None:
    """Staging memory from the slots of the last layers: after a prompt they hold what they held, and what
    was empty is zero again, also where NaN lay in between. Decode cannot tell."""
    cache = "slots=16,FN_EXPERT_CACHE_MERGE=1"
    arms = [
        f"{cache},ub=64",
        f"{cache},lean=64,FN_LEAN_LEND=1,FN_LEAN_VERIFY=1",
        f"{cache},lean=64,FN_LEAN_LEND=1,FN_LEAN_LATE_MS=2,FN_LEAN_VERIFY=1",
    ]
    steps = "100;1x4;300;1x30;131;4x10;40;1x8;20;65;1x4"
    with virtual_gpus(native_build.bin, tmp_path, 1) as endpoints:
        stock, *lean = run(native_build.bin, tiny_model, endpoints, tmp_path, steps, arms)
    assert_same_bytes(stock, *lean)
    for arm in lean:
        assert arm["lean"]["devices"][0]["size_bytes"] == 0
        assert arm["lean"]["refills"] >= 5  # after 100, 300, 131, 40 and 65 tokens at the least
        assert [arm[key] for key in ("hits", "misses", "uploads")] == [
            stock[key] for key in ("hits", "misses", "uploads")
        ]


def test_the_cache_keeps_slots_that_are_lent(native_build: Any, tiny_model: Path, tmp_path: Path) -> None:
    """A release through the cache's interface is refused while its slots are the staging memory, and decode
    and prompts go on; with staging memory of its own they are released and come back."""
    cache = "slots=16,FN_EXPERT_CACHE_MERGE=1"
    arms = [
        f"{cache},ub=64",
        f"{cache},lean=64,FN_LEAN_LEND=1,FN_LEAN_VERIFY=1",
        f"{cache},lean=64,FN_LEAN_LEND=0,FN_LEAN_VERIFY=1",
    ]
    steps = "1x4;100;release;1x8;release;100;1x4"  # with slots lent, and with slots given back
    with virtual_gpus(native_build.bin, tmp_path, 1) as endpoints:
        stock, lent, own = run(native_build.bin, tiny_model, endpoints, tmp_path, steps, arms)
    assert_same_bytes(stock, lent, own)
    assert (stock["releases"], lent["releases"], own["releases"]) == ([0, 0], [8, 8], [0, 0])
    assert lent["lean"]["refills"] == 2 and own["lean"]["devices"][0]["copied"] > 0


def test_slots_are_lent_when_nothing_else_fits(native_build: Any, demo_model: Path, tmp_path: Path) -> None:
    """The ring does not fit beside the slots: it is lent, and the marker says why."""

    def attached(memory: str) -> tuple[dict[str, Any], str]:
        with virtual_gpus(native_build.bin, tmp_path, 1, "--memory", memory) as endpoints:
            options = ("--ctx", "1024", "--batch", "512")
            arms = ["lean=512,slots=400"]
            done = drive(native_build.bin, demo_model, endpoints, "64;1x2", arms, *options)
        assert done.returncode == 0, done.stdout + done.stderr
        (marker,) = markers(done.stderr, "attached")
        return marker, done.stdout

    wide, _ = attached("1GiB")
    assert not wide["lent"] and wide["devices"][0]["lent_bytes"] == 0
    tight, out = attached("100MiB")
    assert tight["lent"] and tight["devices"][0]["ring_bytes"] == 0
    assert tight["devices"][0]["lent_bytes"] == wide["devices"][0]["ring_bytes"]
    assert [(t["lent"], t["fits"]) for t in tight["tried"]] == [(False, False), (True, False), (True, True)]
    assert "kept for matrix products" in tight["tried"][0]["why"]
    assert json.loads(out)["lean"]["refills"] > 0


def test_each_device_uploads_its_own_layers(
    native_build: Any, tiny_model: Path, tmp_path: Path, vgpu: Callable[..., VirtualGpu]
) -> None:
    """By the books of the virtual GPUs. With a place for every layer each is uploaded once, with two places
    once per micro-batch; the graphs are the same, so the rest of the traffic is."""
    gpus = [vgpu("--threads", "1") for _ in range(3)]
    endpoints = ",".join(gpu.endpoint for gpu in gpus)

    def traffic(arm: str) -> tuple[Arm, list[int]]:
        before = [gpu.books()["upload_bytes"] for gpu in gpus]
        (result,) = run(native_build.bin, tiny_model, endpoints, tmp_path, "512x4", [arm])
        after = [gpu.books()["upload_bytes"] for gpu in gpus]
        return result, [b - a for a, b in zip(before, after, strict=True)]

    once, traffic_once = traffic("lean=64,FN_LEAN_RING=8")
    each, traffic_each = traffic("lean=64")
    micro_batches = 4 * 512 // 64
    layers = [d["layers"] for d in each["lean"]["devices"]]
    assert sorted(layers) == [2, 3, 3]
    for i, n_layers in enumerate(layers):
        own = once["lean"]["devices"][i]["uploaded"]
        uploaded = each["lean"]["devices"][i]["uploaded"]
        assert uploaded - own == traffic_each[i] - traffic_once[i]
        if n_layers == 2:  # as many as places: they stay
            assert uploaded == own
        else:  # the first layer is fetched once more, for a micro-batch that does not come
            assert own * micro_batches < uploaded < own * (micro_batches + 1)
    assert sum(d["uploaded"] for d in once["lean"]["devices"]) == expert_bytes(tiny_model)


def expert_bytes(gguf: Path) -> int:
    tensors = GGUFReader(gguf).tensors
    return sum(int(t.n_bytes) for t in tensors if re.search(r"ffn_(gate|up|down)_exps", t.name))


def test_short_prompts_take_the_plain_path(native_build: Any, tiny_model: Path, tmp_path: Path) -> None:
    arms = ["ub=512", "lean=512", "lean=512,FN_LEAN_MIN_TOKENS=200"]
    with virtual_gpus(native_build.bin, tmp_path, 1) as endpoints:
        stock, lean, later = run(
            native_build.bin, tiny_model, endpoints, tmp_path, "31;1x3;20;100", arms, "--flash"
        )
    assert lean["lean"]["passes"] == 1 and lean["lean"]["plain"] == 5
    assert later["lean"]["passes"] == 0 and later["lean"]["plain"] == 6
    assert later["lean"]["devices"][0]["uploaded"] == 0
    assert stock.logits.tobytes() == lean.logits.tobytes() == later.logits.tobytes()


def test_auto_takes_the_largest_chunk_that_fits_and_says_why(
    native_build: Any, tiny_model: Path, tmp_path: Path
) -> None:
    def attached(memory: str, batch: int) -> dict[str, Any]:
        with virtual_gpus(native_build.bin, tmp_path, 1, "--memory", memory) as endpoints:
            options = ("--ctx", "32768", "--batch", str(batch), "--flash")
            done = drive(native_build.bin, tiny_model, endpoints, "64", ["lean=auto"], *options)
        assert done.returncode == 0, done.stdout + done.stderr
        (marker,) = markers(done.stderr, "attached")
        return marker

    assert attached("8GiB", 8192)["chunk"] == 8192
    assert attached("8GiB", 3000)["chunk"] == 2048
    assert attached("8GiB", 300)["chunk"] == 300
    small = attached("420MiB", 16384)
    assert 512 <= small["chunk"] < 16384
    assert [t["fits"] for t in small["tried"]] == [False] * (len(small["tried"]) - 1) + [True]
    assert all(t["why"] for t in small["tried"][:-1])


@pytest.mark.parametrize(
    ("arm", "options", "why"),
    [
        ("lean=4096", (), "at most the batch"),
        ("lean=-2", (), "takes auto or a number"),
        ("lean=512,LLAMA_PHASE_PREFILL_UBATCH=2048", (), "are alternatives"),
        ("lean=512,FN_LEAN_RING=1", (), "FN_LEAN_RING=1"),
        ("lean=512,FN_LEAN_LATE_MS=x", (), "FN_LEAN_LATE_MS=x"),
        ("lean=512", ("--experts", "device"), "plain host memory"),
    ],
)
def test_refusals(
    arm: str, options: tuple[str, ...], why: str, native_build: Any, tiny_model: Path, tmp_path: Path
) -> None:
    with virtual_gpus(native_build.bin, tmp_path, 1) as endpoints:
        done = drive(native_build.bin, tiny_model, endpoints, "64", [arm], *options)
    assert done.returncode == 3, done.stdout + done.stderr
    (marker,) = markers(done.stderr, "refused")
    assert why in marker["reason"]


def test_staging_memory_that_does_not_fit_is_refused(
    native_build: Any, demo_model: Path, tmp_path: Path
) -> None:
    arms = ["lean=512,FN_LEAN_RING=8"]
    with virtual_gpus(native_build.bin, tmp_path, 1, "--memory", "80MiB") as endpoints:
        done = drive(native_build.bin, demo_model, endpoints, "64", arms, "--ctx", "1024", "--batch", "512")
    assert done.returncode == 3, done.stdout + done.stderr
    (marker,) = markers(done.stderr, "refused")
    assert "staging memory for 8 layers" in marker["reason"]
    (device,) = marker["devices"]
    assert device["ring_bytes"] > device["free_bytes"]


def test_the_timeline_has_every_layer(native_build: Any, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    arm = f"lean=64,FN_LEAN_REPORT=1,FN_LEAN_TIMELINE={path}"
    with virtual_gpus(native_build.bin, tmp_path, 2) as endpoints:
        done = drive(native_build.bin, tiny_model, endpoints, "256;1x2", [arm], "--all-logits")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    stops = [line for line in lines if line["what"] == "stop"]
    assert [(s["pass"], s["layer"]) for s in stops] == [(p, il) for p in range(1, 5) for il in range(LAYERS)]
    for line in lines:
        if line["what"] == "upload":
            assert line["t_submit_us"] <= line["t_begin_us"] <= line["t_end_us"]
        else:
            assert line["t_reached_us"] <= line["t_released_us"]
    (prompt,) = markers(done.stderr, "prompt")
    assert (prompt["passes"], prompt["tokens"]) == (4, 256)
    uploads = [line for line in lines if line["what"] == "upload"]
    assert prompt["uploaded_bytes"] <= sum(u["bytes_uploaded"] for u in uploads)


def test_the_server_resumes_where_it_would_without_it(
    vgpu: Callable[..., VirtualGpu], llama_server: Callable[..., LlamaServer]
) -> None:
    """A chunk of 2,048 or 512: the same checkpoints, so a follow-up computes the same tokens again."""
    text = "".join(f" {chr(97 + i % 26)}{i % 7}" for i in range(900))
    talks = [text, text + " and more of it", text[:-40] + " another end", text + " and yet more" * 9]

    def talk(*options: str) -> tuple[list[tuple[int, int]], list[str], str]:
        gpus = (vgpu("--threads", "1"), vgpu("--threads", "1"))
        with llama_server(*options, "-b", "2048", "-c", "4096", "--metrics", on=gpus) as server:
            answers = [server.complete(t, cache_prompt=True, n_predict=4) for t in talks]
            metrics = httpx.get(f"{server.url}/metrics", timeout=10).text
            server.end()
        counts = [(a["timings"]["cache_n"], a["timings"]["prompt_n"]) for a in answers]
        return counts, [a["content"] for a in answers], metrics

    counts, texts, metrics = talk("-ub", "512")
    assert counts[0][0] == 0 and counts[0][1] > 1500
    assert any(cached > 0 for cached, _ in counts[1:])
    assert "fn_lean_" not in metrics
    # the stock server at such a micro-batch goes back further, so the comparison can fail
    assert [prompt for _, prompt in talk("-ub", "2048")[0]] != [prompt for _, prompt in counts]
    lean_counts, lean_texts, lean_metrics = talk("-ub", "512", "--lean-prefill", "2048")
    assert lean_counts == counts
    assert len(lean_texts) == len(texts)
    assert "fn_lean_chunk_tokens 2048" in lean_metrics
    passes = int(re.findall(r"^fn_lean_passes_total (\d+)$", lean_metrics, re.MULTILINE)[0])
    assert passes > 0
