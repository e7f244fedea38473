"""llama-server with the qualified numbers on the demo model, with or without the transaction."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from native_servers import Program, VirtualGpu, free_port

from flashnext import proc

START_S = 90.0
QUALIFIED = {
    "--spec-type": "draft-mtp",
    "-c": "8192",
    "-ub": "512",
    "-b": "4096",
    "-np": "1",
    "--moe-expert-cache": "150",
}


class Answer(NamedTuple):
    """One completion, and what decides whether two runs did the same."""

    content: str
    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    cached: int
    computed: int


class PhaseServer(Program):
    """``phase``: values of LLAMA_PHASE_PREFILL_<key>; none of them: a server without the transaction."""

    def __init__(
        self,
        bin_dir: Path,
        files: tuple[Path, Path],
        folder: Path,
        gpus: Sequence[VirtualGpu],
        *options: str,
        phase: dict[str, str] | None = None,
        merge: bool = True,
        numbers: dict[str, str] | None = None,
        ready: bool = True,
        switches: dict[str, str] | None = None,
    ) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        argv: list[str | Path] = [bin_dir / "llama-server", "-m", files[0], "-md", files[1]]
        argv += ["--spec-draft-n-max", "3", "--host", "127.0.0.1", "--port", str(port)]
        argv += ["-t", "1", "-tb", "1", "--fit", "off", "--no-repack", "-ngl", "99", "-ot", "exps=CPU"]
        argv += ["--rpc", ",".join(gpu.endpoint for gpu in gpus)] if gpus else []
        argv += ["--metrics", "--cache-ram", "0", "-lv", "4"]
        for pair in {**QUALIFIED, **(numbers or {})}.items():
            argv += pair
        config = folder / "empty-config"
        config.mkdir(exist_ok=True)
        env = {f"LLAMA_PHASE_PREFILL_{key}": value for key, value in (phase or {}).items()}
        env |= {"XDG_CONFIG_HOME": str(config), "OMP_NUM_THREADS": "1"}
        env |= {"FN_EXPERT_CACHE_MERGE": "1"} if merge else {}
        env |= switches or {}
        super().__init__([*argv, *options], folder, env)
        if ready:
            proc.wait_until(lambda: self.ready() or self.child.poll() is not None, timeout_s=START_S)
            if not self.ready():
                self.stop()
                raise AssertionError(f"not ready:\n{self.text[-4000:]}")

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def markers(self, event: str, kind: str = "phase") -> list[dict[str, Any]]:
        found = re.findall(rf"^fn:{kind}:{event} (\{{.*\}})$", self.text, re.MULTILINE)
        return [json.loads(data) for data in found]

    def post(
        self, prompt: Sequence[int], n_predict: int = 16, timeout_s: float = 120.0, **fields: Any
    ) -> httpx.Response:
        body = {
            "prompt": list(prompt), "n_predict": n_predict, "temperature": 0, "return_tokens": True,
            "ignore_eos": True, "cache_prompt": True, **fields,
        }  # fmt: skip
        return httpx.post(f"{self.url}/completion", json=body, timeout=timeout_s)

    def ask(self, prompt: Sequence[int], n_predict: int = 16, **fields: Any) -> Answer:
        answer = self.post(prompt, n_predict, **fields)
        assert answer.status_code == 200, answer.text
        data = answer.json()
        timings = data["timings"]
        return Answer(
            data["content"], tuple(data["tokens"]), timings.get("draft_n", 0),
            timings.get("draft_n_accepted", 0), timings["cache_n"], timings["prompt_n"],
        )  # fmt: skip

    def leave(self, prompt: Sequence[int], after_s: float) -> None:
        """A client that goes away after so many seconds."""
        try:
            self.post(prompt, 400, timeout_s=after_s)
        except httpx.TimeoutException:
            return

    def idle(self) -> None:
        """Waits until no slot works and no transaction is open: /slots is answered while one ends. Polls
        seldom: every result, also of /slots, restarts the second after which a waiting request of upstream's
        looks whether its client is still there."""

        def free() -> bool:
            slots = httpx.get(f"{self.url}/slots", timeout=30).json()
            begins, ends = self.begins_and_ends()
            return begins == ends and not any(slot["is_processing"] for slot in slots)

        assert proc.wait_until(free, timeout_s=90, every_s=1.6), "still busy"

    def metrics(self, start: str = "fn_phase_") -> dict[str, float]:
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        pairs = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(start)]
        return {name: float(value) for name, value in pairs}

    def checkpoints(self) -> list[tuple[str, ...]]:
        """Position and size of every context checkpoint that was made, in order."""
        found = re.findall(r"created context checkpoint \d+ of \d+ \((.*)\)", self.text)
        return [tuple(one.split(", ")) for one in found]

    def begins_and_ends(self) -> tuple[int, int]:
        return len(self.markers("begin")), len(self.markers("end"))

    def end(self) -> int:
        self.child.send_signal(signal.SIGTERM)
        return self.ended(timeout_s=60)
