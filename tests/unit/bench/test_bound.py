"""The bound of a prompt: whichever of link and kernels takes longer."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import synthetic as made

from flashnext.bench import report
from flashnext.bench.bound import against_bound, bound_of
from flashnext.bench.plan import items
from flashnext.bench.samples import Row, Writer, file_in


class Cell(NamedTuple):
    arm: str
    depth: int
    median: float


# an upload takes 1 s
FACTS = {
    "model": {"expert_bytes": 10**10},
    "link": {"together_bytes_per_s": 1e10},
    "arms": {
        "control": {"prefill_micro_batch": 512},
        "candidate": {"prefill_micro_batch": 2048},
        "resident": {"prefill_micro_batch": 2048},
    },
}


def test_the_upload_bounds_small_micro_batches_and_the_kernels_large_ones() -> None:
    cells = [
        Cell("control", 8192, 400.0), Cell("candidate", 8192, 1000.0), Cell("resident", 8192, 4096.0),
        Cell("candidate", 4096, 1024.0),
    ]  # fmt: skip
    rows = {(r.arm, r.depth): r for r in against_bound(FACTS, cells)}
    assert set(rows) == {("control", 8192), ("candidate", 8192), ("candidate", 4096)}
    control, candidate, shallow = rows.values()
    assert (control.upload_tps, control.bound_tps, control.times_bound) == (512.0, 512.0, 1.28)
    assert (candidate.upload_tps, candidate.bound_tps) == (2048.0, 2048.0)
    assert candidate.times_goal == pytest.approx(4.096), "there the kernels are the slower"
    assert (shallow.kernels_tps, shallow.times_bound) == (None, 2.0)


def test_a_last_pass_that_is_not_full_uploads_all_the_same() -> None:
    bound = bound_of(FACTS)
    assert bound is not None
    assert bound.upload_tps(2049, 2048) == pytest.approx(2049 / 2)


def test_without_link_or_model_there_is_no_bound() -> None:
    for missing in ("model", "link"):
        facts = {k: v for k, v in FACTS.items() if k != missing}
        assert bound_of(facts) is None
        assert against_bound(facts, [Cell("control", 8192, 400.0)]) == []
    assert bound_of({**FACTS, "link": {"failure": "no driver"}}) is None


def test_the_report_has_it_as_table_and_line(tmp_path: Path) -> None:
    cells = [{"depth": 2048, "generate": 8}, {"depth": 8192, "generate": 8}]
    plan = made.plan(made.scenario("prefill", cells=cells), arms=("control", "candidate", "resident"))
    speeds = {"control": 256.0, "candidate": 1024.0, "resident": 1638.4}
    rows: list[Row] = [made.header(plan, **FACTS)]
    for session in plan.sessions:
        asked = list(items(plan, session))
        rows.append(made.process(session))
        rows += [made.request(session, item, speeds[session.arm], 50.0) for item in asked]
        rows.append(made.end(f"{session.index}.1", len(asked)))
    with Writer(file_in(tmp_path)) as writer:
        for row in rows:
            writer.add(row)
    report.write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    head = text.index("| depth | arm | micro-batch |")
    table = text[head:].split("\n\n")[0].splitlines()
    assert table[1] == "|" + "---|" * 8
    assert "| 8,192 | candidate | 2048 | 1,024 | 2,048 | 1,638 | 1.60 x | 1.60 x |" in table
    assert "| 2,048 | control | 512 | 256.0 | 512.0 | 1,638 | 2.00 x | 6.40 x |" in table
    assert len(table) == 6
    assert "<td>6.40 x</td>" in (tmp_path / "report.html").read_text()
    svg = (tmp_path / "plots/reading-speed-over-depth.svg").read_text()
    assert "bound: upload once per 512 tokens or the kernels" in svg
