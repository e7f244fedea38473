"""Device memory as the bench of the transaction sees it: a CUDA device, or a virtual GPU for a dry run."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))  # the machine with the GPU has the checkout and no installed package

from flashnext.bench import cuda, hold  # noqa: E402


class Device(Protocol):
    """``arguments``: what llama-server needs to use it. ``host``: buffer type of experts in host memory."""

    host: str
    sample_s: float

    def arguments(self) -> list[str]: ...

    def free(self) -> int:
        """Bytes."""

    def limited(self, limit_bytes: int | None) -> Any:
        """While the block runs, so many bytes are free (None: all there are); yields what is held."""

    def close(self) -> None: ...


class CudaDevice:
    """The first CUDA devices, as one. A context on each lives as long as the bench and is in all figures."""

    host = "CUDA_Host"
    sample_s = 0.05

    def __init__(self, count: int) -> None:
        self._driver = cuda.Driver()
        self._count = count

    def arguments(self) -> list[str]:
        names = ",".join(f"CUDA{i}" for i in range(self._count))
        return ["--device", names, "--tensor-split", ",".join("1" * self._count)]

    def free(self) -> int:
        return sum(self._driver.memory(i)[0] for i in range(self._count))

    @contextmanager
    def limited(self, limit_bytes: int | None) -> Iterator[list[dict[str, Any]]]:
        with hold.vram_limit(limit_bytes) as held:
            yield held

    def close(self) -> None:
        """The driver gives everything back when the process ends."""


class VirtualDevice:
    """One fn-vgpu; its size is what a holder leaves free."""

    host = "CPU"
    sample_s = 0.1

    def __init__(self, bin_dir: Path, size_bytes: int, log: Path) -> None:
        self._size_bytes = size_bytes
        with log.open("ab") as out:
            argv = [str(bin_dir / "fn-vgpu"), "--port", "0", "--name", "VGPU0", "--memory", str(size_bytes)]
            self._child = subprocess.Popen([*argv, "--threads", "1"], stdout=out, stderr=out)
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + 30
        while not found and time.monotonic() < deadline and self._child.poll() is None:
            time.sleep(0.05)
            text = log.read_text(errors="replace")
            found = [json.loads(m) for m in re.findall(r"^fn:vgpu:listening (\{.*\})$", text, re.MULTILINE)]
        if not found:
            raise SystemExit(f"fn-vgpu does not listen; see {log}")
        self._ports = found[-1]

    def arguments(self) -> list[str]:
        return ["--rpc", f"127.0.0.1:{self._ports['port']}", "--device", "RPC0"]

    def _control(self, line: str) -> dict[str, Any]:
        with socket.create_connection(("127.0.0.1", self._ports["control_port"]), timeout=30) as s:
            s.sendall(line.encode() + b"\n")
            answer: dict[str, Any] = json.loads(s.makefile().readline())
        if "error" in answer:
            raise SystemExit(f"fn-vgpu: {line}: {answer['error']}")
        return answer

    def free(self) -> int:
        return self._size_bytes - int(self._control("stats")["allocated_bytes"])

    @contextmanager
    def limited(self, limit_bytes: int | None) -> Iterator[list[dict[str, Any]]]:
        if limit_bytes is None:
            yield []
            return
        whole = self._size_bytes
        self._control(f"memory {limit_bytes}")
        self._size_bytes = limit_bytes
        try:
            yield [{"held_bytes": whole - limit_bytes, "left_bytes": self.free()}]
        finally:
            self._control(f"memory {whole}")
            self._size_bytes = whole

    def close(self) -> None:
        self._child.terminate()
        self._child.wait()


class Lowest:
    """Smallest free memory since ``reset``, by a thread that looks every ``sample_s``."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._done = threading.Event()
        self._value = device.free()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(self._device.sample_s):
            self._value = min(self._value, self._device.free())

    def reset(self) -> None:
        self._value = self._device.free()

    def read(self) -> int:
        self._value = min(self._value, self._device.free())
        return self._value

    def __enter__(self) -> Lowest:
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
