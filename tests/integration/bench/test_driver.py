"""The driver against servers with known speeds and mistakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flashnext.bench import report, result, running, servers
from flashnext.bench import samples as files
from flashnext.bench.arms import from_commands
from flashnext.bench.driver import Options, Progress
from flashnext.bench.gates import Gates, Outcome
from flashnext.bench.plan import Plan, make_plan
from flashnext.bench.samples import Samples
from flashnext.bench.scenarios import Pace, Scenario
from flashnext.bench.stats import Verdict
from flashnext.errors import ArmCheckFailedError, ArmServerFailedError, LockedError, SamplesMismatchError

FAKE = Path(__file__).parents[2] / "fakes" / "bench_server.py"
CHECKS = {"kind": "checks", "id": "processes"}


def scenario(name: str, kind: str, cells: list[dict[str, int]], **more: Any) -> Scenario:
    settings = {"processes": 4, "cells": cells, "warm_up": more.pop("warm_up", 1)}
    settings |= {"duration_s": more.pop("duration_s")} if "duration_s" in more else {}
    return Scenario.model_validate(
        {"id": name, "title": name, "kind": kind, "settings": {"default": settings}, **more}
    )


DECODE = scenario("decode", "speed", [{"depth": 128, "generate": 64, "requests": 2}])


class Bench:
    """A folder, two arms with their configurations, and the plan between them."""

    def __init__(self, root: Path) -> None:
        self.root, self.out = root, root / "out"
        self.common: dict[str, Any] = {"state": str(root), "noise": 0.004}
        self.config: dict[str, dict[str, Any]] = {"control": {}, "candidate": {}}
        self.prefix: dict[str, str] = {}
        self.gates = Gates.model_validate({"gates": [CHECKS]})
        self.progress: list[Progress] = []

    def commands(self) -> list[str]:
        found = []
        for arm, config in self.config.items():
            path = self.root / f"{arm}.json"
            path.write_text(json.dumps({**self.common, **config}))
            found.append(f"{arm}={self.prefix.get(arm, '')} {sys.executable} {FAKE} {path} {{port}}")
        return found

    def plan(self, *scenarios: Scenario, processes: int = 4, seed: int = 1) -> Plan:
        pace = Pace(start_s=0.2, prefill_tps=1e6, decode_tps=1e4)
        return make_plan(
            scenarios, profile="demo", arms=tuple(self.config), seed=seed, pace=pace, processes=processes
        )

    def run(self, *scenarios: Scenario, **more: Any) -> bool:
        options = Options(start_limit_s=20, watch_memory=False, on_progress=self.progress.append)
        options.max_s = more.pop("max_s", None)
        with running.folder_lock(self.out):
            return running.run(
                self.out,
                self.plan(*scenarios, **more),
                self.gates,
                from_commands(self.commands()).arms,
                command=["flashnext", "bench"],
                facts={},
                options=options,
            )

    def samples(self) -> Samples:
        return files.read(files.file_in(self.out))

    def launches(self) -> Counter[str]:
        return Counter(line.split()[0] for line in (self.root / "launches").read_text().splitlines())


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(servers, "QUIET_S", 0.02)  # the fake writes its log at once
    return Bench(tmp_path)


def test_a_planted_regression_of_four_percent_under_a_planted_drift(bench: Bench) -> None:
    bench.common |= {"drift": -0.01}
    bench.config["candidate"] = {"decode_tps": 96.0}
    gate = {"kind": "ratio", "id": "decode", "scenario": "decode", "metric": "decode_tps", "cells": "each"}
    bench.gates = Gates.model_validate({"gates": [CHECKS, {**gate, "at_least": 0.97}]})
    assert bench.run(DECODE, processes=6)
    found = report.write(bench.out)
    row = next(r for r in found.result.ratios if r.metric == "decode_tps")
    assert row.verdict == Verdict.WORSE
    assert row.ratio == pytest.approx(0.96, abs=0.01)
    assert {g.id: g.outcome for g in found.gates} == {
        "processes": Outcome.PASSED,
        "decode [128]": Outcome.FAILED,
    }
    assert [p.arm for p in bench.samples().processes] == [
        s.arm for s in bench.plan(DECODE, processes=6).sessions
    ]


def test_every_process_is_fresh_and_prompts_have_exactly_their_depth(bench: Bench) -> None:
    bench.run(DECODE, processes=2)
    samples = bench.samples()
    assert len({p.pid for p in samples.processes}) == 4
    assert {r.timings["prompt_n"] for r in samples.requests} == {128}
    assert bench.launches() == {"control": 2, "candidate": 2}
    row = result.compute(samples).identity[0]
    assert row.equal == row.items == 4
    assert {p.total for p in bench.progress} == {4}
    assert [p.done for p in bench.progress] == sorted(p.done for p in bench.progress)
    assert bench.progress[0].left_s > bench.progress[-1].left_s > 0


def test_transitions_are_counted_against_prompts(bench: Bench) -> None:
    bench.config["candidate"] = {"min_tokens": 100}
    bench.prefix["candidate"] = "FN_BENCH_MIN_TOKENS=100"
    bench.run(DECODE, scenario("short", "speed", [{"depth": 80}]), processes=2)
    found = report.write(bench.out)
    assert found.outcome == Outcome.PASSED
    candidate = next(c for c in found.result.checks if c.arm == "candidate")
    assert (candidate.begins, candidate.ends, candidate.prompts) == (
        6,
        6,
        8,
    )  # per process two, and the warm-up
    row = found.result.transitions[0]
    assert (row.median_ms, row.transitions) == (30.0, 6)
    assert row.parts_ms == {"begin.release": 12.5, "begin.reserve": 7.5, "end.restore": 6.0}


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"lose_end": True}, "3 begins, 0 ends"),
        ({"min_tokens": 10_000}, "0 begins, 3 prompts"),
        ({"line": "CUDA error: out of memory"}, "device memory ran out"),
        ({"line": 'fn:phase:failed {"check": "generation"}'}, "generation"),
        ({"line": "GGML_ASSERT(x) failed"}, "assertion"),
    ],
)
def test_a_process_that_is_not_in_order_fails_the_checks(
    bench: Bench, fault: dict[str, Any], words: str
) -> None:
    bench.config["candidate"] = {"min_tokens": 100, **fault}
    bench.prefix["candidate"] = "FN_BENCH_MIN_TOKENS=100"
    bench.run(DECODE, processes=2)
    found = report.write(bench.out)
    assert found.outcome == Outcome.FAILED
    assert words in next(g for g in found.gates if g.id == "processes").text


def test_an_arm_with_another_environment_is_never_recorded(bench: Bench) -> None:
    bench.prefix["candidate"] = "LLAMA_PHASE_PREFILL_UBATCH=2048"
    bench.config["candidate"] = {}
    arms = from_commands(bench.commands()).arms
    assert arms[1].environment == {"LLAMA_PHASE_PREFILL_UBATCH": "2048"}
    bench.run(DECODE, processes=2)
    seen = {p.arm: p.environment for p in bench.samples().processes}
    assert seen["candidate"]["LLAMA_PHASE_PREFILL_UBATCH"] == "2048"
    assert "LLAMA_PHASE_PREFILL_UBATCH" not in seen["control"]
    found = {c.arm: (c.begins, c.prompts, c.problems) for c in result.compute(bench.samples()).checks}
    assert found == {"control": (0, 6, []), "candidate": (6, 6, [])}
    # the command sets what the arm does not declare: the process's own environment tells
    bench.out = bench.root / "other"
    bench.prefix["candidate"] = "env LLAMA_ARG_UBATCH=4096"
    with pytest.raises(ArmCheckFailedError) as caught:
        bench.run(DECODE, processes=2)
    assert "LLAMA_ARG_UBATCH" in caught.value.context[0]
    assert not any(r.process.startswith("x") or r.error for r in bench.samples().requests)


def test_a_server_that_dies_in_mid_run_is_repeated_by_the_next_call(bench: Bench) -> None:
    bench.config["candidate"] = {"die_at": 3}
    with pytest.raises(ArmServerFailedError, match="candidate"):
        bench.run(DECODE, processes=2)
    assert bench.samples().unfinished == 1
    bench.config["candidate"] = {}
    assert bench.run(DECODE, processes=2)
    samples = bench.samples()
    assert len(samples.processes) == 4
    assert Counter(r.process for r in samples.requests) == {p.process: 2 for p in samples.processes}
    assert len(samples.headers) == 2


def test_a_server_that_never_starts_says_so_with_its_log(bench: Bench) -> None:
    commands = [f"control={sys.executable} -c 'print(\"no such model\"); exit(1)' {{port}}"]
    plan = make_plan(
        [DECODE], profile="demo", arms=("control",), seed=1, pace=Pace(start_s=1, prefill_tps=1, decode_tps=1)
    )
    with pytest.raises(ArmServerFailedError) as caught:
        running.run(
            bench.out, plan, bench.gates, from_commands(commands).arms, command=[], facts={},
            options=Options(start_limit_s=10),
        )  # fmt: skip
    assert "no such model" in caught.value.context


def alive(pid: int) -> bool:
    """A zombie that its new parent has not reaped yet is not alive."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {folder!r})
