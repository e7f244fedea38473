"""A llama-server with or without a drafter, on a free loopback port, for the tests of the MTP feature."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import httpx

START_TIMEOUT_S = 60.0
# One thread per process: two servers at most run at a time.
BASE_ARGS = (
    "-t", "1", "-tb", "1", "-np", "1", "-fit", "off", "--no-repack", "--no-webui", "--metrics", "-lv", "4",
)  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Completion(NamedTuple):
    tokens: tuple[int, ...]
    text: str
    gaps: tuple[float, ...]  # per token: distance of the two best logits; empty if not asked for
    timings: dict[str, Any]


class Server:
    """Context manager: starts the server, waits until it is healthy, ends it. `log` has all it printed."""

    def __init__(
        self, bin_dir: Path, log_dir: Path, model: Path, *args: str | Path, env: dict[str, str] | None = None
    ) -> None:
        self.port = free_port()
        self.log_path = log_dir / f"server-{self.port}.log"
        self._argv = [
            str(bin_dir / "llama-server"), "--host", "127.0.0.1", "--port", str(self.port),
            *BASE_ARGS, "-m", str(model), *map(str, args),
        ]  # fmt: skip
        self._env = {"PATH": os.environ["PATH"], **(env or {})}
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120.0)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def spawn(self) -> subprocess.Popen[bytes]:
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(self._argv, stdout=log, stderr=subprocess.STDOUT, env=self._env)
        return self.process

    def run_to_exit(self, timeout_s: float = START_TIMEOUT_S) -> int:
        """For arguments that must be refused: the exit code. Raises TimeoutExpired if the server stays."""
        process = self.spawn()
        try:
            return process.wait(timeout_s)
        finally:
            process.kill()

    def __enter__(self) -> Self:
        process = self.spawn()
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise AssertionError(f"llama-server exited with {process.returncode}:\n{self.log[-3000:]}")
            try:
                if self._client.get("/health").status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.02)
        process.kill()
        raise AssertionError(f"llama-server not healthy in time:\n{self.log[-3000:]}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def complete(
        self, prompt: str | Sequence[int], n_predict: int = 32, gaps: bool = False, **extra: Any
    ) -> Completion:
        """Greedy completion. With `gaps`, the distance of the two best logits at every token."""
        body = {"prompt": prompt, "n_predict": n_predict, "temperature": 0.0, "return_tokens": True, **extra}
        if gaps:
            body |= {"n_probs": 2, "temperature": -1.0}
        answer = self._client.post("/completion", json=body)
        if answer.status_code != 200:
            raise AssertionError(f"completion failed: {answer.text}")
        data = answer.json()
        found: list[float] = []
        for entry in data.get("completion_probabilities", []):
            first, second = sorted((top["logprob"] for top in entry["top_logprobs"]), reverse=True)[:2]
            found.append(first - second)
        return Completion(tuple(data["tokens"]), data["content"], tuple(found), data["timings"])

    def leave_after(self, prompt: str, n_tokens: int) -> None:
        """A client that reads n_tokens of a stream and goes away."""
        body = {"prompt": prompt, "n_predict": 400, "temperature": 0.0, "stream": True, "ignore_eos": True}
        with self._client.stream("POST", "/completion", json=body) as answer:
            seen = 0
            for line in answer.iter_lines():
                seen += line.startswith("data: ")
                if seen >= n_tokens:
                    return

    def metric(self, name: str) -> dict[str, float]:
        """The samples of one metric, by their label text ("" if it has none)."""
        found = {}
        for line in self._client.get("/metrics").text.splitlines():
            series, _, value = line.partition(" ")
            base, _, labels = series.partition("{")
            if base == f"llamacpp:{name}":
                found[labels.rstrip("}")] = float(value)
        return found
