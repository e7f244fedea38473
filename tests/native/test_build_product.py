"""A build without --tests has none of the switches that make it fail on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashnext import proc
from flashnext.probe.toolchain import probe_cmake

pytestmark = pytest.mark.native

PHASE = "fn-phase-fault.cpp"
MAIN = """
#include "fn-phase-fault.h"
int main() {
    fn_phase_fault fault;
    return fault.set("begin:1") ? 10 : fault.set("") ? 0 : 11;
}
"""

SWITCHES = """
#include "fn-expert-switch.h"
int main() {
    setenv("FN_EXPERT_CACHE_MERGE", "1", 1);
    return (fn_expert_test_switch_refused() ? 1 : 0) + 10*fn_expert_test_switch("FN_EXPERT_CACHE_MERGE");
}
"""


def test_the_definition_reaches_builds_for_tests_alone(native_build: Any, tmp_path: Path) -> None:
    if native_build.objects is None:
        pytest.skip("FLASHNEXT_TEST_BIN is set: there is no configuration of ours")
    work = native_build.objects.parent
    assert "-DFLASHNEXT_TESTS" in (native_build.objects / "build.ninja").read_text()
    on = (work / "presets.cmake").read_text()
    off = on.replace('set(FLASHNEXT_TESTS "ON" CACHE', 'set(FLASHNEXT_TESTS "OFF" CACHE')
    assert on != off
    (tmp_path / "presets.cmake").write_text(off)
    cmake = probe_cmake()
    assert cmake is not None
    argv = [cmake.path, "-S", work / "tree", "-B", tmp_path / "build", "-G", "Ninja"]
    done = proc.run([*argv, "-C", tmp_path / "presets.cmake"], timeout_s=120)
    assert done.ok, done.out + done.err
    commands = (tmp_path / "build/build.ninja").read_text()
    assert PHASE in commands and "-DFLASHNEXT_TESTS" not in commands


@pytest.mark.parametrize(("definition", "code"), [([], 0), (["-DFLASHNEXT_TESTS"], 10)])
def test_without_the_definition_no_fault_can_be_armed(
    definition: list[str], code: int, native_build: Any, tmp_path: Path
) -> None:
    if native_build.objects is None:
        pytest.skip("FLASHNEXT_TEST_BIN is set: there are no sources of ours")
    source = native_build.objects.parent / "patches/phase-prefill/src"
    (tmp_path / "main.cpp").write_text(MAIN)
    argv = ["c++", "-std=c++17", *definition, f"-I{source}", tmp_path / "main.cpp", source / PHASE]
    done = proc.run([*argv, "-o", tmp_path / "main"], timeout_s=60)
    assert done.ok, done.err
    assert proc.run([tmp_path / "main"]).code == code


@pytest.mark.parametrize(("definition", "code"), [([], 1), (["-DFLASHNEXT_TESTS"], 10)])
def test_without_the_definition_the_cache_refuses_its_test_switches(
    definition: list[str], code: int, native_build: Any, tmp_path: Path
) -> None:
    if native_build.objects is None:
        pytest.skip("FLASHNEXT_TEST_BIN is set: there are no sources of ours")
    source = native_build.objects.parent / "patches/expert-cache/src"
    (tmp_path / "main.cpp").write_text(SWITCHES)
    argv = ["c++", "-std=c++17", *definition, f"-I{source}", tmp_path / "main.cpp", "-o", tmp_path / "main"]
    done = proc.run(argv, timeout_s=60)
    assert done.ok, done.err
    assert proc.run([tmp_path / "main"]).code == code
