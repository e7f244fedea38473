"""Device memory as the bench of the transaction sees it: CUDA devices, or virtual GPUs for a dry run."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))  # the machine with the GPU has the checkout and no installed package

from flashnext.bench import cuda, hold  # noqa: E402


class Device(Protocol):
    """One or more devices, each with an equal part of the layers.

    ``names``: as llama-server counts them. ``host``: buffer type of experts in host memory.
    """

    names: list[str]
    host: str
    sample_s: float

    def arguments(self) -> list[str]:
        """What llama-server needs to use them."""

    def free(self) -> list[int]:
        """Bytes, of each device."""

    def limited(self, limit_bytes: int | None) -> Any:
        """While the block runs, so many bytes are free on each (None: all there are); yields what is held."""

    def close(self) -> None: ...


class CudaDevice:
    """The first CUDA devices. A context on each lives as long as the bench and is in all figures."""

    host = "CUDA_Host"
    sample_s = 0.05

    def __init__(self, count: int) -> None:
        self._driver = cuda.Driver()
        if self._driver.count < count:
            raise SystemExit(f"{count} devices are asked for, {self._driver.count} are here")
        self.names = [f"CUDA{i}" for i in range(count)]

    def arguments(self) -> list[str]:
        return split_evenly(self.names)

    def free(self) -> list[int]:
        return [self._driver.memory(i)[0] for i in range(len(self.names))]

    @contextmanager
    def limited(self, limit_bytes: int | None) -> Iterator[list[dict[str, Any]]]:
        with hold.vram_limit(limit_bytes) as held:
            yield held

    def close(self) -> None:
        """The driver gives everything back when the process ends."""


def split_evenly(names: Sequence[str]) -> list[str]:
    return ["--device", ",".join(names), "--tensor-split", ",".join("1" * len(names))]


class VirtualDevice:
    """Each an fn-vgpu of its own; its size is what a holder leaves free."""

    host = "CPU"
    sample_s = 0.1

    def __init__(self, bin_dir: Path, count: int, size_bytes: int, log: Path) -> None:
        self._size_bytes = size_bytes
        self.names = [f"RPC{i}" for i in range(count)]
        self._children = []
        self._ports = []
        for i in range(count):
            child, ports = self._start(bin_dir, f"VGPU{i}", log)
            self._children.append(child)
            self._ports.append(ports)

    def _start(self, bin_dir: Path, name: str, log: Path) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
        argv = [str(bin_dir / "fn-vgpu"), "--port", "0", "--name", name, "--memory", str(self._size_bytes)]
        with log.open("ab") as out:
            child = subprocess.Popen([*argv, "--threads", "1"], stdout=out, stderr=out)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and child.poll() is None:
            time.sleep(0.05)
            text = log.read_text(errors="replace")
            for line in re.findall(r"^fn:vgpu:listening (\{.*\})$", text, re.MULTILINE):
                ports: dict[str, Any] = json.loads(line)
                if ports["pid"] == child.pid:
                    return child, ports
        raise SystemExit(f"fn-vgpu does not listen; see {log}")

    def arguments(self) -> list[str]:
        endpoints = ",".join(f"127.0.0.1:{ports['port']}" for ports in self._ports)
        return ["--rpc", endpoints, *split_evenly(self.names)]

    def _control(self, line: str) -> list[dict[str, Any]]:
        """The answer of each."""
        answers = []
        for ports in self._ports:
            with socket.create_connection(("127.0.0.1", ports["control_port"]), timeout=30) as s:
                s.sendall(line.encode() + b"\n")
                answers.append(json.loads(s.makefile().readline()))
            if "error" in answers[-1]:
                raise SystemExit(f"fn-vgpu: {line}: {answers[-1]['error']}")
        return answers

    def free(self) -> list[int]:
        return [self._size_bytes - int(books["allocated_bytes"]) for books in self._control("stats")]

    @contextmanager
    def limited(self, limit_bytes: int | None) -> Iterator[list[dict[str, Any]]]:
        if limit_bytes is None:
            yield []
            return
        whole = self._size_bytes
        self._control(f"memory {limit_bytes}")
        self._size_bytes = limit_bytes
        try:
            yield [{"held_bytes": whole - limit_bytes, "left_bytes": left} for left in self.free()]
        finally:
            self._control(f"memory {whole}")
            self._size_bytes = whole

    def close(self) -> None:
        for child in self._children:
            child.terminate()
            child.wait()


class Lowest:
    """Smallest free memory of each device since ``reset``, by a thread that looks every ``sample_s``."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._done = threading.Event()
        self._value = device.free()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(self._device.sample_s):
            self._look()

    def _look(self) -> None:
        self._value = [min(pair) for pair in zip(self._value, self._device.free(), strict=True)]

    def reset(self) -> None:
        self._value = self._device.free()

    def read(self) -> list[int]:
        self._look()
        return self._value

    def __enter__(self) -> Lowest:
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