import test_driver as t
bench = t.Bench(Path({root!r}))
bench.run(t.DECODE, processes=2)
"""


def test_a_killed_run_resumes_without_double_counting(bench: Bench) -> None:
    code = KILLED.format(folder=str(Path(__file__).parent), root=str(bench.root))
    child = subprocess.Popen([sys.executable, "-c", code])
    path = files.file_in(bench.out)
    deadline = time.monotonic() + 30
    # in the middle of the third process: after its first request
    while time.monotonic() < deadline and not (path.exists() and path.read_text().count('"request"') >= 5):
        time.sleep(0.005)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    before = bench.samples()
    assert 2 <= len(before.processes) < 4
    assert bench.run(DECODE, processes=2)
    after = bench.samples()
    assert sorted(p.index for p in after.processes) == list(range(4))
    assert len(after.requests) == 8
    assert [p.process for p in after.processes][: len(before.processes)] == [
        p.process for p in before.processes
    ]
    pids = [int(line.split()[1]) for line in (bench.root / "launches").read_text().splitlines()]
    assert [pid for pid in pids if alive(pid)] == [], "a server outlived its bench"


def test_a_finished_run_does_nothing_more(bench: Bench) -> None:
    bench.run(DECODE, processes=2)
    size = files.file_in(bench.out).stat().st_size
    assert bench.run(DECODE, processes=2)
    assert files.file_in(bench.out).stat().st_size == size


def test_another_plan_in_the_same_folder_is_refused(bench: Bench) -> None:
    bench.run(DECODE, processes=2)
    with pytest.raises(SamplesMismatchError):
        bench.run(DECODE, processes=2, seed=2)
    bench.gates = Gates(gates=())
    with pytest.raises(SamplesMismatchError) as caught:
        bench.run(DECODE, processes=2)
    assert caught.value.context == ("different: gates",)


def test_one_bench_per_folder(bench: Bench) -> None:
    with running.folder_lock(bench.out), pytest.raises(LockedError):
        bench.run(DECODE)


def test_a_time_limit_ends_between_half_blocks_and_the_rest_follows(bench: Bench) -> None:
    assert bench.run(DECODE, max_s=0.0, processes=2) is False
    first = bench.samples()
    assert sorted(p.arm for p in first.processes) == ["candidate", "control"]
    assert bench.run(DECODE, processes=2)
    assert len(bench.samples().processes) == 4


def test_the_quality_screen_finds_known_rates(bench: Bench) -> None:
    bench.config["candidate"] = {"error_rate": 0.3}
    screen = scenario("quality", "quality", [{"depth": 1500, "requests": 2, "generate": 32}], warm_up=0)
    bench.gates = Gates.model_validate(
        {"gates": [{"kind": "quality", "id": "quality", "scenario": "quality", "min_answers": 80}]}
    )
    bench.run(screen)
    found = report.write(bench.out)
    row = found.result.quality[0]
    assert (row.n, row.control_right) == (80, 80)
    assert 0.15 < row.lost / row.n < 0.45
    assert row.verdict == Verdict.WORSE
    assert found.outcome == Outcome.FAILED
    prompts = [r.timings["prompt_n"] for r in bench.samples().requests]
    assert max(prompts) <= 1500 and sum(p > 1000 for p in prompts) == 16


def test_equal_arms_pass_the_quality_screen(bench: Bench) -> None:
    screen = scenario("quality", "quality", [{"depth": 1500, "requests": 2, "generate": 32}], warm_up=0)
    bench.run(screen)
    row = result.compute(bench.samples()).quality[0]
    assert (row.lost, row.won, row.verdict) == (0, 0, Verdict.SAME)


def test_log_probabilities(bench: Bench) -> None:
    bench.config["candidate"] = {"shift": 0.05}
    bench.run(scenario("logits", "logits", [{"depth": 64}], top=9, warm_up=0), processes=2)
    row = result.compute(bench.samples()).logits[0]
    assert row.max_abs == pytest.approx(0.05)
    assert row.mean_abs == pytest.approx(0.05 / 3)
    assert (row.items, row.argmax_equal) == (2, 2)


def test_log_probabilities_over_the_whole_vocabulary(bench: Bench) -> None:
    bench.config |= {"candidate": {"shift": 0.05}, "ubatch:2048": {"shift": 0.02}}
    bench.run(scenario("logits", "logits", [{"depth": 64}], top=9, spread=600, warm_up=0), processes=2)
    rows = {(r.control, r.candidate): r for r in result.compute(bench.samples()).logits}
    row = rows["control", "candidate"]
    assert row.vocabulary == 30_000 and 500 < row.tokens / row.items < 700
    assert (row.max_abs, row.mean_abs) == (pytest.approx(0.05), pytest.approx(0.05 / 3, rel=0.2))
    assert rows["control", "ubatch:2048"].max_abs == pytest.approx(0.02)
    assert rows["ubatch:2048", "candidate"].max_abs == pytest.approx(0.03)
    assert "a spread over 30,000" in (report.write(bench.out), (bench.out / "report.md").read_text())[1]


def test_the_soak_mixes_requests_in_one_process(bench: Bench) -> None:
    soak = scenario("soak", "soak", [{"depth": 96}], duration_s=1.5, own_process=True)
    bench.run(soak)
    samples = bench.samples()
    kinds = Counter(r.item.split("/")[-2] for r in samples.requests)
    assert set(kinds) >= {"fresh", "follow-up", "edit", "leave"}
    assert len(samples.processes) == 1
    assert not samples.ends[samples.processes[0].process].problems


def test_a_server_that_is_not_ours_is_one_process_however_often_it_is_asked(bench: Bench) -> None:
    commands = bench.commands()
    port = "18999"
    words = commands[0].split("=", 1)[1].replace("{port}", port).split()
    child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and "listening" in child.stdout.readline()
        arms = from_commands([f"control=http://127.0.0.1:{port}", f"candidate=http://127.0.0.1:{port}"]).arms
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            try:
                running.run(
                    bench.out, bench.plan(DECODE), bench.gates, arms, command=[], facts={},
                    options=Options(watch_memory=False),
                )  # fmt: skip
                break
            except ArmServerFailedError:
                time.sleep(0.05)
    finally:
        child.kill()
        child.wait()
    row = next(r for r in result.compute(bench.samples()).ratios if r.metric == "decode_tps")
    assert (row.n, row.verdict) == (1, Verdict.INCONCLUSIVE)


def test_the_times_of_a_prompt_come_from_processes_of_their_own(bench: Bench) -> None:
    """A build that cannot tell them leaves none; its other numbers, and the gates, are as ever."""
    bench.config["vanilla"] = {"no_times": True}
    times = scenario("times", "times", [{"depth": 200}], own_process=True)
    assert bench.run(DECODE, times, processes=2)
    found = report.write(bench.out)
    assert [g.outcome for g in found.gates] == [Outcome.PASSED]
    samples = bench.samples()
    switched = {p.process for p in samples.processes if p.environment.get("FN_PREFILL_TIMES") == "1"}
    assert switched == {r.process for r in samples.requests if r.scenario == "times"}
    assert {r.process for r in samples.requests if r.prefill_times} < switched
    assert {c.scenario for c in found.result.cells} == {"decode"}, "slowed down by the switch: no speed of it"

    rows = found.result.prefill_times
    assert [(r.arm, r.depth, r.prompts) for r in rows] == [("control", 200, 2), ("candidate", 200, 2)]
    for row in rows:
        assert row.kinds_ms["experts"] == pytest.approx(0.6 * row.prompt_ms, rel=0.01)
        assert row.kinds_ms["rest"] == pytest.approx(0.1 * row.prompt_ms, rel=0.05)
        assert sum(row.kinds_ms.values()) == pytest.approx(row.prompt_ms)
    text = (bench.out / "report.md").read_text()
    assert "| control, 200 tokens: ms |" in text and "vanilla, 200 tokens" not in text
    assert "(60%)" in text and "plots/time-of-a-prompt-by-kind-of-work.svg" in text
    assert "Where a prompt's time goes" in (bench.out / "report.html").read_text()
