"""The memory plan: the qualified arithmetic, the rules behind it, and refusals with their numbers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import FakeBin
from typer.testing import CliRunner

from flashnext.cli import plan as plan_verb
from flashnext.errors import MemoryUnfitError
from flashnext.model import memory_workspace as workspace
from flashnext.model.memory import MIB, layer_devices
from flashnext.probe import host, limits
from flashnext.probe.limits import Limits
from flashnext.profile import fit
from flashnext.profile.load import Loaded, load
from flashnext.profile.schema import LeanPrefillSection
from tests.real_set import write_real_set

GIB = 1024 * MIB
BOX = Limits(
    total_bytes=128 * GIB,
    available_bytes=122 * GIB,
    cgroup_bytes=None,
    memlock_bytes=None,
    numa_nodes=1,
    numactl=False,
    wsl=False,
)
QUERY = """#!/bin/sh
case "$1" in
--query-gpu=index,memory.used) echo "0, {used0}"; echo "1, {used1}" ;;
--query-gpu=index,uuid*)
  echo "0, GPU-a, NVIDIA GeForce RTX 3090, 8.6, {total}, 570.1"
  echo "1, GPU-b, NVIDIA GeForce RTX 3090, 8.6, {total}, 570.1" ;;
--query-compute-apps=*) echo "GPU-b, 4321, /usr/bin/blender, {used1}" ;;
*) exit 1 ;;
esac
"""
Cards = Callable[..., None]


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_real_set(tmp_path_factory.mktemp("real"))


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cards:
    """Two cards as a fake nvidia-smi tells of them, on a box with 128 GiB."""
    fakes = FakeBin(tmp_path)
    monkeypatch.setenv("PATH", str(fakes.bin) + ":/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def set_up(total: int = 24124, used0: int = 0, used1: int = 0, box: Limits = BOX) -> None:
        fakes.program("nvidia-smi", QUERY.format(total=total, used0=used0, used1=used1))
        monkeypatch.setattr(fit, "probe_limits", lambda: box)

    return set_up


@pytest.fixture
def loaded() -> Loaded:
    return load("2x3090")


def test_the_qualified_arithmetic(loaded: Loaded, real: tuple[Path, Path], cards: Cards) -> None:
    cards()
    found = fit.judge(loaded, *real, features=())
    assert found.refusals == ()
    first, second = found.plan.devices
    # layers over two cards: 49 parts with the output, the first card takes the 25th
    assert (first.layers, second.layers) == (25, 23)
    # 6 full-attention layers a card, 2 KV heads of 256, K and V in f16
    assert first.kv == second.kv == 6 * 2 * 2 * 256 * 2 * 261_888
    assert first.kv + second.kv == 24_576 * 261_888
    assert first.indexer + second.indexer == 3_072 * 261_888
    # 1 + 3 planes of 36 layers; the PLE layer's rows are on the first card
    assert first.recurrent + second.recurrent == 4 * (4_423_680 + 113_246_208 + 368_640)
    # 150 slots: layers 2 and 4 are larger, as are 30, 46 and 47
    assert first.slots == 150 * (23 * 3_072_000 + 3_993_600 + 3_584_000)
    assert second.slots == 150 * (20 * 3_072_000 + 3 * 3_584_000)
    assert found.plan.host.pinned == 77_017_907_200
    assert found.plan.host.mapped == 28_800_138_240
    assert found.plan.host.weights == 675_430_400
    weights = first.weights + second.weights
    assert weights == 111_323_630_080 - 77_017_907_200 - 28_800_138_240 - 675_430_400
    # the published measurement of the stock graph: 1,754 and 7,009 MiB
    assert first.workspace / MIB == pytest.approx(1754, rel=0.03)
    assert first.workspace_prefill / MIB == pytest.approx(7009, rel=0.03)
    # the slots leave before the larger workspace comes
    assert first.slots_during_prefill == 0
    assert first.prefill < first.decode < 24_000 * MIB
    # experts of the block, and the KV of one dense layer; the draft context has a workspace of its own
    assert first.head == 0 and second.head > 2_673_868_800 + 2_048 * 261_888
    assert second.workspace > first.workspace + 2 * 261_888 * 512
    assert second.prefill < second.decode < 23_000 * MIB


def test_tiles_take_less_than_the_stock_graph(loaded: Loaded, real: tuple[Path, Path], cards: Cards) -> None:
    cards()
    stock = fit.judge(loaded, *real, features=()).plan
    tiled = fit.judge(loaded, *real).plan
    assert fit.TILED in fit.shipped_features(), "None means all of this package's"
    assert tiled == fit.judge(loaded, *real, features=fit.shipped_features()).plan
    for old, new in zip(stock.devices, tiled.devices, strict=True):
        assert new.workspace < 0.7 * old.workspace and new.workspace_prefill < 0.4 * old.workspace_prefill
        assert (new.weights, new.kv, new.slots, new.head) == (old.weights, old.kv, old.slots, old.head)
    assert tiled.host.workspace < 0.6 * stock.host.workspace
    several = loaded.profile.context.model_copy(update={"sequences": 2})
    assert fit.settings(loaded.profile, [fit.TILED]).tile == 128
    assert fit.settings(loaded.profile.model_copy(update={"context": several}), [fit.TILED]).tile == 0


# context, micro-batch, then MiB of the first device, the one behind it, and the host: the library's own lines
# for a random-weight model of all 48 layers on two virtual GPUs (`fn-tiled-qsa-run --reserve --flash`)
REAL_SHAPE = [
    (8192, 512, 145.18, 115.8, 103.69),
    (8192, 2048, 580.31, 462.81, 414.37),
    (32768, 512, 145.58, 118.2, 104.09),
    (32768, 2048, 580.71, 463.21, 414.76),
    (131072, 512, 257.17, 263.79, 105.68),
    (131072, 2048, 582.3, 472.8, 416.36),
    (261888, 512, 450.95, 457.57, 107.8),
    (261888, 2048, 688.18, 714.68, 418.48),
]


@pytest.mark.parametrize(("context", "tokens", "first", "behind", "host_mib"), REAL_SHAPE)
def test_tiled_workspace_of_the_real_shape(
    context: int, tokens: int, first: float, behind: float, host_mib: float, real: tuple[Path, Path]
) -> None:
    hyper = fit.read(real[0], None).hyper
    batch = workspace.Batch(context, tokens, 128)
    sizes = [workspace.device_bytes(hyper, batch, sparse_layers=6, first=f) / MIB for f in (True, False)]
    assert sizes == pytest.approx([first, behind], rel=0.03)
    assert workspace.host_bytes(hyper, batch) / MIB == pytest.approx(host_mib, rel=0.001)


@pytest.mark.parametrize(("chunk", "measured"), [(512, 454), (2048, 684), (8192, 2237), (16384, 4469)])
def test_the_workspace_of_a_lean_chunk(
    chunk: int, measured: int, real: tuple[Path, Path], cards: Cards
) -> None:
    """What the real layer shape reserved with its experts on the device (see patches/tiled-qsa)."""
    cards()
    base = load("2x3090-lean")
    profile = base.profile.model_copy(
        update={"lean_prefill": LeanPrefillSection(chunk=chunk), "mtp": None, "expert_cache": None}
    )
    first, second = fit.judge(replace(base, profile=profile), real[0]).plan.devices
    assert 0.99 * measured <= first.workspace / MIB <= 1.05 * measured
    assert first.workspace == first.workspace_prefill
    # two layers of the largest gate, up and down: the larger types of layer 2, and of down elsewhere
    assert first.staging == 2 * 512 * 3_993_600
    assert second.staging == 2 * 512 * 3_584_000


def test_the_lean_profile_fits_by_lending(real: tuple[Path, Path], cards: Cards) -> None:
    cards()
    found = fit.judge(load("2x3090-lean"), *real)
    assert found.refusals == ()
    assert [device.staging for device in found.plan.devices] == [0, 0], "slots are lent for it"
    assert all(d.slots == d.slots_during_prefill for d in found.plan.devices)


def test_the_plan_of_the_real_set_takes_no_time(
    loaded: Loaded, real: tuple[Path, Path], cards: Cards
) -> None:
    cards(box=replace(BOX, total_bytes=23 * GIB, available_bytes=22 * GIB))
    start = time.process_time()
    with pytest.raises(MemoryUnfitError) as caught:
        fit.check_fits(loaded, *real)
    assert time.process_time() - start < 2
    (line,) = caught.value.context
    assert line.startswith("host memory:") and "pinned 73,450 MiB" in line and "short by" in line
    assert "more memory" in caught.value.advice


def test_a_used_card_is_named_with_who_uses_it(loaded: Loaded, real: tuple[Path, Path], cards: Cards) -> None:
    cards(used0=900, used1=900)
    assert fit.judge(loaded, *real).refusals == ()
    cards(used0=10, used1=2500)
    with pytest.raises(MemoryUnfitError) as caught:
        fit.check_fits(loaded, *real)
    (line,) = caught.value.context
    assert line.startswith("device 1 (NVIDIA GeForce RTX 3090):")
    assert "2,500 MiB in use by pid 4321 (/usr/bin/blender, 2500 MiB)" in line
    assert (
        "end what else uses the cards" in caught.value.advice
        and "2,500 MiB of device 1" in caught.value.advice
    )


def test_what_a_process_that_ends_before_holds_counts_as_free(
    loaded: Loaded, real: tuple[Path, Path], cards: Cards
) -> None:
    cards(used0=10, used1=2500, box=replace(BOX, available_bytes=BOX.total_bytes // 2))
    assert fit.judge(loaded, *real, ending={4321}).refusals == fit.judge(loaded, *real).refusals[1:]
    room = fit.judge(loaded, *real, ending={4321}).rooms[1]
    assert (room.used, room.by) == (0, ())
    before = fit.judge(loaded, *real).limits.available_bytes
    after = fit.judge(loaded, *real, ending={os.getpid()}).limits.available_bytes
    assert 10 << 20 < after - before < 10 << 30, "this process and its Python"
    gone = fit.judge(loaded, *real, ending={2**22 + 1}).limits.available_bytes
    assert gone == before


def test_the_largest_number_of_slots_is_named_and_fits(
    loaded: Loaded, real: tuple[Path, Path], cards: Cards
) -> None:
    cards(total=20_000)
    found = fit.judge(loaded, *real)
    assert found.change is not None and "expert_cache.slots to " in found.change
    slots = int(found.change.split("slots to ")[1].split(";")[0])
    assert loaded.profile.expert_cache is not None

    def with_slots(n: int) -> Loaded:
        cache = loaded.profile.expert_cache
        assert cache is not None
        profile = loaded.profile.model_copy(update={"expert_cache": cache.model_copy(update={"slots": n})})
        return replace(loaded, profile=profile)

    assert fit.judge(with_slots(slots), *real).refusals == ()
    assert fit.judge(with_slots(slots + 1), *real).refusals != ()


def test_wsl_pins_half(loaded: Loaded, real: tuple[Path, Path], cards: Cards) -> None:
    cards(box=replace(BOX, wsl=True))
    refusals = fit.judge(loaded, *real).refusals
    assert [line.split(":")[0] for line in refusals] == ["pinned memory"]
    assert "WSL" in refusals[0] and "65,536 MiB" in refusals[0]


def test_memlock_is_a_warning_to_others_than_root(
    loaded: Loaded, real: tuple[Path, Path], cards: Cards, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards(box=replace(BOX, memlock_bytes=65536))
    monkeypatch.setattr(fit.os, "geteuid", lambda: 1000)
    warnings = fit.check_fits(loaded, *real)
    assert any("RLIMIT_MEMLOCK" in text and "LimitMEMLOCK=infinity" in text for text in warnings)
    monkeypatch.setattr(fit.os, "geteuid", lambda: 0)
    assert not any("RLIMIT_MEMLOCK" in text for text in fit.check_fits(loaded, *real))


def test_the_table_is_asked_for_but_never_refused(
    loaded: Loaded, real: tuple[Path, Path], cards: Cards
) -> None:
    cards(box=replace(BOX, total_bytes=100 * GIB, available_bytes=96 * GIB))
    assert any("embedding table" in text for text in fit.check_fits(loaded, *real))
    cards()
    assert not any("embedding table" in text for text in fit.check_fits(loaded, *real))


def test_plan_as_a_table_and_as_json(real: tuple[Path, Path], cards: Cards) -> None:
    cards(used1=900)
    options = ["--profile", "2x3090", "--model", str(real[0]), "--head", str(real[1])]
    shown = CliRunner().invoke(plan_verb.app, options)
    assert shown.exit_code == 0, shown.output
    bars = [line for line in shown.stdout.splitlines() if "|" in line]
    assert [bar.split()[0] for bar in bars] == ["device", "device", "host"]
    assert all(len(bar.rstrip("!")) == len(bars[0].rstrip("!")) for bar in bars)
    assert "#" in bars[1] and "#" not in bars[0]
    data = json.loads(CliRunner().invoke(plan_verb.app, [*options, "--json"]).stdout)
    assert data["fits"] is True
    assert data["devices"][1]["need"] == max(data["devices"][1]["decode"], data["devices"][1]["prefill"])
    assert data["rooms"][1]["used"] == 900 * MIB


@given(st.integers(1, 64), st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any))
def test_every_layer_has_a_device_and_layers_come_in_order(layers: int, split: list[int]) -> None:
    where = layer_devices(layers, split)
    assert len(where) == layers + 1
    assert where == sorted(where)
    assert all(split[device] > 0 for device in where)


# host facts, from files that a test writes


@pytest.mark.parametrize(("nodes", "count"), [((), 1), (("node0",), 1), (("node0", "node1"), 2)])
def test_numa_nodes(
    nodes: tuple[str, ...], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*nodes, "possible"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(limits, "NODES", tmp_path)
    assert limits.numa_nodes() == count


@pytest.mark.parametrize(
    ("release", "wsl"), [("5.15.153.1-microsoft-standard-WSL2", True), ("6.8.0-45-generic", False)]
)
def test_wsl(release: str, wsl: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "osrelease"
    file.write_text(release)
    monkeypatch.setattr(limits, "KERNEL", file)
    assert limits.is_wsl() is wsl


def test_limits_of_this_machine_are_read() -> None:
    found = limits.probe_limits()
    assert found.total_bytes == host.probe_host().total_bytes > 0
    assert found.numa_nodes >= 1
