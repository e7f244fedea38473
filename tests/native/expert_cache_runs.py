"""The driver of the expert cache in a test: arms that differ in the cache alone, on one model."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from native_servers import VirtualGpu

from flashnext.model.synth import EXPERT_TYPES, SynthRequest, synthesise

# The pinned CPU backend multiplies eight and more rows of one expert with another kernel, in another order
# of sums. The comparisons to the byte are between equal kernels, so both processes run with it off.
PLAIN_KERNELS = {"GGML_CPU_TILED_MM": "0"}

# The writer quantises F16 and only lacks the name.
EXPERT_TYPES.setdefault("f16", "F16")


def model(kind: str, folder: Path, expert_type: str | None = None, seed: int = 0) -> Path:
    request = SynthRequest(kind=kind, out=folder, expert_type=expert_type, seed=seed)  # type: ignore[arg-type]
    return synthesise(request, lambda _total: None, lambda _bytes: None).model


@contextmanager
def virtual_gpus(bin_dir: Path, folder: Path, count: int, *options: str) -> Iterator[str]:
    """Endpoints of virtual GPUs with the plain kernels, comma separated."""
    wrapped = folder / "plain-bin"
    wrapped.mkdir(exist_ok=True)
    script = wrapped / "fn-vgpu"
    exports = " ".join(f"{key}={value}" for key, value in PLAIN_KERNELS.items())
    script.write_text(f'#!/bin/sh\n{exports} exec "{bin_dir / "fn-vgpu"}" "$@"\n')
    script.chmod(0o755)
    gpus: list[VirtualGpu] = []
    try:
        for _ in range(count):
            gpus.append(VirtualGpu(wrapped, folder, "--threads", "1", *options))
        yield ",".join(gpu.endpoint for gpu in gpus)
    finally:
        for gpu in gpus:
            gpu.stop()


@dataclass(frozen=True)
class Arm:
    """One arm's counters, and its logits as [rows, vocabulary] when they were asked for."""

    counters: dict[str, Any]
    logits: np.ndarray[Any, np.dtype[np.float32]] | None


def run(
    bin_dir: Path,
    gguf: Path,
    endpoints: str,
    folder: Path,
    schedule: str,
    arms: Sequence[str],
    *options: str,
) -> list[Arm]:
    """Run the arms in order in one process. Fails when an arm is refused or the program ends in error."""
    argv = [bin_dir / "fn-expert-cache-run", "-m", gguf, "--rpc", endpoints, "--schedule", schedule]
    argv += ["--ctx", "4096", *options]
    files = [folder / f"logits-{i}.bin" for i in range(len(arms))]
    for arm, file in zip(arms, files, strict=True):
        argv += ["--arm", f"{arm},logits={file}"]
    done = subprocess.run(
        [str(a) for a in argv],
        capture_output=True,
        text=True,
        env={**os.environ, **PLAIN_KERNELS},
        timeout=280,
    )
    assert done.returncode == 0, f"{argv}\n{done.stdout}\n{done.stderr}"
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    results = [line for line in lines if line["event"] == "arm"]
    assert len(results) == len(arms)
    logits = [
        np.fromfile(file, np.float32).reshape(result["tokens"], -1)
        for file, result in zip(files, results, strict=True)
    ]
    return [Arm(result, rows) for result, rows in zip(results, logits, strict=True)]
