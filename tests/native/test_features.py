"""The C++ tests of every feature, as CMake registered them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashnext import paths, proc
from flashnext.build.series import load_series
from flashnext.probe.toolchain import probe_cmake

pytestmark = [pytest.mark.native, pytest.mark.slow]

CPP_TESTS = [(f.id, t.name) for f in load_series(paths.patches_dir()) for t in f.tests]


@pytest.mark.parametrize(("feature", "name"), CPP_TESTS)
def test_cpp(feature: str, name: str, native_build: Any) -> None:
    if native_build.objects is None:
        program = native_build.bin / name
        if not program.exists():
            pytest.skip(f"FLASHNEXT_TEST_BIN has no {name}, which may need CUDA")
        done = proc.run([program], timeout_s=280)
        if done.code == 77:
            pytest.skip(f"{name} found no GPU here")
        assert done.ok, done.out + done.err
        return
    cmake = probe_cmake()
    assert cmake is not None
    ctest = Path(cmake.path).with_name("ctest")
    argv = [ctest, "--test-dir", native_build.objects, "-R", f"^{name}$", "-L", f"^{feature}$"]
    done = proc.run([*argv, "--output-on-failure", "--no-tests=error"], timeout_s=280)
    needs_cuda = not (native_build.bin / name).exists()
    if needs_cuda and "No tests were found" in done.out + done.err:
        pytest.skip(f"{name} needs CUDA: left out of the cpu build")
    if "***Skipped" in done.out:
        pytest.skip(f"{name} found no GPU here")
    assert done.ok, done.out + done.err
