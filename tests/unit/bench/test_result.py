"""From samples to verdicts and gates."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import synthetic as made
from matplotlib.figure import Figure

from flashnext.bench import plots, report, result
from flashnext.bench.gates import Gates, Outcome, load_gates, overall
from flashnext.bench.plan import items
from flashnext.bench.result import POOLED, Result
from flashnext.bench.samples import Process, Request, Row, Samples, Writer
from flashnext.bench.stats import Verdict
from flashnext.bench.verdicts import judge

DECODE = {
    "kind": "ratio",
    "id": "decode",
    "scenario": "decode",
    "metric": "decode_tps",
    "cells": "each",
    "at_least": 0.97,
}


def gates(*entries: dict[str, object]) -> Gates:
    return Gates.model_validate({"gates": entries})


def decode_plan(**more: object) -> made.Plan:
    cells = [{"depth": 1024, "requests": 2, "generate": 64}]
    return made.plan(made.scenario("decode", cells=cells, cell_by="depth-and-seed"), **more)  # type: ignore[arg-type]


def outcomes(samples: Samples, *entries: dict[str, object]) -> dict[str, Outcome]:
    found = judge(result.compute(samples), gates(*entries), {"decode", "quality", "logits"})
    return {g.id: g.outcome for g in found}


def ratio(found: Result, metric: str, cell: str) -> result.RatioResult:
    return next(r for r in found.ratios if r.metric == metric and r.cell == cell)


def test_a_planted_regression_of_four_percent_is_found_and_fails_its_gate() -> None:
    samples = made.samples(decode_plan(), effect=0.96)
    found = ratio(result.compute(samples), "decode_tps", POOLED)
    assert found.verdict == Verdict.WORSE
    assert found.ratio == pytest.approx(0.96, abs=0.01)
    assert outcomes(samples, DECODE) == {
        "decode [1024/s0]": Outcome.FAILED,
        "decode [1024/s1]": Outcome.FAILED,
    }


def test_equal_arms_pass_under_a_drifting_machine() -> None:
    samples = made.samples(decode_plan(), drift=-0.01)
    assert ratio(result.compute(samples), "decode_tps", POOLED).verdict == Verdict.SAME
    assert set(outcomes(samples, DECODE).values()) == {Outcome.PASSED}


def test_prefill_ratio_and_time_to_first_token_turn_opposite_ways() -> None:
    found = result.compute(made.samples(decode_plan(), prefill_effect=2.24))
    assert ratio(found, "prefill_tps", POOLED).ratio == pytest.approx(2.24, rel=0.02)
    assert ratio(found, "prefill_tps", POOLED).verdict == Verdict.BETTER
    assert ratio(found, "ttft_ms", POOLED).ratio == pytest.approx(1 / 2.24, rel=0.02)
    assert ratio(found, "ttft_ms", POOLED).verdict == Verdict.BETTER


def test_too_few_processes_are_too_little_data() -> None:
    plan = decode_plan()
    rows = made.rows(plan, effect=0.5)
    few = [r for r in rows if getattr(r, "process", "0.1").split(".")[0] in {"0", "1", "2", "3"}]
    samples = Samples(few)
    assert ratio(result.compute(samples), "decode_tps", POOLED).verdict == Verdict.INCONCLUSIVE
    assert set(outcomes(samples, DECODE).values()) == {Outcome.TOO_LITTLE}


def test_a_noisy_run_is_too_little_data_not_a_pass_and_not_a_failure() -> None:
    samples = made.samples(decode_plan(), noise=0.15, effect=0.96)
    assert set(outcomes(samples, DECODE).values()) == {Outcome.TOO_LITTLE}


def test_requests_of_one_process_are_one_value() -> None:
    found = result.compute(made.samples(decode_plan()))
    cell = next(c for c in found.cells if c.metric == "decode_tps" and c.arm == "control")
    assert cell.processes == len(cell.values) == 6


def test_checks_fail_on_a_problem_and_wait_for_all_processes() -> None:
    plan = decode_plan()
    rows = made.rows(plan)
    checks = {"kind": "checks", "id": "processes"}
    assert outcomes(Samples(rows), checks) == {"processes": Outcome.PASSED}
    assert outcomes(Samples(rows[:-1]), checks) == {"processes": Outcome.TOO_LITTLE}
    bad = made.end("0.1", 2, problems=("begins 2, ends 1",))
    swapped = [bad if getattr(r, "type", "") == "end" and r.process == "0.1" else r for r in rows]
    assert outcomes(Samples(swapped), checks) == {"processes": Outcome.FAILED}


def test_a_request_with_an_error_fails_the_checks_and_is_no_number() -> None:
    plan = decode_plan()
    rows = made.rows(plan)
    at = next(i for i, r in enumerate(rows) if r.type == "request")
    rows[at] = rows[at].model_copy(update={"error": "HTTP 500"})
    samples = Samples(rows)
    assert outcomes(samples, {"kind": "checks", "id": "processes"}) == {"processes": Outcome.FAILED}
    cell = next(c for c in result.compute(samples).cells if c.arm == rows[1].arm)  # type: ignore[union-attr]
    assert cell.processes == 5


def quality_samples(right: dict[str, list[bool]]) -> Samples:
    """One question per document, answered as ``right`` says, by arm and document."""
    plan = made.plan(made.scenario("quality", "quality", cells=[{"depth": 900}]))
    rows: list[made.Row] = [made.header(plan)]
    for session in plan.sessions:
        rows.append(made.process(session))
        for item in items(plan, session):
            correct = right[session.arm][2 * session.block + session.half]
            name = f"{item.item}/ordering-1"
            rows.append(made.request(session, item, 100, 100, named=name, correct=correct))
        rows.append(made.end(f"{session.index}.1", 1))
    return Samples(rows)


@pytest.mark.parametrize(
    ("candidate", "outcome"),
    [
        ([True] * 6, Outcome.PASSED),
        ([False, *[True] * 5], Outcome.PASSED),
        ([False] * 2 + [True] * 4, Outcome.FAILED),
    ],
)
def test_quality_gate_counts_seeds_on_which_a_question_got_worse(
    candidate: list[bool], outcome: Outcome
) -> None:
    samples = quality_samples({"control": [True] * 6, "candidate": candidate})
    gate = {"kind": "quality", "id": "quality", "scenario": "quality", "min_answers": 6}
    assert outcomes(samples, gate) == {"quality": outcome}
    row = result.compute(samples).quality[0]
    assert (row.n, row.lost, row.won) == (6, candidate.count(False), 0)


def test_log_probabilities_are_compared_on_the_tokens_both_listed() -> None:
    plan = made.plan(made.scenario("logits", "logits", top=3))
    rows: list[made.Row] = [made.header(plan)]
    for session in plan.sessions:
        rows.append(made.process(session))
        for item in items(plan, session):
            ours = [(7, -0.1), (8, -2.0), (9, -3.0)]
            theirs = [(7, -0.15), (8, -2.2), (11, -3.0)]
            top = theirs if session.arm == "candidate" else ours
            rows.append(made.request(session, item, 100, 100, top=top))
        rows.append(made.end(f"{session.index}.1", 1))
    row = result.compute(Samples(rows)).logits[0]
    assert row.max_abs == pytest.approx(0.2)
    assert row.mean_abs == pytest.approx(0.125)
    assert (row.items, row.argmax_equal) == (6, 6)
    assert sum(n for _, _, n in row.histogram) == 12


def test_the_verdict_of_gates_overall() -> None:
    def gate(outcome: Outcome) -> report.GateResult:
        return report.GateResult(id="g", outcome=outcome, text="")

    assert overall([gate(Outcome.PASSED), gate(Outcome.TOO_LITTLE), gate(Outcome.FAILED)]) == Outcome.FAILED
    assert overall([gate(Outcome.PASSED), gate(Outcome.TOO_LITTLE)]) == Outcome.TOO_LITTLE
    assert overall([gate(Outcome.PASSED)]) == Outcome.PASSED
    assert overall([]) == Outcome.TOO_LITTLE


@pytest.mark.parametrize(
    "profile",
    [
        "2x3090",
        "demo",
        "bench-1gpu",
        "bench-1gpu-short",
        "bench-1gpu-8k",
        "bench-1gpu-lean",
        "bench-1gpu-depths",
        "bench-1gpu-deep",
        "bench-1gpu-vanilla",
        "anything",
    ],
)
def test_the_shipped_gates_are_valid_and_check_processes(profile: str) -> None:
    assert load_gates(profile).gates[0].kind == "checks"


def test_demo_gates_no_speed() -> None:
    assert not any(g.kind in ("ratio", "transition") for g in load_gates("demo").gates)


def test_a_report_is_rendered_again_from_the_samples_alone(tmp_path: Path) -> None:
    facts = {
        "git": {"commit": "abc", "dirty": False},
        "model": {"expert_bytes": 2**30},
        "link": {"together_bytes_per_s": 1e10},
        "arms": {"control": {"prefill_micro_batch": 512}, "candidate": {"prefill_micro_batch": 2048}},
    }
    cells = [{"depth": 1024, "generate": 64}, {"depth": 8192, "generate": 64}]
    plan = made.plan(made.scenario("prefill", cells=cells), made.scenario("decode"))
    with Writer(tmp_path / "samples.jsonl") as writer:
        for row in made.rows(plan, gates(DECODE), **facts):
            writer.add(row)
    first = report.write(tmp_path)
    assert first.outcome == Outcome.PASSED
    texts = {
        p.name: p.read_text() for p in tmp_path.rglob("*") if p.suffix in {".md", ".html", ".svg", ".json"}
    }
    for path in list(tmp_path.rglob("*")):
        if path.is_file() and path.name != "samples.jsonl":
            path.unlink()
    report.write(tmp_path)
    again = {
        p.name: p.read_text() for p in tmp_path.rglob("*") if p.suffix in {".md", ".html", ".svg", ".json"}
    }
    assert again == texts
    assert "bound: upload once per 2048 tokens" in texts["reading-speed-over-depth.svg"]
    assert "| git.commit | abc |" in texts["report.md"]
    assert texts["report.html"].count("<svg") == 3
    assert json.loads(texts["result.json"])["outcome"] == "passed"


def test_memory_that_was_held_is_not_the_servers(tmp_path: Path) -> None:
    plan = made.plan(made.scenario("prefill"))
    rows: list[Row] = []
    for row in made.rows(plan):
        if isinstance(row, Process):
            row = row.model_copy(update={"facts": {"held": [{"device": 0, "held_bytes": 100 * 2**30}]}})
        if isinstance(row, Request):
            row = row.model_copy(update={"memory": [(0.0, [110 * 2**30, 7 * 2**30])]})
        rows.append(row)
    samples = Samples(rows)
    assert plots._in_use(samples, samples.requests[0]) == [[10 * 2**30], [7 * 2**30]]
    assert "Memory of the devices over a prompt" in plots.all_plots(result.compute(samples), samples)


def test_speeds_that_are_alike_do_not_lie_on_the_edge_of_their_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    found = result.compute(made.samples(made.plan(made.scenario("prefill"))))
    tops: list[float] = []

    def draw(paint: Callable[[Any], None]) -> str:
        axes = Figure().subplots()
        paint(axes)
        tops.append(axes.get_ylim()[1])
        return ""

    monkeypatch.setattr(plots, "draw", draw)
    plots.over_depth(found, "prefill_tps", "prefill")
    assert tops and tops[0] >= 1.03 * max(c.median for c in found.cells if c.metric == "prefill_tps")


def test_another_machine_is_named(tmp_path: Path) -> None:
    plan = decode_plan()
    host = {"cpu": "one", "cores": 8}
    rows = made.rows(plan, host=host, gpu={"driver": "580"})
    rows.append(made.header(plan, host={**host, "cpu": "another"}, gpu={"driver": "580"}))
    with Writer(tmp_path / "samples.jsonl") as writer:
        for row in rows:
            writer.add(row)
    report.write(tmp_path)
    notes = [line for line in (tmp_path / "report.md").read_text().splitlines() if "had another" in line]
    assert len(notes) == 1 and notes[0].endswith("had another host cpu: another")


def test_html_escapes_what_a_server_said(tmp_path: Path) -> None:
    plan = decode_plan()
    rows = made.rows(plan)
    rows[-1] = rows[-1].model_copy(update={"problems": ("<script>alert(1)</script>",)})
    with Writer(tmp_path / "samples.jsonl") as writer:
        for row in rows:
            writer.add(row)
    report.write(tmp_path)
    assert "<script>" not in (tmp_path / "report.html").read_text()
