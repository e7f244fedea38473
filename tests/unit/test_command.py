"""The server's command line and environment, as snapshots: a change shows in review."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from flashnext.profile import command, load
from flashnext.profile.load import check

TWO = ("127.0.0.1:50001", "127.0.0.1:50002")
PLACE = command.Place(
    server="/b/llama-server",
    model="/m/model.gguf",
    port=8080,
    head="/m/head.gguf",
    endpoints=TWO,
    threads=4,
    config_home="/s/empty-config",
)
FULL_DEMO = """
expert_cache: {slots: 150}
mtp: {synthetic: true, device: 1}
phase_prefill: {verify: true}
"""


def demo_with(text: str) -> command.Profile:
    raw = load.find("demo").read_text() + text
    loaded = check(raw.encode(), Path("x.yaml")).loaded
    assert loaded is not None
    return loaded.profile


@pytest.mark.parametrize("name", ["demo", "demo-full", "demo-lean", "2x3090", "2x3090-lean"])
def test_shipped(name: str, snapshot: SnapshotAssertion) -> None:
    profile = load.load(name).profile
    assert command.argv(profile, PLACE) == snapshot(name="argv")
    assert command.env(profile, PLACE) == snapshot(name="env")
    assert sorted(command.features(profile)) == snapshot(name="features")


def test_demo_with_every_feature(snapshot: SnapshotAssertion) -> None:
    profile = demo_with(FULL_DEMO)
    assert command.argv(profile, PLACE) == snapshot(name="argv")
    assert command.env(profile, PLACE) == snapshot(name="env")
    assert sorted(command.features(profile)) == snapshot(name="features")


def test_virtual_gpu(snapshot: SnapshotAssertion) -> None:
    assert command.vgpu_argv(load.load("demo").profile, "/b/fn-vgpu", 1, 1) == snapshot


def test_two_numa_nodes_change_the_command_line() -> None:
    profile = load.load("2x3090").profile
    one = command.argv(profile, PLACE)
    two = command.argv(profile, command.Place(**{**vars(PLACE), "interleave": True}))
    assert two[:2] == ["numactl", "--interleave=all"]
    assert "--numa" in two and "--numa" not in one


@pytest.mark.parametrize("name", ["demo", "2x3090"])
def test_what_reports_taught(name: str) -> None:
    argv = command.argv(load.load(name).profile, PLACE)
    pairs = dict(pairwise(argv))
    assert pairs["--fit"] == "off"
    assert pairs["--lazy-mode"] == "off"
    assert int(pairs["--cache-ram"]) < 8192
    assert int(pairs["--timeout"]) >= 3600
    assert pairs["--parallel"] == "1"
    assert "--no-repack" in argv and "--offline" in argv
    assert not [word for word in argv if "sleep" in word or "url" in word or "hf" in word]


def test_variables_of_the_transaction() -> None:
    qualified = command.env(load.load("2x3090").profile, PLACE)
    assert "LLAMA_PHASE_PREFILL_QUALIFIED" not in qualified
    full = demo_with(FULL_DEMO)
    assert "LLAMA_PHASE_PREFILL_QUALIFIED" not in command.env(full, PLACE)
    other = demo_with(FULL_DEMO.replace("150", "100"))
    assert command.env(other, PLACE)["LLAMA_PHASE_PREFILL_QUALIFIED"] == "0"
    assert not [k for k in command.env(load.load("demo").profile, PLACE) if k.startswith("LLAMA_PHASE")]
