"""One llama-server process of the bench of the transaction: its command line, its requests, its markers."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

from phase_device import Device

# as a profile writes it (flashnext/profile/command.py), without what only a person at the keyboard needs
ALWAYS = [
    "--offline",
    "--no-mmproj",
    "--no-context-shift",
    "--no-kv-unified",
    "--metrics",
    "--slots",
    "--no-webui",
]
MARKER = re.compile(r"^fn:phase:(\w+) (\{.*\})$", re.MULTILINE)


class Numbers(NamedTuple):
    """What all arms share, but for micro-batch and slots."""

    context: int
    batch: int
    micro_batch: int
    prompt_micro_batch: int
    slots: int
    inserts: int
    min_tokens: int
    threads: int
    draft: int
    layers: str  # tensors that stay in host memory
    cache_ram_mib: int
    checkpoints: int


class Arm(NamedTuple):
    name: str
    phase: bool
    micro_batch: int
    slots: int


class OverBudgetError(Exception):
    """The time given is over."""


class Clock:
    def __init__(self, budget_s: float) -> None:
        self._end = time.monotonic() + budget_s

    def left(self) -> float:
        return self._end - time.monotonic()

    def limit(self, at_most_s: float) -> float:
        """A timeout; raises OverBudgetError when there is nothing left."""
        left = self.left()
        if left < 1:
            raise OverBudgetError
        return min(left, at_most_s)


def words(seed: int, count: int, n_vocab: int) -> list[int]:
    """A prompt of its own: no two seeds share a beginning (but by chance)."""
    rng = random.Random(seed)
    return [rng.randrange(n_vocab) for _ in range(count)]


def environment(arm: Arm, n: Numbers, extra: dict[str, str], config_home: str) -> dict[str, str]:
    """The variables of a profile with the transaction, on top of ours without any LLAMA_ or FN_ name."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_", "FN_", "GGML_"))}
    env |= {"XDG_CONFIG_HOME": config_home, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "LLAMA_ATTN_ROT_DISABLE": "1"}
    if arm.phase:
        env |= {
            "LLAMA_PHASE_PREFILL_UBATCH": str(n.prompt_micro_batch),
            "LLAMA_PHASE_PREFILL_MODE": "transaction",
            "LLAMA_PHASE_PREFILL_MIN_TOKENS": str(n.min_tokens),
        }
        if (n.micro_batch, n.batch, n.slots) != (512, 4096, 150):
            env["LLAMA_PHASE_PREFILL_QUALIFIED"] = "0"
    return env | extra


def command(
    arm: Arm, n: Numbers, server: Path, model: Path, head: Path | None, device: Device, port: int
) -> list[str]:
    line = [
        str(server),
        "--model",
        str(model),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--timeout",
        "3600",
    ]
    line += ["--threads", str(n.threads), "--threads-batch", str(n.threads), *device.arguments()]
    line += ["--gpu-layers", "all", "--split-mode", "layer", "--override-tensor", f"{n.layers}={device.host}"]
    line += [
        "--ctx-size",
        str(n.context),
        "--batch-size",
        str(n.batch),
        "--ubatch-size",
        str(arm.micro_batch),
    ]
    line += ["--parallel", "1", "--cache-type-k", "f16", "--cache-type-v", "f16", "--flash-attn", "on"]
    line += [
        "--ctx-checkpoints",
        str(n.checkpoints),
        "--checkpoint-min-step",
        "8192",
        "--cache-ram",
        str(n.cache_ram_mib),
    ]
    line += ["--no-repack", "--fit", "off", *ALWAYS, "--log-colors", "off"]
    if arm.slots:
        line += ["--moe-expert-cache", str(arm.slots), "--moe-expert-cache-inserts", str(n.inserts)]
    line += ["--spec-draft-model", str(head)] if head else []
    line += ["--spec-draft-device", device.names[-1]] if head and len(device.names) > 1 else []
    line += ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(n.draft), "--spec-draft-ngl", "all"]
    return line


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


