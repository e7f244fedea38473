"""The binary says what it was built from: on its command line, over HTTP and in its library."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from native_servers import LlamaServer

from flashnext import proc

pytestmark = pytest.mark.native

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(r"^flashnext: version (\S+), series (\S+), features (\S+)$", re.MULTILINE)


def series() -> list[str]:
    lines = (ROOT / "patches" / "series").read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def stamp_of(bin_dir: Path) -> dict[str, Any]:
    done = proc.run([bin_dir / "llama-server", "--version"])
    assert done.ok
    found = LINE.findall(done.err)
    assert len(found) == 1, done.err
    version, series_hash, features = found[0]
    return {"version": version, "series_hash": series_hash, "features": features.split(",")}


def test_version_names_flashnext_beside_upstream(native_build: Any) -> None:
    done = proc.run([native_build.bin / "llama-server", "--version"])
    lines = done.err.splitlines()
    assert [line.split(":")[0].split(" ")[0] for line in lines] == ["version", "built", "flashnext"]
    pin = tomllib.loads((ROOT / "vendor" / "pin.toml").read_text())
    assert pin["upstream_commit"] in lines[0]
    assert done.out == ""


def test_features_are_those_of_the_series_in_order(native_build: Any) -> None:
    assert stamp_of(native_build.bin)["features"] == series()


def test_props_agree_with_the_command_line(
    native_build: Any, llama_server: Callable[..., LlamaServer]
) -> None:
    props = llama_server().get("/props")
    assert props["flashnext"] == stamp_of(native_build.bin)
    assert props["build_info"].startswith("b")
    assert "flashnext" not in props["build_info"]


def test_the_library_says_the_same(native_build: Any) -> None:
    """Read in another process: the library stays loaded for good, and other tests may load another build."""
    code = (
        "import ctypes, sys; lib = ctypes.CDLL(sys.argv[1]); f = lib.fn_build_stamp_json;"
        "f.restype = ctypes.c_char_p; print(f().decode())"
    )
    done = proc.run([sys.executable, "-c", code, native_build.bin / "libllama.so"])
    assert done.ok, done.err
    assert json.loads(done.out) == stamp_of(native_build.bin)


def test_bench_reports_upstream_untouched(native_build: Any, tiny_model: Path) -> None:
    argv = [native_build.bin / "llama-bench", "-m", tiny_model, "-p", "4", "-n", "0", "-r", "1", "-t", "1"]
    done = proc.run([*argv, "-o", "json"])
    assert done.ok, done.err
    (result,) = json.loads(done.out)
    pin = tomllib.loads((ROOT / "vendor" / "pin.toml").read_text())
    assert result["build_commit"] == pin["upstream_commit"]
    assert "flashnext" not in done.out.replace(str(tiny_model), "").replace("flashnext-tiny", "")
