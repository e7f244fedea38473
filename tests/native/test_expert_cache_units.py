"""Our own threads under the thread sanitizer: sources without ggml, by their unit tests.

Lean prefill's copy thread as well: with ggml's libraries as they are built, whose copies of memory it sees.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import NativeBuild

FEATURES = Path(__file__).parents[2] / "patches"

CASES = {
    "test-fn-expert-lru": ("expert-cache", ["fn-expert-lru"]),
    "test-fn-expert-core": ("expert-cache", ["fn-expert-core", "fn-expert-lru"]),
    "test-fn-task-pool": ("expert-cache", ["fn-task-pool"]),
    "test-fn-host-read": ("host-experts", ["fn-host-read"]),
    "test-fn-lean-ring": ("lean-prefill", ["fn-lean-ring"]),
}
# a runtime that finds no room for its shadow memory says this and nothing about the code
NO_ROOM = "unexpected memory mapping"


def assert_no_race(feature: str, name: str, sources: list[str], folder: Path, *options: str) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None, "the thread sanitizer needs a C++ compiler"
    home = FEATURES / feature
    argv = [compiler, "-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread", f"-I{home / 'src'}"]
    argv += [str(home / "tests" / f"{name}.cpp"), *(str(home / "src" / f"{s}.cpp") for s in sources)]
    subprocess.run([*argv, *options, "-o", str(folder / name)], check=True)
    run = [str(folder / name)]
    if shutil.which("setarch"):  # address randomisation with many bits leaves no room for the shadow memory
        run = ["setarch", "-R", *run]
    done = subprocess.run(run, cwd=folder, capture_output=True, text=True, timeout=250, check=False)
    assert NO_ROOM not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr
    assert "WARNING: ThreadSanitizer" not in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_data_race(name: str, tmp_path: Path) -> None:
    feature, sources = CASES[name]
    assert_no_race(feature, name, sources, tmp_path)


@pytest.mark.slow
@pytest.mark.native
def test_no_data_race_in_lean_prefills_copy_thread(native_build: NativeBuild, tmp_path: Path) -> None:
    if native_build.objects is None:
        pytest.skip("FLASHNEXT_TEST_BIN: no headers beside the libraries")
    headers = native_build.objects.parent / "tree" / "ggml" / "include"
    libraries = [f"-L{native_build.bin}", f"-Wl,-rpath,{native_build.bin}", "-lggml", "-lggml-base"]
    options = [f"-I{headers}", *libraries, "-Wl,--allow-shlib-undefined"]
    assert_no_race(
        "lean-prefill", "test-fn-lean-stage", ["fn-lean-ring", "fn-lean-stage"], tmp_path, *options
    )
