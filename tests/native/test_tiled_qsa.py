"""The tiled sparse attention against the stock graph of the same binary, token by token and byte by byte."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from native_servers import VirtualGpu

from flashnext.model import synth_shape
from flashnext.model.synth import SynthRequest, synthesise

pytestmark = pytest.mark.native

QSA_LAYERS = 2  # of the tiny model
# Past the selected width (19 cells), with odd last micro-batches, a verify batch and single tokens.
STEPS = "0:300;0:1;0:8;0:9;0:131;0:2;0:65"


class Arm(dict[str, Any]):
    """The driver's line of one arm; `logits` is [tokens, vocabulary]."""

    logits: np.ndarray[Any, np.dtype[np.float32]]


def run(
    native_build: Any, model: Path, folder: Path, steps: str, arms: Sequence[int], *options: str
) -> list[Arm]:
    """Tile sizes (0 = stock) over one schedule of steps."""
    files = [folder / f"logits-{i}.bin" for i in range(len(arms))]
    argv = [native_build.bin / "fn-tiled-qsa-run", "-m", model, "--steps", steps, "--threads", "1", *options]
    for arm, file in zip(arms, files, strict=True):
        argv += ["--arm", f"{arm},logits={file}"]
    done = subprocess.run(
        [str(a) for a in argv], capture_output=True, text=True, timeout=80, env=clean_environment()
    )
    assert done.returncode == 0, f"{argv}\n{done.stdout}\n{done.stderr}"
    results = [Arm(json.loads(line)) for line in done.stdout.splitlines()]
    assert len(results) == len(arms)
    for result, file in zip(results, files, strict=True):
        result.logits = np.fromfile(file, np.float32).reshape(result["tokens"], -1)
        file.unlink()
        assert result["nan"] == 0
    return results


def clean_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("FN_TILED_QSA")}


def assert_same_bytes(results: Sequence[Arm]) -> None:
    stock = results[0]
    assert stock["tiled_layers"] == 0 and stock["reserved_tiled_layers"] == 0
    assert np.ptp(stock.logits) > 0.1
    for result in results[1:]:
        assert result["tiled_layers"] > 0, result["arm"]
        worst = np.abs(result.logits - stock.logits).max()
        assert result.logits.tobytes() == stock.logits.tobytes(), f"{result['arm']}: apart by {worst}"


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with the real top_k: sparse from 2,052 tokens on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(synth_shape.SHAPES, "tiny", replace(synth_shape.TINY, top_k=2048, layers=4))
        request = SynthRequest(kind="tiny", out=tmp_path_factory.mktemp("wide"))
        return synthesise(request, lambda _total: None, lambda _bytes: None).model


def test_every_tile_size_gives_the_bytes_of_the_stock_graph(
    native_build: Any, tiny_model: Path, tmp_path: Path
) -> None:
    arms = [0, 4, 9, 50, 64, 128, 512]
    results = run(native_build, tiny_model, tmp_path, STEPS, arms, "--ubatch", "512")
    assert_same_bytes(results)
    # one micro-batch per call, and of these four have nine tokens or more: 300, 9, 131 and 65
    assert results[4]["tiled_layers"] == 4 * QSA_LAYERS
    assert results[4]["tiles"] == (5 + 1 + 3 + 2) * QSA_LAYERS


def test_past_the_real_selection(native_build: Any, wide_model: Path, tmp_path: Path) -> None:
    options = ("--ubatch", "512", "--batch", "2240")
    for flash in ((), ("--flash",)):
        results = run(native_build, wide_model, tmp_path, "0:2240;0:3;0:77", [0, 128], *options, *flash)
        assert_same_bytes(results)


