"""The memory plan against llama-server's own lines about its buffers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from native_servers import LlamaServer, VirtualGpu

from flashnext.model import memory
from flashnext.model.header import read_header
from flashnext.model.hyper import read_hyper
from flashnext.model.memory import MIB, Rule, Settings
from flashnext.model.memory_tiled import TILE
from flashnext.model.synth import SynthRequest, synthesise

pytestmark = pytest.mark.native

# Both graphs have a description: the sparse attention in tiles, and the stock one.
FORMS = {"tiled": ({}, TILE), "stock": ({"FN_TILED_QSA": "0"}, 0)}
FORM = pytest.mark.parametrize("form", sorted(FORMS))
POINTS = [(8192, 512), (8192, 2048), (32768, 512), (32768, 2048), (131072, 512), (131072, 2048)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The demo model and a shared head."""
    request = SynthRequest(kind="demo", out=tmp_path_factory.mktemp("demo"), mtp="shared")
    made = synthesise(request, lambda _total: None, lambda _bytes: None)
    assert made.head is not None
    return made.model, made.head


@pytest.fixture(scope="module")
def demo_model(demo: tuple[Path, Path]) -> Path:
    return demo[0]


def buffers(text: str, what: str) -> dict[str, list[float]]:
    """MiB of each line about one kind of buffer, by device: virtual GPUs in the order they were told of."""
    found: dict[str, list[float]] = {}
    for name, size in re.findall(rf"(\S+) +{what} buffer size *= *([\d.]+) MiB", text):
        found.setdefault(name, []).append(float(size))
    return found


def on_devices(text: str, what: str, gpus: tuple[VirtualGpu, ...]) -> list[float]:
    sizes = buffers(text, what)
    return [sum(sum(v) for k, v in sizes.items() if gpu.endpoint in k) for gpu in gpus]


@FORM
@pytest.mark.parametrize(("context", "micro_batch"), POINTS)
def test_workspace_is_the_servers_own(
    form: str,
    context: int,
    micro_batch: int,
    native_build: Any,
    demo_model: Path,
    vgpu: Callable[..., VirtualGpu],
    tmp_path: Path,
) -> None:
    gpus = (vgpu(), vgpu())
    options = ["-c", str(context), "-b", "4096", "-ub", str(micro_batch), "-ts", "1,1", "-fa", "on"]
    options += ["-lv", "4", "--no-warmup", "--no-kv-unified", "-ot", "_exps=CPU,per_layer_token_embd=CPU"]
    env, tile = FORMS[form]
    with LlamaServer(native_build.bin, demo_model, tmp_path, *options, on=gpus, env=env) as server:
        text = server.text
    header = read_header(demo_model)
    hyper, problems = read_hyper(header)
    assert hyper is not None and not problems
    rules = (Rule("_exps", False), Rule("per_layer_token_embd", False))
    settings = Settings((1, 1), context=context, micro_batch=micro_batch, rules=rules, tile=tile)
    plan = memory.draw(hyper, header.tensors, settings)

    told = on_devices(text, "compute", gpus)
    assert [d.workspace / MIB for d in plan.devices] == pytest.approx(told, rel=0.03)
    (host,) = buffers(text, "compute")["CPU"]
    assert plan.host.workspace / MIB == pytest.approx(host, rel=0.03)
    # the lines have two decimals
    kv = [(d.kv + d.indexer) / MIB for d in plan.devices]
    assert kv == pytest.approx(on_devices(text, "KV", gpus), abs=0.02)
    assert [d.recurrent / MIB for d in plan.devices] == pytest.approx(on_devices(text, "RS", gpus), abs=0.01)
    assert [d.weights / MIB for d in plan.devices] == pytest.approx(on_devices(text, "model", gpus), abs=0.02)


def start_options(context: int) -> list[str]:
    options = ["-c", str(context), "-b", "4096", "-ub", "512", "-ts", "1,1", "-fa", "on", "-lv", "4"]
    return [*options, "--no-warmup", "--no-kv-unified", "-ot", "_exps=CPU,per_layer_token_embd=CPU"]


def settings(context: int, **more: Any) -> Settings:
    rules = (Rule("_exps", False), Rule("per_layer_token_embd", False))
    return Settings((1, 1), context=context, micro_batch=512, rules=rules, **more)


@FORM
@pytest.mark.parametrize("context", [8192, 32768])
def test_head_and_drafts_are_the_servers_own(
    form: str,
    context: int,
    native_build: Any,
    demo: tuple[Path, Path],
    vgpu: Callable[..., VirtualGpu],
    tmp_path: Path,
) -> None:
    gpus = (vgpu(), vgpu())
    model, head = demo
    options = [*start_options(context), "--spec-draft-model", str(head), "--spec-type", "draft-mtp"]
    options += ["--spec-draft-n-max", "3", "--spec-draft-ngl", "all", "--spec-draft-device", "RPC1"]
    env, tile = FORMS[form]
    with LlamaServer(native_build.bin, model, tmp_path, *options, on=gpus, env=env) as server:
        text = server.text
    own, other = read_header(model), read_header(head)
    hyper, head_hyper = read_hyper(own)[0], read_hyper(other)[0]
    assert hyper is not None and head_hyper is not None
    drafts = settings(context, drafts=3, head_device=1, tile=tile)
    plan = memory.draw(hyper, own.tensors, drafts, memory.Head(other.tensors, head_hyper))
    recurrent = [d.recurrent / MIB for d in plan.devices]
    assert recurrent == pytest.approx(on_devices(text, "RS", gpus), abs=0.01)
    held = zip(on_devices(text, "model", gpus), on_devices(text, "KV", gpus), strict=True)
    planned = [(d.weights + d.kv + d.indexer + d.head) / MIB for d in plan.devices]
    assert planned == pytest.approx([sum(on) for on in held], abs=0.05)
    told = [last_computes(text, gpu.endpoint) for gpu in gpus]
    assert [d.workspace / MIB for d in plan.devices] == pytest.approx(told, rel=0.03)


def last_computes(text: str, endpoint: str) -> float:
    """The compute buffers of all contexts on a device; a size that is told again counts once."""
    lines = re.findall(rf"{re.escape(endpoint)}\S* +compute buffer size *= *([\d.]+) MiB", text)
    return sum(float(size) for size in dict.fromkeys(lines))


def test_slots_are_the_caches_own(
    native_build: Any, demo_model: Path, vgpu: Callable[..., VirtualGpu], tmp_path: Path
) -> None:
    gpus = (vgpu(), vgpu())
    options = [*start_options(8192), "--moe-expert-cache", "16"]
    with LlamaServer(native_build.bin, demo_model, tmp_path, *options, on=gpus) as server:
        text = server.text
    header = read_header(demo_model)
    hyper = read_hyper(header)[0]
    assert hyper is not None
    plan = memory.draw(hyper, header.tensors, settings(8192, slots=16))
    attached = re.search(r"fn:cache:attached (\{.*\})", text)
    assert attached is not None
    assert sum(d.slots for d in plan.devices) == json.loads(attached[1])["size_bytes"]
