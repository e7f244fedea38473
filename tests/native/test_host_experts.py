"""Placement of experts in host memory, and the load that reads into it.

Locking needs a device's driver: the real lock is tried by tests/gpu, its order and its failures by the C++
unit test.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import NativeBuild
from native_servers import LlamaServer, VirtualGpu

from flashnext.model.synth import SynthRequest, synthesise

pytestmark = pytest.mark.native

Vgpu = Callable[..., VirtualGpu]
Server = Callable[..., LlamaServer]


def loads(server: LlamaServer) -> list[dict[str, Any]]:
    found = re.findall(r"^fn:host:loaded (\{.*\})$", server.text, re.MULTILINE)
    return [json.loads(data) for data in found]


def test_a_pattern_that_is_no_regular_expression(llama_server: Server) -> None:
    server = llama_server("-ot", "ffn_(gate|up_exps=CPU", ready_s=None)
    assert server.ended(timeout_s=30) != 0
    assert "tensor override 'ffn_(gate|up_exps' is not a regular expression" in server.text


def test_a_pattern_that_matches_nothing_names_the_nearest(llama_server: Server) -> None:
    server = llama_server("-ot", "ffn_gate_expz=CPU", ready_s=None)
    assert server.ended(timeout_s=30) != 0
    (line,) = re.findall(r"tensor override 'ffn_gate_expz' matches no tensor.*", server.text)
    assert "ffn_gate_exps.weight" in line


def test_one_pattern_that_matches_does_not_excuse_another(llama_server: Server) -> None:
    server = llama_server("-ot", "exps=CPU,shexq=CPU", ready_s=None)
    assert server.ended(timeout_s=30) != 0
    assert "tensor override 'shexq' matches no tensor" in server.text


def test_patterns_made_by_other_options_may_match_nothing(llama_server: Server) -> None:
    """--n-cpu-moe counts layers that a model need not have."""
    llama_server("--n-cpu-moe", "20")


def test_a_type_that_no_device_has(llama_server: Server) -> None:
    server = llama_server("-ot", "exps=NoSuch_Host", ready_s=None)
    assert server.ended(timeout_s=30) != 0
    assert "unknown buffer type" in server.text


@pytest.mark.parametrize("mode", ["none", "dio"])
@pytest.mark.parametrize("shards", [1, 4])
def test_the_parallel_load_gives_the_same_model(
    mode: str, shards: int, native_build: NativeBuild, vgpu: Vgpu, tmp_path: Path
) -> None:
    """Against the mapped file and against the stock loader, in one file and in shards."""
    request = SynthRequest(kind="tiny", out=tmp_path, shards=shards)
    gguf = synthesise(request, lambda _total: None, lambda _bytes: None).model

    def text(*options: str) -> tuple[str, list[dict[str, Any]]]:
        with LlamaServer(native_build.bin, gguf, tmp_path, *options, on=(vgpu(),)) as server:
            return server.complete("the cat sat on the", n_predict=24)["content"], loads(server)

    mapped, none = text("--load-mode", "mmap")
    assert none == []
    read, (loaded,) = text("--load-mode", mode)
    assert read == mapped
    assert loaded["locked"] is False
    assert loaded["threads"] == min(8, os.cpu_count() or 1)
    assert loaded["direct"] is (mode == "dio")
    experts = 8 * 3 * 32 * 256 * 64  # layers, matrices, experts, rows, columns
    assert experts / 2 < loaded["size_bytes"] < 2 * experts


def test_the_switch_brings_back_the_stock_loader(
    native_build: NativeBuild, tiny_model: Path, vgpu: Vgpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["--load-mode", "none"]
    with LlamaServer(native_build.bin, tiny_model, tmp_path, *argv, on=(vgpu(),)) as server:
        ours = server.complete("the cat", n_predict=16)["content"]
        assert len(loads(server)) == 1
    wrapped = tmp_path / "stock-bin"
    wrapped.mkdir()
    script = wrapped / "llama-server"
    script.write_text(f'#!/bin/sh\nLLAMA_MMAP_PIN_HOST=0 exec "{native_build.bin / "llama-server"}" "$@"\n')
    script.chmod(0o755)
    with LlamaServer(wrapped, tiny_model, tmp_path, *argv, on=(vgpu(),)) as server:
        assert server.complete("the cat", n_predict=16)["content"] == ours
        assert loads(server) == []
