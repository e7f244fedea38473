"""Release and restore on a device that has too little memory when the slots are to come back."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import NativeBuild
from native_servers import VirtualGpu

pytestmark = pytest.mark.native


def drive(bin_dir: Path, gguf: Path, endpoint: str, arm: str) -> subprocess.CompletedProcess[str]:
    argv = [bin_dir / "fn-expert-cache-run", "-m", gguf, "--rpc", endpoint, "--ctx", "512"]
    argv += ["--schedule", "1x12", "--arm", arm]
    return subprocess.run([str(a) for a in argv], capture_output=True, text=True, timeout=120, check=False)


def markers(text: str, event: str) -> list[dict[str, Any]]:
    return [json.loads(data) for data in re.findall(rf"^fn:cache:{event} (\{{.*\}})$", text, re.MULTILINE)]


def test_device_memory_is_given_back_and_taken_again(
    native_build: NativeBuild, vgpu: Callable[..., VirtualGpu], tiny_model: Path
) -> None:
    gpu = vgpu()
    done = drive(native_build.bin, tiny_model, gpu.endpoint, "slots=16,release_at=6")
    assert done.returncode == 0, done.stderr
    (released,), (restored,) = markers(done.stderr, "released"), markers(done.stderr, "restored")
    (attached,) = markers(done.stderr, "attached")
    assert (released["generation"], restored["generation"]) == (1, 2)
    assert restored["size_bytes"] == attached["size_bytes"] > 0


def test_a_refused_allocation_leaves_the_cache_failed(
    native_build: NativeBuild, vgpu: Callable[..., VirtualGpu], tiny_model: Path
) -> None:
    """The n-th allocation of the run is the restore's: found by counting those of a run without it."""
    gpu = vgpu()
    assert drive(native_build.bin, tiny_model, gpu.endpoint, "slots=16").returncode == 0
    count = gpu.books()["allocations"]
    failing = vgpu("--fault", f"alloc:{count + 1}")
    done = drive(native_build.bin, tiny_model, failing.endpoint, "slots=16,release_at=6")
    assert done.returncode == 2
    assert "code 5" in done.stderr
    assert len(markers(done.stderr, "released")) == 1 and markers(done.stderr, "restored") == []
    (failed,) = markers(done.stderr, "failed")
    assert failed["generation"] == 1
