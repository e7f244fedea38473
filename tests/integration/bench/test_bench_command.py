"""`flashnext bench` from the outside: plan, run, exit codes, a service in the way."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from flashnext.bench.running import only_bench
from flashnext.bench.samples import read
from flashnext.proc import wait_until

FAKE = Path(__file__).parents[2] / "fakes" / "bench_server.py"


class Shell:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(root),
            "XDG_STATE_HOME": str(root / "state"),
            "XDG_DATA_HOME": str(root / "data"),
            "XDG_CACHE_HOME": str(root / "cache"),
        }

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "flashnext", "bench", *words]
        return subprocess.run(argv, env=self.env, cwd=self.root, capture_output=True, text=True, timeout=120)

    def arm(self, name: str, **config: Any) -> str:
        path = self.root / f"{name}.json"
        path.write_text(json.dumps({"noise": 0.002, "state": str(self.root), **config}))
        return f"--server-command={name}={sys.executable} {FAKE} {path} {{port}}"

    def gates(self, *entries: dict[str, Any]) -> str:
        path = self.root / "gates.yaml"
        path.write_text(json.dumps({"profiles": {"default": entries}}))
        return f"--gates={path}"


@pytest.fixture
def bench(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


DECODE = {"kind": "ratio", "id": "decode", "scenario": "decode", "metric": "decode_tps", "cells": "each"}


def test_the_plan_starts_nothing(bench: Shell) -> None:
    done = bench("all", "--profile", "demo", "--plan")
    assert done.returncode == 0, done.stderr
    assert "decode: Writing after a prompt" in done.stdout
    assert "gate processes (checks)" in done.stdout
    assert not (bench.root / "state").exists(), "planning writes nothing"
    data = json.loads(bench("decode", "--plan", "--json").stdout)
    assert [s["id"] for s in data["scenarios"]] == ["decode"]


def test_exit_codes_of_a_pass_a_failure_and_too_little_data(bench: Shell) -> None:
    gates = bench.gates({**DECODE, "at_least": 0.97}, {"kind": "checks", "id": "processes"})
    slow = bench("decode", bench.arm("control"), bench.arm("candidate", decode_tps=90), gates, "--out=slow")
    assert slow.returncode == 9, slow.stderr
    assert "error[gate-failed]" in slow.stderr and "decode [256/s0]" in slow.stderr
    few = bench("decode", bench.arm("control"), bench.arm("candidate"), gates, "--out=few", "--processes=2")
    assert few.returncode == 10, few.stderr
    assert "error[inconclusive]" in few.stderr
    same = bench("decode", bench.arm("control"), bench.arm("candidate"), gates, "--out=same", "--json")
    assert same.returncode == 0, same.stderr
    assert json.loads(same.stdout)["outcome"] == "passed"
    report = (bench.root / "same" / "report.md").read_text()
    assert "no difference" in report and "| host.cpu |" in report
    more = bench("decode", bench.arm("control"), bench.arm("candidate"), gates, "--out=same")
    assert more.returncode == 0 and "every process of this run has run before" in more.stderr
    again = bench("report", "same")
    assert again.returncode == 0 and again.stdout.strip().endswith("report.html")


def test_a_time_limit_is_inconclusive_and_the_same_command_goes_on(bench: Shell) -> None:
    words = ["decode", bench.arm("control"), bench.arm("candidate"), "--out=out", "--processes=2"]
    gates = bench.gates({"kind": "checks", "id": "processes"})
    first = bench(*words, gates, "--max-minutes=0")
    assert first.returncode == 10 and "goes on where it stopped" in first.stderr
    second = bench(*words, gates)
    assert second.returncode == 0, second.stderr


ENDS = [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]


@pytest.mark.parametrize(("number", "code"), ENDS)
def test_a_run_that_is_ended_reports_what_was_finished(bench: Shell, number: int, code: int) -> None:
    words = ["decode", bench.arm("control"), bench.arm("candidate"), "--out=out", "--processes=8"]
    gates = bench.gates({"kind": "checks", "id": "processes"})
    argv = [sys.executable, "-m", "flashnext", "bench", *words, gates]
    child = subprocess.Popen(argv, env=bench.env, cwd=bench.root, stderr=subprocess.PIPE, text=True)
    samples = bench.root / "out" / "samples.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (samples.exists() and samples.read_text().count('"end"') >= 2):
        time.sleep(0.02)
    child.send_signal(number)
    _, said = child.communicate(timeout=60)
    assert child.returncode == code, said
    assert re.search(r"ended by SIG\w+: \d+ of 16 processes have run; the same command goes on", said), said
    result = json.loads((bench.root / "out" / "result.json").read_text())
    assert 2 <= sum(c["processes"] for c in result["checks"]) < 16
    pids = [int(line.split()[1]) for line in (bench.root / "launches").read_text().splitlines()]

    def running() -> list[int]:
        there = [p for p in psutil.process_iter(["status"]) if p.pid in pids]
        return [p.pid for p in there if p.info["status"] != "zombie"]

    # the kernel ends the last one when its parent is gone
    assert wait_until(lambda: not running(), timeout_s=5), running()


def test_another_server_in_the_same_folder_is_refused(bench: Shell) -> None:
    words = ["decode", "--out=out", "--processes=2", bench.gates({"kind": "checks", "id": "processes"})]
    bench(*words, bench.arm("control"), "--max-minutes=0")
    other = bench.arm("control") + " --another"
    again = bench(*words, other)
    assert again.returncode == 2 and "a run of other arms" in again.stderr and "--another" in again.stderr


def test_a_closed_terminal_ends_a_run_in_order(bench: Shell) -> None:
    words = ["decode", bench.arm("control"), bench.arm("candidate"), "--out=out", "--processes=8"]
    samples = bench.root / "out" / "samples.jsonl"
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "flashnext", "bench", *words],
        env=bench.env, cwd=bench.root, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(theirs)
    assert wait_until(lambda: samples.exists() and samples.read_text().count('"end"') >= 2, timeout_s=60)
    os.close(ours)
    assert child.wait(60) == 129
    assert (bench.root / "out" / "report.html").exists()


def test_nohup_outlives_its_terminal(bench: Shell) -> None:
    words = ["decode", bench.arm("control"), bench.arm("candidate"), "--out=out", "--processes=2"]
    gates = bench.gates({"kind": "checks", "id": "processes"})
    argv = ["nohup", sys.executable, "-m", "flashnext", "bench", *words, gates]
    samples = bench.root / "out" / "samples.jsonl"
    with (bench.root / "said").open("w") as said:
        child = subprocess.Popen(argv, env=bench.env, cwd=bench.root, stdout=said, stderr=said)
    assert wait_until(lambda: samples.exists() and '"end"' in samples.read_text(), timeout_s=60)
    child.send_signal(signal.SIGHUP)
    assert child.wait(60) == 0, (bench.root / "said").read_text()


def test_a_disk_that_becomes_full_in_mid_run(bench: Shell) -> None:
    words = ["decode", bench.arm("control"), bench.arm("candidate"), "--out=out", "--processes=2"]
    words.append(bench.gates({"kind": "checks", "id": "processes"}))
    argv = [sys.executable, "-m", "flashnext", "bench", *words]
    full = subprocess.run(
        ["sh", "-c", 'ulimit -f 8; exec "$@"', "sh", *argv],
        env=bench.env, cwd=bench.root, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert full.returncode == 4 and "error[state-not-writable]" in full.stderr, full.stderr
    file = bench.root / "out" / "samples.jsonl"
    assert not file.read_text().endswith("\n"), "the last row was cut"
    again = bench(*words)
    assert again.returncode == 0, again.stderr
    found = read(file)
    assert found.torn == 1 and [p.index for p in found.processes] == [0, 1, 2, 3]
    assert len({r.item + r.process for r in found.requests}) == len(found.requests)


def test_two_benches_do_not_measure_each_other(bench: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", bench.env["XDG_STATE_HOME"])
    with only_bench():
        done = bench("decode", bench.arm("control"), "--out=out", "--processes=2", "--stop-service")
    assert done.returncode == 11 and "another bench is running" in done.stderr, done.stderr


def test_a_live_service_is_in_the_way(bench: Shell) -> None:
    record = bench.root / "state/flashnext/serve/8080/state.json"
    record.parent.mkdir(parents=True)
    me = {"name": "flashnext", "pid": os.getpid(), "started": psutil.Process().create_time()}
    record.write_text(
        json.dumps(
            {
                "profile": "demo", "kind": "demo", "profile_file": "x", "port": 8080, "url": "http://x",
                "state": "ready", "reason": "", "started": "2026-01-01T00:00:00Z", "supervisor": me,
            }
        )
    )  # fmt: skip
    done = bench("decode", bench.arm("control"), "--out=out", "--processes=2")
    assert done.returncode == 11
    assert "error[gpu-busy]" in done.stderr and str(os.getpid()) in done.stderr


def test_usage_errors_come_before_anything_starts(bench: Shell) -> None:
    assert bench("decode", "--processes=3", bench.arm("control")).returncode == 2
    assert bench("decode", "--vram-limit=lots").returncode == 2
    assert bench("decode", "--arm=fastest").returncode == 2
    assert bench("decode", "--build=abc").returncode == 2
    nosuch = bench("decode", "--settings=nosuch", bench.arm("control"))
    assert nosuch.returncode == 2 and "bench-1gpu-vanilla, default, demo" in nosuch.stderr
    assert bench("decode", "--start-limit=-1").returncode == 2
    both = bench("decode", bench.arm("control"), "--arm=candidate")
    assert both.returncode == 2 and "does not go with --arm" in both.stderr
    nothing = bench("quality", "--settings=bench-1gpu", bench.arm("control"))
    assert nothing.returncode == 2 and "nothing to measure" in nothing.stderr
    assert not list(bench.root.rglob("samples.jsonl"))
