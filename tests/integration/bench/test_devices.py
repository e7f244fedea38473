"""Holding memory and measuring the link, on a driver of plain books."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from flashnext.bench import link
from flashnext.bench.cuda import CudaError, Driver
from flashnext.bench.hold import hold, parse_size, vram_limit
from flashnext.bench.memory import CudaDevices, VirtualDevices, Watch, devices_of, smi_row
from flashnext.errors import UsageError, VramHoldFailedError

GIB = 2**30


def compiled(folder: Path, name: str) -> str:
    compiler = shutil.which("cc")
    assert compiler is not None, "the tests need a C compiler"
    source = Path(__file__).parents[2] / "fakes" / f"{name}.c"
    target = folder / f"{name}.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", target, source], check=True)
    return str(target)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return compiled(tmp_path_factory.mktemp("cuda"), "libcuda")


def test_sizes() -> None:
    assert parse_size("24GiB") == 24 * GIB
    assert parse_size("23.5 GiB") == int(23.5 * GIB)
    assert parse_size("24GB") == 24 * 10**9
    assert parse_size("1024") == 1024
    for bad in ("", "24 apples", "-1GiB", "GiB"):
        with pytest.raises(UsageError):
            parse_size(bad)


def test_exactly_the_limit_is_left_on_every_device(library: str) -> None:
    driver = Driver(library)
    held = hold(driver, 24 * GIB)
    assert [h["left_bytes"] for h in held] == [24 * GIB, 24 * GIB]
    assert [h["held_bytes"] for h in held] == [55 * GIB, 55 * GIB + 512 * 2**20]
    assert [h["name"] for h in held] == ["Fake A", "Fake B"]
    with pytest.raises(CudaError, match="fewer than the limit"):
        hold(driver, 25 * GIB)


def holders() -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if "flashnext.bench.hold" in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


def until_gone(pids: list[int]) -> bool:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if not set(holders()) & set(pids):
            return True
        time.sleep(0.05)
    return False


def test_a_child_holds_it_and_lets_go_at_the_end(library: str) -> None:
    before = set(holders())
    with vram_limit(24 * GIB, library=library) as held:
        assert [h["left_bytes"] for h in held] == [24 * GIB, 24 * GIB]
        ours = list(set(holders()) - before)
        assert len(ours) == 1
    assert until_gone(ours)


def test_it_lets_go_when_the_run_fails(library: str) -> None:
    before = set(holders())
    with pytest.raises(RuntimeError), vram_limit(24 * GIB, library=library):
        ours = list(set(holders()) - before)
        raise RuntimeError
    assert until_gone(ours)


def test_it_lets_go_when_its_parent_is_killed(library: str) -> None:
    code = (
        "import time\nfrom flashnext.bench.hold import vram_limit\n"
        f"with vram_limit({24 * GIB}, library={library!r}):\n    print('held', flush=True); time.sleep(60)"
    )
    before = set(holders())
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdout.readline() == "held\n"
    ours = list(set(holders()) - before)
    assert len(ours) == 1
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert until_gone(ours)


def test_no_limit_holds_nothing_and_a_limit_that_cannot_be_is_refused(library: str) -> None:
    with vram_limit(None) as held:
        assert held == []
    with pytest.raises(VramHoldFailedError) as caught, vram_limit(90 * GIB, library=library):
        pass
    assert "fewer than the limit" in caught.value.context[0]
    with pytest.raises(VramHoldFailedError) as caught, vram_limit(GIB, library="/nonexistent/libcuda.so"):
        pass
    assert "libcuda.so" in caught.value.context[0]


def test_the_link_is_measured_per_device_and_together(library: str) -> None:
    found = link.probe(library=library)
    assert [d["name"] for d in found["devices"]] == ["Fake A", "Fake B"]
    assert found["together_bytes_per_s"] > 0
    assert all(d["alone_bytes_per_s"] > 0 for d in found["devices"])


def test_without_a_driver_the_link_has_a_reason_instead_of_a_number() -> None:
    assert "libcuda" in link.probe(library="/nonexistent/libcuda.so")["failure"]


class Books:
    """fn-vgpu's control port."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.asked = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection:
                assert connection.makefile().readline() == "stats\n"
                self.asked += 1
                connection.sendall(b'{"allocated_bytes": %d}\n' % (self.asked * 100))


def test_memory_of_virtual_gpus_is_watched_over_a_request() -> None:
    books = Books()
    line = f'vgpu0| fn:vgpu:listening {{"host": "127.0.0.1", "port": 1, "control_port": {books.port}}}'
    devices = devices_of([line, "server| something else"])
    assert isinstance(devices, VirtualDevices)
    watch = Watch(devices, every_s=0.02)
    watch.begin()
    while books.asked < 4:
        time.sleep(0.01)
    watch.end()
    samples = watch.taken()
    assert [used for _, used in samples][:3] == [[100], [200], [300]]
    assert samples == sorted(samples)
    assert watch.taken() == []
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    assert VirtualDevices([port]).used_bytes() == []


def test_memory_is_read_from_the_management_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = CudaDevices(compiled(tmp_path, "libnvml"))
    assert [devices.used_bytes(), devices.used_bytes()] == [[100, 200], [101, 201]]
    watch = Watch(devices, every_s=0.001)
    watch.begin()
    time.sleep(0.2)
    watch.end()
    assert len(watch.taken()) > 20, "no process is started for a sample"
    while devices.used_bytes():
        pass  # until the library refuses: then nothing is said
    # without the library nvidia-smi is asked
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\necho "1024, 45, 1410, 1593, 71.26, 4, 16"\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert CudaDevices("/nonexistent/libnvidia-ml.so").used_bytes() == [1024 * 2**20]


def test_a_line_of_nvidia_smi() -> None:
    row = smi_row("1024, 45, 1410, 1593, 71.26, 4, 16")
    assert row["used_mib"] == 1024 and row["pcie_width"] == 16
    assert smi_row("10, [N/A], 1, 2, [Not Supported], 4, 16").keys() == {
        "used_mib", "sm_mhz", "memory_mhz", "pcie_generation", "pcie_width",
    }  # fmt: skip