def test_flash_attention(native_build: Any, tiny_model: Path, tmp_path: Path) -> None:
    # the CPU kernel changes at 64 rows: every tile of these keeps to the kernel of the whole micro-batch
    steps = "0:300;0:1;0:131;0:65"
    stock, *exact, short = run(native_build, tiny_model, tmp_path, steps, [0, 100, 128, 512, 16], "--flash")
    assert_same_bytes([stock, *exact])
    # shorter tiles take the other kernel, as a smaller micro-batch does: no further away than that
    (small,) = run(
        native_build, tiny_model, tmp_path, steps, [0], "--flash", "--ubatch", "16", "--batch", "512"
    )
    bound = np.abs(small.logits - stock.logits)
    apart = np.abs(short.logits - stock.logits)
    assert 0 < bound.max() < 0.1 * np.ptp(stock.logits)
    assert apart.max() <= bound.max() and apart.mean() <= bound.mean()


def test_decode_and_verify_batches_keep_the_stock_graph(
    native_build: Any, tiny_model: Path, tmp_path: Path
) -> None:
    steps = "0:1;0:2;0:3;0:4;0:5;0:6;0:7;0:8"
    stock, tiled = run(native_build, tiny_model, tmp_path, steps, [0, 128])
    assert tiled["tiled_layers"] == 0
    assert tiled.logits.tobytes() == stock.logits.tobytes()


@pytest.mark.parametrize("flash", [(), ("--flash",)], ids=["plain", "flash"])
def test_several_sequences_in_one_cache(
    native_build: Any, tiny_model: Path, tmp_path: Path, flash: tuple[str, ...]
) -> None:
    # own prompts, mixed batches, cells that two sequences share, and a sequence that goes on alone
    steps = "0:150;1:90;0,1:70;cp:0>2;1,2:66;0:1;0,1,2:3;0,1,2:4;0,1,2:100;2:81"
    results = run(native_build, tiny_model, tmp_path, steps, [0, 128], "--seqs", "3", *flash)
    assert_same_bytes(results)


def test_several_streams_fall_back(native_build: Any, tiny_model: Path, tmp_path: Path) -> None:
    options = ("--seqs", "2", "--streams")
    stock, tiled = run(native_build, tiny_model, tmp_path, "0,1:60;0:70;0,1:20", [0, 64], *options)
    assert tiled["reserved_tiled_layers"] == 0
    assert tiled["tiled_layers"] == QSA_LAYERS  # the batch of one sequence alone
    assert tiled.logits.tobytes() == stock.logits.tobytes()


