"""Watches the devices' memory while a request runs, and reads their clocks and temperature."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from flashnext.bench import nvml
from flashnext.loopback import UnreachableError, ask_line
from flashnext.markers import parse
from flashnext.proc import environment, run

Sample = tuple[float, list[int]]
_EVERY_S = 0.25
_SMI_FIELDS = (
    "memory.used",
    "temperature.gpu",
    "clocks.sm",
    "clocks.mem",
    "power.draw",
    "pcie.link.gen.current",
    "pcie.link.width.current",
)
_SMI_NAMES = ("used_mib", "temperature_c", "sm_mhz", "memory_mhz", "power_w", "pcie_generation", "pcie_width")


class Devices(ABC):
    """The devices of a run."""

    @abstractmethod
    def used_bytes(self) -> list[int]:
        """Bytes in use, by device; empty where they do not answer."""

    @abstractmethod
    def state(self) -> list[dict[str, float]]:
        """Clocks, temperature, power and link of each device, as far as it tells."""


class VirtualDevices(Devices):
    """fn-vgpu processes, read over their control ports."""

    def __init__(self, ports: Sequence[int]) -> None:
        self.ports = list(ports)

    def used_bytes(self) -> list[int]:
        found = [self._books(port) for port in self.ports]
        used = [books.get("allocated_bytes", books.get("allocated")) for books in found]
        return [int(u) for u in used if u is not None] if all(u is not None for u in used) else []

    def state(self) -> list[dict[str, float]]:
        return []

    @staticmethod
    def _books(port: int) -> dict[str, Any]:
        with contextlib.suppress(UnreachableError):
            return ask_line(("127.0.0.1", port), "stats")
        return {}


class CudaDevices(Devices):
    """Devices as the management library tells their memory, and nvidia-smi the rest (all, without it)."""

    def __init__(self, library: str = nvml.LIBRARY) -> None:
        try:
            self._nvml: nvml.Nvml | None = nvml.Nvml(library)
        except nvml.NvmlError:
            self._nvml = None

    def used_bytes(self) -> list[int]:
        if self._nvml is not None:
            try:
                return self._nvml.used_bytes()
            except nvml.NvmlError:
                return []
        return [int(row["used_mib"]) * 2**20 for row in self.state() if "used_mib" in row]

    def state(self) -> list[dict[str, float]]:
        done = run(
            ["nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits"],
            env=environment(),
            timeout_s=10.0,
        )
        return [smi_row(line) for line in done.out.splitlines() if line.strip()] if done.ok else []


def smi_row(line: str) -> dict[str, float]:
    """One line of nvidia-smi's CSV; what a device does not support is left out."""
    row = {}
    for name, text in zip(_SMI_NAMES, line.split(","), strict=False):
        with contextlib.suppress(ValueError):
            row[name] = float(text)
    return row


def devices_of(log_lines: Sequence[str]) -> Devices | None:
    """The devices behind a server: virtual GPUs named in its log, else the machine's, else none."""
    ports = []
    for line in log_lines:
        marker = parse(line.partition("| ")[2] if "| fn:" in line else line)
        if marker is not None and marker.name == "vgpu:listening" and "control_port" in marker.data:
            ports.append(int(marker.data["control_port"]))
    if ports:
        return VirtualDevices(ports)
    return CudaDevices() if shutil.which("nvidia-smi") else None


class Watch:
    """Samples memory from a thread while a request runs."""

    def __init__(self, devices: Devices, every_s: float = _EVERY_S) -> None:
        self._devices, self._every_s = devices, every_s
        self._samples: list[Sample] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        self._samples, self._stop = [], threading.Event()
        self._thread = threading.Thread(target=self._loop, args=(self._stop, time.monotonic()), daemon=True)
        self._thread.start()

    def _loop(self, stop: threading.Event, began: float) -> None:
        while True:
            used = self._devices.used_bytes()
            if used:
                self._samples.append((round((time.monotonic() - began) * 1000, 1), used))
            if stop.wait(self._every_s):
                return

    def end(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def taken(self) -> list[Sample]:
        """The samples since ``begin``, once: a second call gives none."""
        samples, self._samples = self._samples, []
        return samples
