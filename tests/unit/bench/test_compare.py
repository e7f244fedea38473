"""Comparing two results, and taking over llama-bench's."""

import json
import random
from pathlib import Path

import pytest
import synthetic as made
from typer.testing import CliRunner

from flashnext.bench import compare, report, result
from flashnext.bench.samples import Header, Samples, Writer
from flashnext.bench.stats import Verdict
from flashnext.cli.bench import app
from flashnext.errors import SamplesUnreadableError, StateNotWritableError

RUNNER = CliRunner()


def folder(path: Path, **more: float) -> Path:
    path.mkdir()
    with Writer(path / "samples.jsonl") as writer:
        for row in made.rows(made.plan(made.scenario("decode")), **more):  # type: ignore[arg-type]
            writer.add(row)
    report.write(path)
    return path


def test_a_release_that_got_slower_is_seen(tmp_path: Path) -> None:
    a, b = folder(tmp_path / "a", seed=1), folder(tmp_path / "b", seed=2, effect=0.9)
    done = RUNNER.invoke(app, ["compare", str(a), str(b), "--json"])
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    rows = {(r["metric"], r["arm"]): r for r in data["rows"]}
    assert rows["decode_tps", "candidate"]["verdict"] == Verdict.WORSE
    assert rows["decode_tps", "control"]["verdict"] == Verdict.SAME
    assert "unpaired" in data["caution"]


def test_what_two_runs_were_not_measured_with_alike_is_said(tmp_path: Path) -> None:
    here = made.rows(made.plan(made.scenario("decode")))
    header = here[0]
    assert isinstance(header, Header)
    there = [header.model_copy(update={"facts": {"host": {"cpu": "another"}}}), *here[1:]]
    for name, rows in (("a", here), ("b", there)):
        with Writer(tmp_path / name / "samples.jsonl") as writer:
            for row in rows:
                writer.add(row)
        report.write(tmp_path / name)
    done = RUNNER.invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"])
    assert json.loads(done.stdout)["differences"] == ["host.cpu: nothing in A, another in B"]
    same = RUNNER.invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "a"), "--json"])
    assert json.loads(same.stdout)["differences"] == []


def test_two_runs_of_different_arms_say_what_they_have(tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(json.dumps(LLAMA_BENCH))
    RUNNER.invoke(app, ["import", str(tmp_path / "bench.json"), "--out", str(tmp_path / "b")])
    done = RUNNER.invoke(app, ["compare", str(folder(tmp_path / "a")), str(tmp_path / "b")])
    assert done.exit_code == 0 and "┃" not in done.output
    assert "A: arms control, candidate; cells decode 1024" in done.output
    assert "B: arms llama-bench; cells prefill 512" in done.output


def test_a_report_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    made_of = folder(tmp_path / "a")
    (made_of / "report.md").unlink()
    (made_of / "report.md").mkdir()
    done = RUNNER.invoke(app, ["report", str(made_of)])
    assert isinstance(done.exception, StateNotWritableError)


def test_unpaired_ratios_err_in_under_five_percent() -> None:
    rng = random.Random(1)
    wrong = 0
    for _ in range(500):
        a, b = ([100 + rng.gauss(0, 1) for _ in range(5)] for _ in range(2))
        found = compare.unpaired_ratio(a, b)
        wrong += found.low > 1 or found.high < 1
    assert wrong / 500 < 0.05


def test_what_is_no_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"profile": 5}')
    with pytest.raises(SamplesUnreadableError):
        compare.load(tmp_path)
    with pytest.raises(SamplesUnreadableError):
        compare.load(tmp_path / "none.json")


LLAMA_BENCH = [
    {
        "n_prompt": 512,
        "n_gen": 0,
        "n_depth": 0,
        "samples_ns": [512_000_000, 256_000_000],
        "build_commit": "abc",
    },
    {"n_prompt": 512, "n_gen": 0, "n_depth": 4096, "samples_ns": [1_024_000_000], "build_commit": "abc"},
    {"n_prompt": 0, "n_gen": 128, "n_depth": 0, "samples_ns": [1_280_000_000], "build_commit": "abc"},
    {"n_prompt": 64, "n_gen": 16, "n_depth": 0, "samples_ns": [1_000_000_000], "build_commit": "abc"},
]


