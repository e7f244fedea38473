"""Every CUDA source of ours compiles for sm_86 with a CUDA 12 toolkit: the published box runs 12.0.

With a real toolkit its nvcc compiles. With one from wheels (cuda12_toolkit.py) clang does, with that
toolkit's headers, libdevice and ptxas.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from flashnext import proc

pytestmark = [pytest.mark.native, pytest.mark.slow]

FOLDER = os.environ.get("FLASHNEXT_CUDA12")
PATCHES = Path(__file__).parents[2] / "patches"
SOURCES = sorted(str(path.relative_to(PATCHES)) for path in PATCHES.glob("*/src/*.cu"))
CLANGS = ("clang++-19", "clang++-18", "clang++-17", "clang++-16", "clang++")
# nvcc's sm_32_intrinsics.hpp, which clang does not read; its own headers lack this overload
SHIM = """
static __device__ __forceinline__ unsigned int __ldcg(const unsigned int * ptr) {
    unsigned int value;
    asm("ld.global.cg.u32 %0, [%1];" : "=r"(value) : "l"(ptr));
    return value;
}
"""


def clang() -> str:
    """The newest one here. Those before 16 do not know CUDA 12."""
    for name in CLANGS:
        if shutil.which(name):
            version = re.search(r"clang version (\d+)", proc.run([name, "--version"]).out)
            if version and int(version[1]) >= 16:
                return name
    pytest.skip("the toolkit has no nvcc, and there is no clang of 16 or newer")


@pytest.mark.parametrize("source", SOURCES)
def test_it_compiles(source: str, native_build: Any, tmp_path: Path) -> None:
    if FOLDER is None:
        pytest.skip("FLASHNEXT_CUDA12 names no CUDA 12 toolkit (cuda12_toolkit.py makes one from wheels)")
    if native_build.objects is None:
        pytest.skip("FLASHNEXT_TEST_BIN is set: there is no patched tree of ours")
    toolkit = Path(FOLDER)
    header = (toolkit / "include/cuda.h").read_text(errors="replace")
    assert re.search(r"#define CUDA_VERSION 12\d{3}\b", header), "not a CUDA 12"
    ggml = native_build.objects.parent / "tree/ggml"
    folders = [ggml / "include", ggml / "src", ggml / "src/ggml-cuda", *sorted(PATCHES.glob("*/src"))]
    common = ["-std=c++17", "-O2", *(f"-I{folder}" for folder in folders)]
    if (toolkit / "bin/nvcc").exists():
        argv = [toolkit / "bin/nvcc", *common, "-arch=sm_86", "-use_fast_math", "-extended-lambda", "-c"]
        commands = [[*argv, PATCHES / source, "-o", tmp_path / "it.o"]]
    else:
        shim = tmp_path / "shim.h"
        shim.write_text(SHIM)
        # the wheels have no fatbinary to join the two halves
        halves = ("--cuda-device-only", "--cuda-host-only")
        argv = [clang(), *common, "--cuda-gpu-arch=sm_86", f"--cuda-path={toolkit}", "-ffast-math"]
        argv += ["-isystem", toolkit / "include", "-include", shim, "-x", "cuda", "-c", PATCHES / source]
        commands = [[*argv, half, "-o", tmp_path / f"it{half}.o"] for half in halves]
    for command in commands:
        done = proc.run([str(word) for word in command], timeout_s=280)
        assert done.ok, done.err[-4000:]
    assert len(list(tmp_path.glob("it*.o"))) == len(commands)
