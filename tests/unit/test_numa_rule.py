"""Memory is interleaved only over two or more nodes, and only with numactl; files of fake machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from programs import FakeBin

from flashnext.profile import command
from flashnext.profile.load import Loaded, load
from flashnext.serve import host

PLACE = command.Place(server="/b/llama-server", model="/m/model.gguf", port=8080, endpoints=("a", "b"))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake /sys/devices/system/node and a PATH of our own, both empty."""
    nodes = tmp_path / "node"
    nodes.mkdir()
    (nodes / "possible").write_text("0-7\n")
    monkeypatch.setattr(host, "NODES", nodes)
    monkeypatch.setenv("PATH", str(FakeBin(tmp_path).bin))
    return tmp_path


def line(loaded: Loaded) -> tuple[list[str], str | None]:
    use, warning = host.interleave(loaded)
    return command.argv(loaded.profile, replace(PLACE, interleave=use)), warning


@pytest.mark.parametrize("profile", ["2x3090", "demo"])
@pytest.mark.parametrize("nodes", [0, 1, 2, 8])
@pytest.mark.parametrize("numactl", [False, True])
def test_rule(profile: str, nodes: int, numactl: bool, machine: Path) -> None:
    for number in range(nodes):
        (machine / "node" / f"node{number}").mkdir()
    if numactl:
        program = machine / "bin" / "numactl"
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    argv, warning = line(load(profile))
    if nodes >= 2 and numactl:
        assert argv[:3] == ["numactl", "--interleave=all", "/b/llama-server"]
        assert argv[argv.index("--numa") + 1] == "distribute"
    else:
        assert argv[0] == "/b/llama-server"
        assert "--numa" not in argv
    assert (warning is not None) == (nodes >= 2 and not numactl)
    assert warning is None or (f"{nodes} NUMA nodes" in warning and "install it" in warning)


def test_a_profile_can_say_never(machine: Path) -> None:
    for number in range(2):
        (machine / "node" / f"node{number}").mkdir()
    loaded = load("demo")
    numa = loaded.profile.numa.model_copy(update={"interleave": "never"})
    argv, warning = line(replace(loaded, profile=loaded.profile.model_copy(update={"numa": numa})))
    assert argv[0] == "/b/llama-server" and "--numa" not in argv and warning is None


def test_no_sysfs_is_one_node(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "NODES", machine / "nowhere")
    argv, warning = line(load("demo"))
    assert argv[0] == "/b/llama-server" and warning is None
