"""The doctor: facts of fake machines, and what is said about them."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from programs import FakeBin
from typer.testing import CliRunner

from flashnext.cli import doctor as doctor_verb
from flashnext.doctor import facts
from flashnext.doctor.facts import Facts
from flashnext.doctor.judge import Finding, judge
from flashnext.probe import gpu_use, machine
from flashnext.probe.gpu import CudaDevice, GpuFacts
from flashnext.probe.limits import Limits
from flashnext.probe.machine import MemoryModules, ModuleSensor
from flashnext.probe.toolchain import Nvcc
from flashnext.profile.load import load

CARD = CudaDevice(0, "GPU-a", "NVIDIA GeForce RTX 3090", (8, 6), 24124 << 20, "570.1")
LINK = gpu_use.Link(0, 1, 3, 16, 16, False, 350.0, 350.0)
CARDS = (CARD, replace(CARD, index=1, uuid="GPU-b"))
GOOD = Facts(
    loaded=load("2x3090"),
    model=None,
    gpus=GpuFacts(CARDS, Path("/usr/bin/nvidia-smi")),
    driver_cuda=(12, 8),
    nvcc=(Nvcc(Path("/usr/local/cuda/bin/nvcc"), "PATH", (12, 4), None),),
    links=(LINK, replace(LINK, index=1)),
    used={0: 300 << 20, 1: 20 << 20},
    holders=(gpu_use.Holder("GPU-a", 77, "Xorg", 250 << 20),),
    limits=Limits(1 << 37, 1 << 37, None, None, 1, False, False),
    service_memlock={},
    own=frozenset(),
    huge_pages="madvise",
    modules=MemoryModules(8, 8, (2133,)),
    memory_errors=(0, 0),
    module_sensor=None,
    throttled=0,
    disk_bytes_per_s=3e9,
    port=None,
    stray_files=(),
    stray_variables=(),
    builds=(),
    inspection=None,
    fit=None,
)


def found(check: str, **changes: Any) -> list[Finding]:
    return [f for f in judge(replace(GOOD, **changes)) if f.check == check]


def test_a_good_box_has_no_complaint_but_what_is_not_installed() -> None:
    assert {f.check for f in judge(GOOD) if f.level != "ok"} == {"build", "model"}
    assert all(f.fix for f in judge(GOOD) if f.level != "ok")


@pytest.mark.parametrize(
    ("check", "level", "words", "changes"),
    [
        ("gpu", "fail", "no CUDA device", {"gpus": GpuFacts((), None, "nvidia-smi is not on PATH")}),
        ("gpu", "fail", "1 visible", {"gpus": GpuFacts(CARDS[:1], Path("smi"))}),
        (
            "gpu",
            "fail",
            "not all are RTX 3090",
            {"gpus": GpuFacts((CARD, replace(CARD, name="RTX 4070")), Path("smi"))},
        ),
        ("driver", "fail", "runs CUDA 11.8, the toolkit is 12.4", {"driver_cuda": (11, 8)}),
        ("driver", "warn", "runs CUDA 12.2, the toolkit is 12.4", {"driver_cuda": (12, 2)}),
        # 77 GB over 4 lanes of generation 3 at 0.79 GB/s, against 16
        ("pcie", "fail", "x4; one pass", {"links": (replace(LINK, pcie_width=4),)}),
        ("pcie", "fail", "takes 24 s on it, 6 s on sixteen", {"links": (replace(LINK, pcie_width=4),)}),
        ("pcie", "fail", "generation 1 x16", {"links": (replace(LINK, pcie_gen_max=1),)}),
        ("pcie", "warn", "x8 of x16", {"links": (replace(LINK, pcie_width=8),)}),
        ("pcie", "ok", "as idle cards are", {}),
        ("ecc", "warn", "ECC is on", {"links": (replace(LINK, ecc=True),)}),
        ("power", "warn", "200 W of 350 W", {"links": (replace(LINK, power_limit_w=200.0),)}),
        ("vram", "fail", "2500 MiB in use by pid 77 Xorg, 1200 allowed", {"used": {0: 2500 << 20}}),
        (
            "vram",
            "ok",
            "50 MiB in use, 250 MiB by a flashnext service",
            {"own": frozenset({77})},
        ),
        ("memlock", "warn", "64 KiB", {"limits": replace(GOOD.limits, memlock_bytes=65536)}),
        ("memlock", "warn", "port 8080 runs with a limit of 64 KiB", {"service_memlock": {8080: 65536}}),
        ("wsl", "warn", "half of its 131072 MiB", {"limits": replace(GOOD.limits, wsl=True)}),
        ("cgroup", "warn", "200 MiB", {"limits": replace(GOOD.limits, cgroup_bytes=200 << 20)}),
        ("numa", "warn", "2 NUMA nodes and no numactl", {"limits": replace(GOOD.limits, numa_nodes=2)}),
        (
            "numa",
            "ok",
            "2 nodes, interleaved",
            {"limits": replace(GOOD.limits, numa_nodes=2, numactl=True)},
        ),
        ("hugepages", "warn", "off", {"huge_pages": "never"}),
        ("modules", "warn", "1 modules on 1 channels at 3200", {"modules": MemoryModules(1, 1, (3200,))}),
        ("memory errors", "warn", "3 corrected", {"memory_errors": (3, 0)}),
        ("memory errors", "fail", "1 uncorrected", {"memory_errors": (3, 1)}),
        ("throttling", "warn", "12 times", {"throttled": 12}),
        ("module heat", "ok", "45 C", {"module_sensor": ModuleSensor(45.2, 85, False)}),
        ("module heat", "warn", "86 C, its limit is 85", {"module_sensor": ModuleSensor(86, 85, False)}),
        ("module heat", "warn", "its own alarm", {"module_sensor": ModuleSensor(70, None, True)}),
        # 111.3 GB at 236 MB/s
        ("disk", "warn", "236 MB/s", {"disk_bytes_per_s": 236e6, "model": Path("/m/x.gguf")}),
        ("disk", "warn", "about 8 minutes", {"disk_bytes_per_s": 236e6, "model": Path("/m/x.gguf")}),
        ("port", "warn", "held by pid 9", {"port": "in use, held by pid 9"}),
        ("port", "warn", "held by pid 9", {"port": "in use, held by pid 9", "service_memlock": {1: None}}),
        ("port", "ok", "flashnext service has it", {"port": "in use", "service_memlock": {8080: None}}),
        ("stray config", "fail", "whatever", {"stray_files": (Path("/etc/llama.cpp/config.ini"),)}),
        ("stray config", "warn", "kept out", {"stray_files": (Path("/h/.config/llama.cpp/config.ini"),)}),
        ("variables", "warn", "LLAMA_ARG_CTX_SIZE", {"stray_variables": ("LLAMA_ARG_CTX_SIZE",)}),
    ],
)
def test_findings(check: str, level: str, words: str, changes: dict[str, Any]) -> None:
    hits = [f for f in found(check, **changes) if f.level == level]
    assert any(words in f.text for f in hits), found(check, **changes)
    assert all(f.fix for f in hits) or level == "ok"


def test_the_plan_counts_what_the_service_on_its_own_port_holds_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load("demo")
    port = loaded.profile.server.port

    def service(port: int, pid: int) -> Any:
        own = SimpleNamespace(pid=os.getpid(), alive=True)
        return SimpleNamespace(port=port, supervisor=own, children=[SimpleNamespace(pid=pid)])

    seen: list[set[int]] = []
    monkeypatch.setattr(facts.services, "every", lambda: [service(port, 41), service(port + 1, 42)])
    monkeypatch.setattr(facts.fit, "judge", lambda *_, ending: seen.append(ending))
    monkeypatch.setattr(facts, "inspect_model", lambda *_: None)
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    assert facts.gather(loaded, model, None).own == {41, 42}
    assert seen == [{41}]


def test_virtual_devices_need_no_card() -> None:
    facts = replace(GOOD, loaded=load("demo"), gpus=GpuFacts((), None, "none"), links=(), used={})
    assert {f.level for f in judge(facts) if f.check in ("gpu", "model")} == {"ok"}
    assert not [f for f in judge(facts) if f.check in ("vram", "memlock", "disk") and f.level != "ok"]


# the probes behind it


def test_links_of_a_fake_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = FakeBin(tmp_path)
    fakes.smi("0, 1, 3, 4, 16, [N/A], 250.00, 350.00", "1, [Unknown Error], 3, 16, 16, Enabled, [N/A], 350")
    monkeypatch.setenv("PATH", str(fakes.bin))
    first, second = gpu_use.links()
    assert first == gpu_use.Link(0, 1, 3, 4, 16, None, 250.0, 350.0)
    assert (second.pcie_gen, second.ecc, second.power_limit_w) == (None, True, None)


def test_a_driver_that_fails_gives_no_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeBin(tmp_path).program("nvidia-smi", "#!/bin/sh\necho broken; exit 9\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert (gpu_use.links(), gpu_use.used_bytes(), gpu_use.holders()) == ([], {}, [])


MODULE = """Memory Device
\tSize: {size}
\tLocator: {locator}
\tBank Locator: {bank}
\tConfigured Memory Speed: {speed} MT/s
"""


def test_memory_modules_are_counted_by_channel() -> None:
    blocks = [
        MODULE.format(size="16 GB", locator="DIMM_A1", bank="NODE 0", speed=2133),
        MODULE.format(size="16 GB", locator="DIMM_B1", bank="NODE 0", speed=1866),
        MODULE.format(size="No Module Installed", locator="DIMM_C1", bank="NODE 0", speed=0),
    ]
    assert machine.parse_modules("\n\n".join(blocks)) == MemoryModules(2, 2, (2133, 1866))
    assert machine.parse_modules("") is None


def test_counters_and_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, corrected, lost in (("mc0", 2, 0), ("mc1", 1, 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ce_count").write_text(f"{corrected}\n")
        (tmp_path / name / "ue_count").write_text(f"{lost}\n")
    monkeypatch.setattr(machine, "EDAC", tmp_path)
    assert machine.memory_errors() == (3, 1)
    monkeypatch.setattr(machine, "EDAC", tmp_path / "none")
    assert machine.memory_errors() is None
    cpu = tmp_path / "cpu3" / "thermal_throttle"
    cpu.mkdir(parents=True)
    (cpu / "package_throttle_count").write_text("7\n")
    monkeypatch.setattr(machine, "CPUS", tmp_path)
    assert machine.throttle_events() == 7
    for index, (name, heat, limit, alarm) in enumerate(
        [("jc42", 41000, 85000, 0), ("k10temp", 99000, 95000, 1), ("jc42", 52500, 85000, 0)]
    ):
        sensor = tmp_path / f"hwmon{index}"
        sensor.mkdir()
        for file, value in [
            ("name", name), ("temp1_input", heat), ("temp1_max", limit), ("temp1_crit_alarm", alarm)
        ]:  # fmt: skip
            (sensor / file).write_text(f"{value}\n")
    monkeypatch.setattr(machine, "SENSORS", tmp_path)
    assert machine.module_sensor() == ModuleSensor(52.5, 85.0, False), "another chip's heat is not a module's"
    (tmp_path / "hwmon0" / "temp1_crit_alarm").write_text("1\n")
    assert machine.module_sensor() == ModuleSensor(41.0, 85.0, True), "the one that complains"
    monkeypatch.setattr(machine, "SENSORS", tmp_path / "none")
    assert machine.module_sensor() is None
    pages = tmp_path / "enabled"
    pages.write_text("always [madvise] never\n")
    monkeypatch.setattr(machine, "HUGE_PAGES", pages)
    assert machine.huge_pages() == "madvise"


def test_disk_speed_is_measured_on_a_file(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"x" * (12 << 20))
    speed = machine.read_speed(file)
    assert speed is None or speed > 1e6  # None: this file system refuses direct reads
    assert machine.read_speed(tmp_path / "absent") is None


def test_a_held_port_names_its_holder() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert "held by" in str(machine.port_holder("127.0.0.1", port))
    assert machine.port_holder("127.0.0.1", port) is None


def test_stray_settings_are_found_by_name_alone(tmp_path: Path) -> None:
    file = tmp_path / "llama.cpp" / "config.ini"
    file.parent.mkdir()
    file.touch()
    env = {"XDG_CONFIG_HOME": str(tmp_path), "LLAMA_API_KEY": "sesame", "GGML_X": "1", "PATH": "/bin"}
    assert file in machine.stray_files(env)
    assert machine.stray_variables(env) == ["GGML_X", "LLAMA_API_KEY"]


def test_the_verb_as_text_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("LLAMA_API_KEY", "sesame")
    data = json.loads(CliRunner().invoke(doctor_verb.app, ["--json"]).stdout)
    assert {f["level"] for f in data["findings"]} <= {"ok", "warn", "fail"}
    text = CliRunner().invoke(doctor_verb.app, [])
    assert text.exit_code == 4  # no build in this data folder
    assert "fail  build:" in text.stdout and "fix: `flashnext build" in text.stdout
    assert "LLAMA_API_KEY" in text.stdout and "sesame" not in text.stdout
