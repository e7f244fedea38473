"""Every CUDA source of ours compiles alone for the two architectures that are used, where nvcc is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashnext import paths, proc
from flashnext.build.series import load_series
from flashnext.build.toolchain import MIN_NVCC
from flashnext.probe.host import temp_dir
from flashnext.probe.toolchain import Nvcc, probe_nvcc

pytestmark = [pytest.mark.native, pytest.mark.slow]

SOURCES = sorted(paths.patches_dir().glob("*/src/**/fn-*.cu"))


@pytest.fixture(scope="module")
def nvcc() -> Nvcc:
    found = [n for n in probe_nvcc() if n.failure is None and (n.version or ())[:2] >= MIN_NVCC]
    if not found:
        pytest.skip("no nvcc found here: the CUDA sources were NOT compiled")
    return found[0]


def test_cuda_sources_are_those_of_the_series() -> None:
    """None at all is legal; one that no feature.toml names would never be compiled into a build."""
    listed = {f.folder / name for f in load_series(paths.patches_dir()) for name in f.listed_files()}
    assert [str(p) for p in SOURCES if p not in listed] == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("arch", ["86", "90"])
@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.name)
def test_compiles_alone(source: Path, arch: str, nvcc: Nvcc, native_build: Any, tmp_path: Path) -> None:
    if native_build.objects is None:
        pytest.skip("FLASHNEXT_TEST_BIN is set: there is no patched tree to compile against")
    tree = native_build.objects.parent / "tree"
    includes = [tree / "ggml/include", tree / "ggml/src", tree / "ggml/src/ggml-cuda"]
    includes += sorted(p for p in paths.patches_dir().glob("*/src") if p.is_dir())
    argv = [
        str(nvcc.path),
        f"-gencode=arch=compute_{arch},code=sm_{arch}",
        "-std=c++17",
        "-O2",
        "-extended-lambda",
        "-use_fast_math",
        "-DGGML_BACKEND_BUILD",
        "-DGGML_BACKEND_SHARED",
        "-DGGML_SHARED",
        "-Xcompiler=-fPIC",
        *(f"-I{folder}" for folder in includes),
        "-c",
        str(source),
        "-o",
        str(tmp_path / "out.o"),
    ]
    done = proc.run(argv, env=proc.environment({"TMPDIR": str(temp_dir())}), timeout_s=570)
    assert done.ok, done.err
    assert (tmp_path / "out.o").stat().st_size > 0
