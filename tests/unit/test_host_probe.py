"""Memory and cores of the host, from fake /proc and cgroup files; jobs from both."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashnext.build.ninja import jobs_for
from flashnext.probe import host

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host, "_CGROUP_SELF", tmp_path / "cgroup")
    monkeypatch.setattr(host, "_CGROUP_ROOT", tmp_path / "fs")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    return tmp_path


def memory(machine: Path, available_kib: int) -> None:
    machine.joinpath("meminfo").write_text(
        f"MemTotal:       33554432 kB\nMemAvailable:   {available_kib} kB\nHugePages_Total: 3\n"
    )


def cgroup(machine: Path, name: str, **values: int | str) -> None:
    folder = machine / "fs" / name
    folder.mkdir(parents=True, exist_ok=True)
    for key, value in values.items():
        (folder / key.replace("__", ".")).write_text(f"{value}\n")


def test_available_memory(machine: Path) -> None:
    memory(machine, 3_000_000)
    facts = host.probe_host()
    assert (facts.available_bytes, facts.total_bytes) == (3_000_000 * 1024, 32 * GIB)
    assert facts.cgroup_limit_bytes is None


def test_three_gigabytes_are_one_job(machine: Path) -> None:
    memory(machine, 3_000_000)
    assert jobs_for(host.probe_host(), "cuda") == 1
    assert jobs_for(host.probe_host(), "cpu") == 1


def test_memory_bounds_jobs_before_cores_do(machine: Path) -> None:
    memory(machine, 24 * 1024 * 1024)
    assert jobs_for(host.probe_host(), "cuda") == 6
    assert jobs_for(host.probe_host(), "cpu") == 16
    assert jobs_for(host.probe_host(), "cuda", wanted=9) == 9
    memory(machine, 100)
    assert jobs_for(host.probe_host(), "cpu") == 1


def test_the_tightest_cgroup_above_this_process_counts(machine: Path) -> None:
    memory(machine, 24 * 1024 * 1024)
    machine.joinpath("cgroup").write_text("0::/user.slice/box\n")
    cgroup(machine, "user.slice/box", memory__max="max", memory__current=2 * GIB)
    cgroup(
        machine,
        "user.slice",
        memory__max=8 * GIB,
        memory__current=5 * GIB,
        memory__stat=f"inactive_file {GIB}",
    )
    facts = host.probe_host()
    assert facts.cgroup_limit_bytes == 8 * GIB
    assert facts.available_bytes == 4 * GIB


def test_a_containers_cpu_quota_counts_as_cores(machine: Path) -> None:
    memory(machine, 24 * 1024 * 1024)
    machine.joinpath("cgroup").write_text("0::/user.slice/box\n")
    cgroup(machine, "user.slice/box", cpu__max="max 100000")
    assert host.probe_host().cores == 16
    cgroup(machine, "user.slice", cpu__max="250000 100000")
    assert host.probe_host().cores == 3


def test_cgroup_v1_without_a_limit(machine: Path) -> None:
    memory(machine, 1024)
    machine.joinpath("cgroup").write_text("4:memory:/box\n0::/\n")
    cgroup(machine, "memory/box", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=GIB)
    assert host.probe_host().cgroup_limit_bytes is None


def test_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert host.disk_free_bytes(tmp_path / "a" / "b") > 0
