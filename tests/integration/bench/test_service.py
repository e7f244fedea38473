"""Arms that `flashnext serve` starts, arms of a build, and a service that is in the way."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serve_home import FakeHome, Running, until

from flashnext.bench import samples as files
from flashnext.builds import Build, file_sha256

SERVER = Path(__file__).parents[2] / "fakes" / "bench_server.py"
FEATURES = ("expert-cache", "mtp-qwen4exp", "phase-prefill")
FLAGS = ("--moe-expert-cache N", "--moe-expert-cache-inserts N")
TRANSACTION = {
    "expert_cache": {"slots": 4},
    "mtp": {"synthetic": True, "depth": 3},
    "phase_prefill": {"min_tokens": 200},
}


class BenchHome(FakeHome):
    """Its llama-server has the bench's known speeds; questions about stamp and flags go to the other fake."""

    def install(self, **changes: Any) -> Build:
        build = super().install(
            features={n: "0" * 64 for n in (*FEATURES, "build-stamp", "fn-vgpu")}, **changes
        )
        config = self.folder / "bench.json"
        config.write_text(json.dumps({"noise": 0.002, "state": str(self.folder)}))
        program = self.root / "data/flashnext/builds" / "fakebuild" / "bin" / "llama-server"
        ask = program.read_text().splitlines()[1]
        more = "".join(f"echo '{flag}  a flag of ours';" for flag in FLAGS)
        program.write_text(
            "#!/bin/sh\n"
            f'case "$1" in --version) {ask};; --help) {ask.removeprefix("exec ")}; {more} exit;; esac\n'
            f'exec {sys.executable} {SERVER} {config} "$@"\n'
        )
        binary = build.binaries["llama-server"].model_copy(
            update={"size_bytes": program.stat().st_size, "sha256": file_sha256(program)}
        )
        changed = build.model_copy(update={"binaries": {**build.binaries, "llama-server": binary}})
        (program.parents[1] / "build.json").write_text(changed.model_dump_json())
        return changed


@pytest.fixture
def home(tmp_path: Path) -> Iterator[BenchHome]:
    made = BenchHome(tmp_path)
    yield made
    made.close()


def bench(home: BenchHome, *words: str) -> Any:
    return home.run("bench", "decode", "--settings=demo", "--processes=2", *words, timeout_s=120)


def test_arms_of_a_profile_and_of_builds(home: BenchHome) -> None:
    out = home.root / "out"
    profile = home.profile(**TRANSACTION)
    done = bench(home, f"--profile={profile}", f"--out={out}")
    assert done.returncode == 0, done.stderr
    samples = files.read(files.file_in(out))
    assert len({p.pid for p in samples.processes}) == 4
    for process in samples.processes:
        end = samples.ends[process.process]
        wanted = 3 if process.arm == "candidate" else 0  # two requests and the warm-up
        assert (end.begins, end.ends, end.problems) == (wanted, wanted, ())
        assert ("LLAMA_PHASE_PREFILL_UBATCH" in process.environment) == (process.arm == "candidate")
        assert process.facts["build"]["key"] == "fakebuild"
        assert process.facts["model"]["expert_bytes"] > 0
        assert "--moe-expert-cache" in process.argv
    report = (out / "report.md").read_text()
    assert "arms.candidate.build.series_hash" in report
    assert "| candidate | 2 | 6 | 30.0 | 30.0 to 30.0 |" in report
    home.nothing_left()
    arms_of_builds(home, profile, home.root / "builds")


def arms_of_builds(home: BenchHome, profile: Path, out: Path) -> None:
    """On the model that the first run has made: without the supervisor nobody makes it."""
    words = ["--arm=vanilla", "--arm=candidate", "--build=vanilla=fakebuild", f"--out={out}"]
    done = bench(home, f"--profile={profile}", *words)
    assert done.returncode == 0, done.stderr
    samples = files.read(files.file_in(out))
    vanilla = next(p for p in samples.processes if p.arm == "vanilla")
    assert vanilla.facts["supervised"] is False
    assert "--moe-expert-cache" not in vanilla.argv
    assert "VGPU0_PORT" not in " ".join(vanilla.argv)
    home.nothing_left()
    unknown = bench(home, f"--profile={profile}", "--build=vanilla=zzz", "--arm=vanilla")
    assert unknown.returncode != 0 and "error[" in unknown.stderr


def test_a_service_is_stopped_for_the_run_and_started_again_however_it_ends(home: BenchHome) -> None:
    running = home.serve()
    before = running.until_state("ready")
    arm = home.root / "arm.json"
    arm.write_text(json.dumps({"die_at": 2}))
    command = f"--server-command=control={sys.executable} {SERVER} {arm} {{port}}"
    refused = bench(home, command, f"--out={home.root / 'out'}")
    assert refused.returncode == 11 and "error[gpu-busy]" in refused.stderr
    assert running.state()["supervisor"] == before["supervisor"]
    failed = bench(home, command, f"--out={home.root / 'out'}", "--stop-service")
    assert failed.returncode == 8, failed.stderr
    assert "stopping the service" in failed.stderr and "again" in failed.stderr
    again = until(lambda: back(running, before), "the service is ready again")
    assert again["profile"] == before["profile"] and again["port"] == before["port"]
    other = bench(home, command, f"--out={home.root / 'out'}", "--stop-service", "--seed=2")
    assert other.returncode == 2 and "another plan" in other.stderr
    assert running.state()["supervisor"] == again["supervisor"], "not stopped for a run that cannot be"


def test_a_running_service_is_measured_by_its_address(home: BenchHome) -> None:
    running, other = home.serve(), home.serve()
    before = running.until_state("ready")
    words = [f"--server-command=control={before['url']}/v1", f"--out={home.root / 'out'}"]
    other.until_state("ready")
    beside = bench(home, *words)
    assert beside.returncode == 11 and f"port {other.port}" in beside.stderr
    assert f"port {running.port}" not in beside.stderr
    other.signal(signal.SIGTERM)
    other.end()
    done = bench(home, *words)
    assert done.returncode == 0, done.stderr
    assert running.state()["supervisor"] == before["supervisor"]


def back(running: Running, before: dict[str, Any]) -> dict[str, Any] | None:
    """The state of the service that took the place of the one before, once it is ready."""
    state = running.state()
    new = state.get("supervisor") != before["supervisor"]
    return state if new and state.get("state") == "ready" else None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("moment", ["stopping the service", "decode 256"])
def test_a_service_comes_back_where_nobody_reads_any_more(
    home: BenchHome, number: signal.Signals, moment: str
) -> None:
    """Ctrl-C ends a `tee` as well, and a terminal that is closed takes no line."""
    running = home.serve()
    before = running.until_state("ready")
    arm = home.root / "arm.json"
    arm.write_text("{}")
    words = ["decode", "--settings=demo", "--processes=8", "--stop-service", f"--out={home.root / 'out'}"]
    command = f"--server-command=control={sys.executable} {SERVER} {arm} {{port}}"
    run = subprocess.Popen(
        [sys.executable, "-m", "flashnext", "bench", *words, command],
        env=home.env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert run.stderr is not None
    assert any(moment in line for line in run.stderr)
    until(lambda: running.state().get("state") != "ready", "the service is told to end")
    run.send_signal(number)
    run.stderr.close()
    assert run.wait(60) == 128 + number
    until(lambda: back(running, before), "the service is ready again")