def test_llama_bench_is_imported_as_one_process(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(LLAMA_BENCH))
    done = RUNNER.invoke(app, ["import", str(file), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    found = compare.load(tmp_path / "out")
    cells = {(c.scenario, c.cell): (c.median, c.processes, c.requests) for c in found.cells}
    assert cells["prefill", "512"] == (1500.0, 1, 2)
    assert cells["prefill", "512@4096"] == (500.0, 1, 1)
    assert cells["decode", "0"] == (100.0, 1, 1)
    assert found.left_out and "64 prompt" in found.left_out[0]
    assert found.facts["build_commit"] == "abc"
    again = RUNNER.invoke(app, ["import", str(file), "--out", str(tmp_path / "out")])
    assert again.exit_code != 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[{}]", "test 1: n_prompt"),
        ("{}", "test 1: n_prompt"),
        ("[]", "no list of tests"),
        ("5", "no list of tests"),
        ("nonsense", "Expecting value"),
        ('[{"n_prompt": 1, "n_gen": 0, "samples_ns": "y"}]', "samples_ns"),
        ('[{"n_prompt": 1, "n_gen": 0, "samples_ns": []}]', "samples_ns"),
        ('[{"n_prompt": 1, "n_gen": 0, "samples_ns": [0]}]', "samples_ns.0"),
        ('[{"n_prompt": 1, "n_gen": 5, "samples_ns": [9]}]', "mixes prompt and generation"),
    ],
)
def test_another_file_is_no_llama_bench(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "x.json").write_text(text)
    done = RUNNER.invoke(app, ["import", str(tmp_path / "x.json"), "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, SamplesUnreadableError)
    assert words in " ".join(done.exception.context)
    assert not (tmp_path / "out" / "samples.jsonl").exists()


def test_json_lines_of_llama_bench(tmp_path: Path) -> None:
    file = tmp_path / "bench.jsonl"
    for number, tests in enumerate((LLAMA_BENCH, LLAMA_BENCH[:1])):
        file.write_text("".join(json.dumps(test) + "\n" for test in tests))
        words = ["import", str(file), "--json", "--out", str(tmp_path / str(number))]
        done = RUNNER.invoke(app, words)
        assert done.exit_code == 0 and json.loads(done.stdout)["gates"] == []


@pytest.mark.parametrize("text", ["[]", "5", '"x"', '{"schema_version": 1}', "nonsense"])
def test_what_is_no_result_is_not_compared(tmp_path: Path, text: str) -> None:
    (tmp_path / "result.json").write_text(text)
    for path in (tmp_path, tmp_path / "result.json"):
        with pytest.raises(SamplesUnreadableError) as caught:
            compare.load(path)
        assert "a result.json or its folder" in caught.value.advice
        assert len(caught.value.context) <= 4


def test_a_folder_without_a_result_is_told_how_to_get_one(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text("")
    with pytest.raises(SamplesUnreadableError) as caught:
        compare.load(tmp_path)
    assert "flashnext bench report" in caught.value.advice


def test_pooled_ratio_uses_processes_that_have_every_cell() -> None:
    cells = [{"depth": 100, "generate": 64}, {"depth": 200, "generate": 64}]
    plan = made.plan(made.scenario("decode", cells=cells))
    rows = made.rows(plan)
    missing = next(r for r in rows if r.type == "request" and r.process == "0.1" and r.cell == "200")
    rows.remove(missing)
    found = result.compute(Samples(rows))
    ns = {r.cell: r.n for r in found.ratios if r.metric == "decode_tps"}
    assert ns == {"100": 6, "200": 5, "pooled": 5}