class Server:
    """A fresh process. ``prefix``: words before the command (compute-sanitizer and its options)."""

    def __init__(
        self,
        argv: list[str],
        env: dict[str, str],
        port: int,
        log: Path,
        clock: Clock,
        prefix: list[str] | None = None,
    ) -> None:
        self.base = f"http://127.0.0.1:{port}"
        self.clock = clock
        self.log = log
        self._argv0 = argv[0]
        self._read = 0
        self._start = time.monotonic()
        with log.open("wb") as out:
            self.child = subprocess.Popen(
                [*(prefix or []), *argv], stdout=out, stderr=out, env=env, start_new_session=True
            )

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_ready(self, limit_s: float) -> float | None:
        """Seconds since the start until /health answers 200; None when the process ended before."""
        while time.monotonic() - self._start < limit_s:
            if self.child.poll() is not None:
                return None
            try:
                with urllib.request.urlopen(self.base + "/health", timeout=self.clock.limit(2)):
                    return time.monotonic() - self._start
            except OSError:
                time.sleep(0.1)
        return None

    def _open(self, path: str, body: dict[str, Any] | None, at_most_s: float) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=self.clock.limit(at_most_s))

    def get(self, path: str) -> str:
        with self._open(path, None, 60) as answer:
            return str(answer.read().decode())

    def post(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._open("/completion", body, 600) as answer:
            data: dict[str, Any] = json.loads(answer.read())
            return data

    def n_vocab(self) -> int:
        return int(json.loads(self.get("/v1/models"))["data"][0]["meta"]["n_vocab"])

    def complete(self, prompt: list[int], n_predict: int) -> dict[str, Any]:
        """A streamed completion: what the client saw, and the server's own timings."""
        body = {
            "prompt": prompt, "n_predict": n_predict, "temperature": 0, "ignore_eos": True, "stream": True,
            "return_tokens": True,
        }  # fmt: skip
        start = time.monotonic()
        first = last = start
        count = 0
        timings: dict[str, Any] = {}
        with self._open("/completion", body, 600) as answer:
            for raw in answer:
                self.clock.limit(1)
                if not raw.startswith(b"data: "):
                    continue
                now = time.monotonic()
                data = json.loads(raw[6:])
                if "error" in data:
                    raise RuntimeError(str(data["error"]))
                if data.get("tokens"):
                    first = now if not count else first
                    count += len(data["tokens"])
                    last = now
                timings = data.get("timings", timings)
        return {
            "n_prompt": len(prompt),
            "first_token_s": first - start,
            "prefill_tps": len(prompt) / (first - start),
            "n_decoded": count,
            "decode_tps": (count - 1) / (last - first) if count > 1 else None,
            "timings": timings,
        }

    def outcome(self, prompt: list[int], n_predict: int) -> dict[str, Any]:
        """How a request that may fail ends: the tokens, or the HTTP code and what it says."""
        try:
            return {"n_decoded": self.complete(prompt, n_predict)["n_decoded"]}
        except urllib.error.HTTPError as error:
            return {"code": error.code, "text": error.read().decode(errors="replace")[:300]}
        except (OSError, RuntimeError) as error:
            return {"lost": f"{type(error).__name__}: {error}"[:300]}

    def logprobs(self, prompt: list[int], n_vocab: int) -> dict[int, float]:
        """Log-probability of every token as the first one."""
        answer = self.post(
            {"prompt": prompt, "n_predict": 1, "temperature": 0, "ignore_eos": True, "n_probs": n_vocab}
        )
        top = answer["completion_probabilities"][0]["top_logprobs"]
        return {one["id"]: one["logprob"] for one in top}

    def markers(self) -> list[dict[str, Any]]:
        """Those printed since the last call."""
        text = self.text
        found = [{"event": m[1], **json.loads(m[2])} for m in MARKER.finditer(text, self._read)]
        self._read = text.rfind("\n") if "\n" in text else 0
        return found

    def metrics(self) -> dict[str, float]:
        pairs = [line.rsplit(" ", 1) for line in self.get("/metrics").splitlines() if line.startswith("fn_")]
        return {name: float(value) for name, value in pairs}

    def rss_bytes(self) -> int:
        try:
            pages = Path(f"/proc/{self.child.pid}/statm").read_text().split()[1]
        except OSError:
            return 0
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def ask_to_end(self, limit_s: float) -> int | None:
        """SIGTERM to llama-server itself, not to what started it; the exit code, None when it hangs."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words_ = (folder / "cmdline").read_bytes().split(b"\0")
                mine = os.getpgid(int(folder.name)) == self.child.pid
            except (OSError, ProcessLookupError):
                continue
            if mine and words_[0].decode(errors="replace") == self._argv0:
                os.kill(int(folder.name), signal.SIGTERM)
        try:
            return self.child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None

    def wait_end(self, limit_s: float) -> None:
        """Until it has ended by itself, at most so long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(limit_s)

    def kill(self) -> int:
        if self.child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGKILL)
        return self.child.wait()
