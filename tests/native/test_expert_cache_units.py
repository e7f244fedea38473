"""The cache's own code under the thread sanitizer: the sources without ggml, and their unit tests."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

FEATURES = Path(__file__).parents[2] / "patches"

CASES = {
    "test-fn-expert-lru": ("expert-cache", ["fn-expert-lru"]),
    "test-fn-expert-core": ("expert-cache", ["fn-expert-core", "fn-expert-lru"]),
    "test-fn-task-pool": ("expert-cache", ["fn-task-pool"]),
    "test-fn-host-read": ("host-experts", ["fn-host-read"]),
}
# a runtime that finds no room for its shadow memory says this and nothing about the code
NO_ROOM = "unexpected memory mapping"


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_data_race(name: str, tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None, "the thread sanitizer needs a C++ compiler"
    feature, sources = CASES[name]
    folder = FEATURES / feature
    argv = [compiler, "-std=c++17", "-O1", "-g", "-fsanitize=thread", "-pthread", f"-I{folder / 'src'}"]
    argv += [str(folder / "tests" / f"{name}.cpp"), *(str(folder / "src" / f"{s}.cpp") for s in sources)]
    subprocess.run([*argv, "-o", str(tmp_path / name)], check=True)
    run = [str(tmp_path / name)]
    if shutil.which("setarch"):  # address randomisation with many bits leaves no room for the shadow memory
        run = ["setarch", "-R", *run]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert NO_ROOM not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr
    assert "WARNING: ThreadSanitizer" not in done.stderr, done.stderr
