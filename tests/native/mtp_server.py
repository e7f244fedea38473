"""A llama-server that drafts, seen from a client: tokens, gaps of the two best logits, timings, metrics."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from native_servers import LlamaServer, VirtualGpu

from flashnext.model.synth_tokenizer import tokenizer

MTP = ("--spec-type", "draft-mtp")
# llama-server leaves out the probabilities of tokens that end inside a character, and
# nothing tells which token the others belong to. Where gaps are compared, every arm is kept to tokens
# of whole ASCII characters.
_ASCII = frozenset(
    i for i, word in enumerate(tokenizer().tokens) if re.fullmatch("[!-~]+", word) and "<" not in word[:-1]
)
WHOLE_CHARACTERS = {
    "logit_bias": [[i, False] for i in range(len(tokenizer().tokens)) if i not in _ASCII],
}
# Verbose enough to say which tensors are loaded where.
COMMON = ("-tb", "1", "--metrics", "-lv", "4")


class Completion(NamedTuple):
    tokens: tuple[int, ...]
    gaps: tuple[float, ...]  # per token: distance of the two best logits; empty if not asked for
    timings: dict[str, Any]


class MtpServer(LlamaServer):
    """llama-server with these further options."""

    def __init__(
        self,
        bin_dir: Path,
        folder: Path,
        model: Path,
        *options: str | Path,
        on: tuple[VirtualGpu, ...] = (),
        ready_s: float | None = 60.0,
    ) -> None:
        super().__init__(bin_dir, model, folder, *COMMON, *map(str, options), on=on, ready_s=ready_s)

    def tokens(
        self, prompt: str | Sequence[int], n_predict: int = 32, *, gaps: bool = False, **extra: Any
    ) -> Completion:
        """Exactly n_predict greedy tokens. With `gaps`, the distance of the two best logits at each."""
        fields = {"ignore_eos": True, "return_tokens": True, "cache_prompt": True, **extra}
        if gaps:
            fields["n_probs"] = 24  # of all tokens; enough for two that are allowed
        if not isinstance(prompt, str):
            prompt = list(prompt)
        data = self.complete(prompt, timeout_s=120.0, n_predict=n_predict, **fields)  # type: ignore[arg-type]
        found: list[float] = []
        for entry in data.get("completion_probabilities", []):
            allowed = [top["logprob"] for top in entry["top_logprobs"] if top["id"] in _ASCII]
            first, second = sorted(allowed, reverse=True)[:2]
            found.append(first - second)
        assert not gaps or len(found) == len(data["tokens"])
        return Completion(tuple(data["tokens"]), tuple(found), data["timings"])

    def leave_after(self, prompt: Sequence[int], n_tokens: int) -> None:
        """A client that reads n_tokens of a long stream and goes away."""
        body = {
            "prompt": list(prompt),
            "n_predict": 400,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        with httpx.stream("POST", f"{self.url}/completion", json=body, timeout=60.0) as answer:
            seen = 0
            for line in answer.iter_lines():
                seen += line.startswith("data: ")
                if seen >= n_tokens:
                    return

    def metric(self, name: str) -> dict[str, float]:
        """The samples of one metric, by their label text ("" if it has none)."""
        found = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines():
            series, _, value = line.partition(" ")
            base, _, labels = series.partition("{")
            if base == f"llamacpp:{name}":
                found[labels.rstrip("}")] = float(value)
        return found


def run_test_program(bin_dir: Path, *args: str | Path, env: dict[str, str] | None = None) -> str:
    """Runs the feature's C++ test program; its output. Raises CalledProcessError with what it said."""
    argv = [bin_dir / "test-fn-mtp", *map(str, args)]
    done = subprocess.run(argv, env=env or {}, check=True, timeout=120, capture_output=True, text=True)
    return done.stdout