@pytest.mark.parametrize(
    "options", [("--kv", "q8_0"), ("--kv", "q4_0", "--flash"), ("--kv", "q8_0", "--flash")]
)
def test_quantised_cache(
    native_build: Any, tiny_model: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    results = run(native_build, tiny_model, tmp_path, "0:300;0:1;0:131", [0, 128], *options)
    assert_same_bytes(results)


def test_images(native_build: Any, tiny_model: Path, tmp_path: Path) -> None:
    # the positions of an image repeat; text goes on behind it and in front of the next one
    steps = "0:70;img:0:9x7;0:90;0:1;img:0:5x4;0:129"
    results = run(native_build, tiny_model, tmp_path, steps, [0, 64, 128])
    assert_same_bytes(results)
    # beside a second sequence, whose cells are counted by position
    steps = "0:70;1:64;img:0:9x7;0,1:50;img:1:5x4;0,1:65"
    results = run(native_build, tiny_model, tmp_path, steps, [0, 64], "--seqs", "2")
    assert_same_bytes(results)


def test_attention_without_a_causal_rule(native_build: Any, tiny_model: Path, tmp_path: Path) -> None:
    results = run(native_build, tiny_model, tmp_path, "0:300;0:131", [0, 64], "--noncausal")
    assert_same_bytes(results)


def test_two_devices_and_no_growth(
    native_build: Any, tiny_model: Path, tmp_path: Path, vgpu: Callable[..., VirtualGpu]
) -> None:
    gpus = [vgpu("--threads", "1") for _ in range(2)]
    sizes = [256, 255, 129, 130, 9, 10, 17, 8, 1, 127, 128, 33, 200, 64, 65, 251, 256, 12, 100, 131]
    steps = ";".join(f"0:{n}" for n in sizes)
    endpoints = ",".join(gpu.endpoint for gpu in gpus)
    options = ("--ubatch", "256", "--ctx", "4096", "--flash", "--rpc", endpoints)
    stock, tiled = run(native_build, tiny_model, tmp_path, steps, [0, 128], *options)
    assert sum(name.startswith("RPC") for name in tiled["compute_mib"]) == 2
    assert tiled["grown"] == 0
    assert tiled["tiled_layers"] == QSA_LAYERS * sum(n >= 9 for n in sizes)
    assert_same_bytes([stock, tiled])


def reserve(native_build: Any, model: Path, arms: Sequence[int], *options: str) -> list[dict[str, Any]]:
    argv = [native_build.bin / "fn-tiled-qsa-run", "-m", model, "--reserve", "--flash", *options]
    for arm in arms:
        argv += ["--arm", str(arm)]
    done = subprocess.run(
        [str(a) for a in argv], capture_output=True, text=True, timeout=60, env=clean_environment()
    )
    assert done.returncode == 0, f"{argv}\n{done.stdout}\n{done.stderr}"
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_reserve_has_no_term_of_cells_times_tokens(
    native_build: Any, tiny_model: Path, vgpu: Callable[..., VirtualGpu]
) -> None:
    gpu = vgpu("--threads", "1")

    def mib(n_ctx: int, n_ubatch: int) -> tuple[float, float]:
        options = ("--ctx", str(n_ctx), "--ubatch", str(n_ubatch), "--rpc", gpu.endpoint)
        stock, tiled = reserve(native_build, tiny_model, [0, 128], *options)
        assert stock["reserved_tiles"] == 0 and tiled["reserved_tiles"] > 0
        return sum(stock["compute_mib"].values()), sum(tiled["compute_mib"].values())

    stock_short, tiled_short = mib(65536, 512)
    stock_long, tiled_long = mib(262144, 512)
    _, tiled_wide = mib(262144, 2048)
    cells, tokens = 262144 - 65536, 512
    # more than a byte and a half per pair of cell and token in the stock graph; here, pairs of cell and tile
    assert (stock_long - stock_short) * 2**20 > 1.5 * cells * tokens
    per_tile = (tiled_long - tiled_short) * 2**20 / (cells * 128)
    assert per_tile < 16
    # a four times larger micro-batch adds what its tokens need, not what its tokens times the cells need
    assert (tiled_wide - tiled_long) * 2**20 < 0.1 * 262144 * (2048 - 512)


def test_no_shorter_micro_batch_needs_more_than_the_reserve(native_build: Any, tiny_model: Path) -> None:
    # the allocator's best fit promises nothing about a smaller graph: counted over the sizes, see the README
    (tiled,) = reserve(native_build, tiny_model, [128], "--ctx", "65536", "--ubatch", "512", "--sweep", "13")
    assert tiled["swept"] > 60
    assert tiled["larger"] == 0
    assert tiled["max_nodes"] > 1300


@pytest.mark.parametrize(
    ("name", "value"), [("FN_TILED_QSA", "off"), ("FN_TILED_QSA_TILE", "0"), ("FN_TILED_QSA_TILE", "64k")]
)
def test_a_wrong_setting_is_refused(
    native_build: Any, tiny_model: Path, tmp_path: Path, name: str, value: str
) -> None:
    argv = [native_build.bin / "llama-bench", "-m", tiny_model, "-p", "16", "-n", "0", "-t", "1", "-v"]
    done = subprocess.run(
        [str(a) for a in argv],
        capture_output=True,
        text=True,
        timeout=60,
        env={**clean_environment(), name: value},
    )
    assert done.returncode != 0
    assert name in done.stderr + done.stdout
