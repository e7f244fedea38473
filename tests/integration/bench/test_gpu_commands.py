"""The commands of a run on a real card as they are given there: builds from elsewhere, a limit, two calls.

llama-server, the driver and nvidia-smi are fakes; everything between them is the product.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashnext.bench import samples as files
from flashnext.bench.matching import halves
from flashnext.model.synth import SynthRequest, synthesise

FAKES = Path(__file__).parents[2] / "fakes"
STAMP = "flashnext: version 0.1.0, series " + "5e" * 32 + ", features "
FEATURES = "build-stamp,host-experts,expert-cache,mtp-qwen4exp,topk,tiled-qsa,phase-prefill"
GIB = 2**30


class Machine:
    """A card's machine that has nothing of ours but what is carried to it."""

    def __init__(self, root: Path, tools: Path) -> None:
        self.root, self.tools = root, tools
        root.mkdir()
        self.env = {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": str(tools),
            "HOME": str(root),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            **{f"XDG_{name}_HOME": str(root / name.lower()) for name in ("DATA", "CACHE", "STATE", "CONFIG")},
        }

    def __call__(self, *words: str, code: int = 0) -> str:
        argv = [sys.executable, "-m", "flashnext", *words]
        done = subprocess.run(argv, env=self.env, cwd=self.root, capture_output=True, text=True, timeout=200)
        assert done.returncode == code, done.stderr[-3000:]
        return done.stdout

    def build(self, folder: Path, *more: str) -> str:
        return str(json.loads(self("build", "--import", str(folder), "--json", *more))["key"])


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Binaries with and without features, a driver, nvidia-smi, and a small model in place of a large one."""
    root = tmp_path_factory.mktemp("tools")
    compiler = shutil.which("cc")
    assert compiler is not None, "the tests need a C compiler"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", root / "libcuda.so.1", FAKES / "libcuda.c"], check=True
    )
    smi = root / "nvidia-smi"
    smi.write_text(
        '#!/bin/sh\ncase "$1" in\n'
        '--query-gpu=memory*) echo "1024, 45, 1410, 1593, 71.26, 5, 16" ;;\n'
        '--query-gpu=*) echo "0, GPU-1, Fake A, 9.0, 81920, 580.1" ;;\n'
        '*) echo "| NVIDIA-SMI 580.1  Driver Version: 580.1  CUDA Version: 13.0 |" ;;\nesac\n'
    )
    smi.chmod(0o755)
    for name, stamp, speeds in (
        ("patched", STAMP + FEATURES, {"prefill_tps": 3000.0, "decode_tps": 100.0}),
        ("vanilla", "", {"prefill_tps": 300.0, "decode_tps": 50.0}),
    ):
        folder = root / name
        folder.mkdir()
        config = folder / "speeds.json"
        config.write_text(json.dumps({**speeds, "noise": 0.003}))
        server = folder / "llama-server"
        server.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && echo "{stamp}" && exit 0\n'
            f'exec {sys.executable} {FAKES / "bench_server.py"} {config} "$@"\n'
        )
        server.chmod(0o755)
        (folder / "libggml-cuda.so.0").write_bytes(b"")
    synthesise(
        SynthRequest(kind="tiny", out=root / "model.gguf", mtp="shared"), lambda n: None, lambda n: None
    )
    return root


def command(machine: Machine, *builds: str, out: Path) -> list[str]:
    arms = [word for entry in builds for word in ("--arm", entry.partition("=")[0], "--build", entry)]
    head = next(machine.tools.glob("mtp-*.gguf"))
    return [
        "--profile=bench-1gpu", *arms, "--vram-limit=13.5GiB", f"--model={machine.tools / 'model.gguf'}",
        f"--head={head}", f"--out={out}", "--start-limit=60",
    ]  # fmt: skip


def test_a_run_over_two_machines(tmp_path: Path, tools: Path) -> None:
    first, second = Machine(tmp_path / "first", tools), Machine(tmp_path / "second", tools)
    key = first.build(tools / "patched")
    out = tmp_path / "work"
    words = ["all", *command(first, f"control={key}", f"candidate={key}", out=out)]
    plan = json.loads(first("bench", *words, "--plan", "--json"))
    assert [s["id"] for s in plan["scenarios"]] == ["decode", "logits", "prefill", "transition"]
    assert not out.exists(), "planning writes nothing"
    first("bench", *words, "--max-minutes=0", code=10)
    carried = tmp_path / "carried"
    carried.mkdir()
    # another machine is another boot: the samples alone are brought there
    text = (
        (out / files.NAME)
        .read_text()
        .replace(Path("/proc/sys/kernel/random/boot_id").read_text().strip(), "x")
    )
    (carried / files.NAME).write_text(text)
    assert second.build(tools / "patched") == key
    words = ["all", *command(second, f"control={key}", f"candidate={key}", out=carried)]
    said = json.loads(second("bench", *words, "--json", code=9))  # equal speeds: the gates of the prompt fail
    outcomes = {g["id"]: g["outcome"] for g in said["gates"]}
    assert outcomes["prefill-8k [8192]"] == "failed" and outcomes["processes"] == "passed"
    assert outcomes["decode-pooled [pooled]"] in ("passed", "failed")
    check(files.read(carried / files.NAME), key)
    report = (carried / "report.md").read_text()
    assert "2 sittings" in report and "| link.together_bytes_per_s |" in report


def check(samples: files.Samples, key: str) -> None:
    assert len(samples.processes) == 8 and len(set(samples.sitting.values())) == 2
    assert len(list(halves(samples, "control", "candidate"))) == 4
    for process in samples.processes:
        assert [h["left_bytes"] for h in process.facts["held"]] == [int(13.5 * GIB)] * 2
        assert (process.facts["build"]["key"], process.facts["build"]["series_hash"]) == (key, "5e" * 32)
        assert process.facts["devices"][0]["pcie_width"] == 16
        assert "--device" in process.argv and "CUDA0" in process.argv
        end = samples.ends[process.process]
        transitions = 15 if process.arm == "candidate" else 0  # all 14 prompts and the warm-up
        assert (end.begins, end.ends, end.problems) == (transitions, transitions, ())


def test_arms_of_two_builds_and_one_without_a_limit(tmp_path: Path, tools: Path) -> None:
    machine = Machine(tmp_path / "machine", tools)
    key, plain = machine.build(tools / "patched"), machine.build(tools / "vanilla", "--vanilla")
    out = tmp_path / "work"
    words = command(machine, f"vanilla={plain}", f"control={key}", f"resident={key}", out=out)
    machine("bench", "prefill", *words, "--settings=bench-1gpu-vanilla", "--processes=2")
    found: dict[str, Any] = {p.arm: p for p in files.read(out / files.NAME).processes}
    assert found["vanilla"].facts["build"]["series_hash"] == "vanilla"
    assert not [w for w in found["vanilla"].argv if "expert-cache" in w or "CUDA_Host" in w]
    assert len(found["control"].facts["held"]) == 2 and found["resident"].facts["held"] == []
    assert not [w for w in found["resident"].argv if "_exps" in w]
    ratios = json.loads((out / "result.json").read_text())["ratios"]
    ratio = {(r["candidate"], r["control"]): r["ratio"] for r in ratios if r["metric"] == "prefill_tps"}
    assert ratio["control", "vanilla"] == pytest.approx(10, rel=0.05)
