"""The real programs as objects of a test: a virtual GPU and a llama-server, each ended with its test."""

from __future__ import annotations

import itertools
import json
import re
import signal
import socket
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from flashnext import proc

START_S = 30.0
_serial = itertools.count()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


class Program:
    """A running program with its output in a file."""

    def __init__(self, argv: list[str | Path], folder: Path, env: dict[str, str] | None = None) -> None:
        self.log = folder / f"{Path(argv[0]).name}-{next(_serial)}.log"
        with self.log.open("w") as out:
            self.child = proc.start(argv, stdout=out, env=proc.environment(env))

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def stop(self) -> int:
        return proc.stop(self.child)

    def ended(self, *, timeout_s: float) -> int:
        """Its exit code (negative: the signal), once it has ended; fails when it does not in time."""
        assert proc.wait_until(lambda: self.child.poll() is not None, timeout_s=timeout_s), (
            f"still running after {timeout_s:g} s:\n{self.text}"
        )
        return int(self.child.returncode)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class VirtualGpu(Program):
    """fn-vgpu, listening. Its options are those of `fn-vgpu --help`."""

    def __init__(self, bin_dir: Path, folder: Path, *options: str) -> None:
        super().__init__([bin_dir / "fn-vgpu", *options], folder)
        proc.wait_until(
            lambda: self.markers("listening") or self.child.poll() is not None,
            timeout_s=START_S,
            every_s=0.01,
        )
        markers = self.markers("listening")
        if not markers:
            self.stop()
            raise AssertionError(f"fn-vgpu does not listen:\n{self.text}")
        self.port: int = markers[0]["port"]
        self.control_port: int = markers[0]["control_port"]

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def markers(self, event: str) -> list[dict[str, Any]]:
        found = re.findall(rf"^fn:vgpu:{event} (\{{.*\}})$", self.text, re.MULTILINE)
        return [json.loads(data) for data in found]

    def control(self, line: str) -> dict[str, Any]:
        """Send one line to the control port and return the answer: the books, or `error`."""
        with socket.create_connection(("127.0.0.1", self.control_port), timeout=10) as s:
            s.sendall(line.encode() + b"\n")
            answer: dict[str, Any] = json.loads(s.makefile().readline())
            return answer

    def books(self) -> dict[str, Any]:
        return self.control("stats")

    def wait_for(self, timeout_s: float = 10.0, **expected: Any) -> dict[str, Any]:
        """The books once they have these values. The client frees without waiting, so they come late."""
        proc.wait_until(
            lambda: all(self.books()[key] == value for key, value in expected.items()), timeout_s=timeout_s
        )
        books = self.books()
        assert {key: books[key] for key in expected} == expected
        return books


class LlamaServer(Program):
    """llama-server on one thread; all layers on the virtual GPUs given, experts in host memory."""

    def __init__(
        self,
        bin_dir: Path,
        model: Path,
        folder: Path,
        *options: str,
        on: tuple[VirtualGpu, ...] = (),
        experts_on_devices: bool = False,
        ready_s: float | None = START_S,
        env: dict[str, str] | None = None,
    ) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        argv: list[str | Path] = [bin_dir / "llama-server", "-m", model, "--host", "127.0.0.1"]
        argv += ["--port", str(port), "-t", "1", "-c", "2048", "-np", "1", "--fit", "off", "--no-repack"]
        if on:
            argv += ["--rpc", ",".join(gpu.endpoint for gpu in on), "-ngl", "99"]
            argv += [] if experts_on_devices else ["-ot", "exps=CPU"]
        else:
            argv += ["-ngl", "0"]
        config = folder / "empty-config"
        config.mkdir(exist_ok=True)
        super().__init__([*argv, *options], folder, {"XDG_CONFIG_HOME": str(config), **(env or {})})
        if ready_s is not None and not self.wait_ready(ready_s):
            self.stop()
            raise AssertionError(f"llama-server is not ready:\n{self.text}")

    def wait_ready(self, timeout_s: float) -> bool:
        proc.wait_until(lambda: self.ready() or self.child.poll() is not None, timeout_s=timeout_s)
        return self.child.poll() is None and self.ready()

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def get(self, path: str) -> dict[str, Any]:
        answer = httpx.get(self.url + path, timeout=10)
        answer.raise_for_status()
        data: dict[str, Any] = answer.json()
        return data

    def complete(self, prompt: str, *, timeout_s: float = 60.0, **fields: Any) -> dict[str, Any]:
        """One greedy completion, computed from scratch."""
        body = {"prompt": prompt, "n_predict": 16, "temperature": 0, "cache_prompt": False, **fields}
        answer = httpx.post(f"{self.url}/completion", json=body, timeout=timeout_s)
        answer.raise_for_status()
        data: dict[str, Any] = answer.json()
        return data

    def end(self) -> int:
        """Ask it to end, and return its exit code."""
        self.child.send_signal(signal.SIGTERM)
        return self.ended(timeout_s=30)
