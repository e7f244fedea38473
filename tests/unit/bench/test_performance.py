"""The performance section of the README: what the results say, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import readings
import readme
import synthetic as made
import yaml

from flashnext.bench.gates import Gates
from flashnext.bench.samples import Writer

ABOUT: dict[str, Any] = {"machine": "one card of a test", "model": "no model", "files": {}}
DECODE = {"kind": "ratio", "id": "decode", "scenario": "decode", "metric": "decode_tps", "cells": "each"}


def test_the_readme_says_what_the_results_say() -> None:
    _, inside, _ = readme.between_marks(readme.README.read_text())
    assert inside.strip() == readme.section().strip(), "python bench/performance/readme.py --write"


def test_nothing_of_ours_is_said_of_two_gpus_or_an_rtx_3090() -> None:
    text = readme.section()
    assert readme.NOT_OURS in text
    rest = text.replace(readme.NOT_OURS, "")
    assert "3090" not in rest and "two GPU" not in rest


def test_every_miss_of_the_table_is_named_with_its_reason() -> None:
    text = readme.section()
    assert text.count("**missed**") >= 1
    missed = text[text.index("Missed:") : text.index("Sources")]
    assert missed.count("\n- ") == text.count("**missed**") + text.count("**failed**")


def results(tmp_path: Path, lines: list[dict[str, Any]], name: str = "", **entry: Any) -> Path:
    """A folder of results with one file, read by the reader that its name begins with."""
    folder = tmp_path / "box"
    folder.mkdir(exist_ok=True)
    reasons = entry.pop("reasons", {})
    files = {
        name: {"reader": name.split(".")[0], "date": "today", "command": "make it", "note": "a note", **entry}
    }
    about = {**ABOUT, "files": files if name else {}, "reasons": reasons}
    (folder / "about.yaml").write_text(yaml.safe_dump(about))
    if name:
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def prompt(arm: str, length: int, prefill: float, decode: float | None) -> dict[str, Any]:
    return {
        "what": "prompt", "arm": arm, "n_prompt": length, "prefill_tps": prefill, "decode_tps": decode,
    }  # fmt: skip


def test_the_transaction_is_held_against_its_goals(tmp_path: Path) -> None:
    sizes = {"bytes": 6e9, "workspace_bytes": 1e9}
    lines = [
        *(prompt("control", 8192, v, 100.0) for v in (1000.0, 1010.0)),
        *(prompt("candidate", 8192, v, 96.0) for v in (2300.0, 2310.0)),
        prompt("control", 32768, 1000.0, None), prompt("candidate", 32768, 2300.0, None),
        prompt("large", 32768, 2400.0, None),
        {"what": "link", "together_bytes_per_s": 5e10},
        *(
            {
                "what": "transition",
                "begin": {"ms": 100.0, "release_ms": 20.0, "reserve_ms": 80.0},
                "end": {"ms": ms, "restore_ms": ms - 50, "reserve_ms": 50.0, **sizes},
            }
            for ms in (290.0, 310.0)
        ),
    ]  # fmt: skip
    found = {f.id: f for f in readings.phase(lines)}
    assert set(found) == {
        "phase-prefill_tps-8192", "phase-decode_tps-8192", "phase-prefill_tps-32768", "transition",
    }  # fmt: skip
    assert (found["phase-prefill_tps-8192"].reached, found["phase-prefill_tps-32768"].reached) == (
        True,
        False,
    )
    assert found["phase-decode_tps-8192"].reached is False
    assert found["phase-prefill_tps-8192"].ratio == pytest.approx(2305 / 1005)
    assert (found["transition"].goal, found["transition"].reached) == ("400 ms or less", True)
    assert (
        found["transition"].against
        == "of it: release begin 20, reserve begin 80, restore end 250, reserve end 50 ms"
    )
    reasons = {"phase/phase-prefill_tps": "the link is fast"}
    root = results(tmp_path, lines, "phase.jsonl", label="all of it", reasons=reasons)
    text = readme.section(root)
    assert "| prompt of 8,192 tokens, with the transaction (all of it) | 2,300, 2,310 t/s |" in text
    assert "2.4 x or more: **missed**" in text and "Reason: the link is fast." in text
    assert "goal 0.97 x or more. The reason was not found." in text
    assert "[phase.jsonl](phase.jsonl), today: `make it`; a note" in text


def test_lean_prefill_is_held_against_link_and_kernels() -> None:
    def arm(name: str, *seconds: float, **more: Any) -> dict[str, Any]:
        names = ("1x96", "8192", "4096", "8192", "8192x3", "8192", "100")
        steps = [{"step": n, "tokens": 1, "seconds": s} for n, s in zip(names, seconds, strict=True)]
        return {"part": "speed", "what": "arm", "name": name, "steps": steps, **more}

    lean = {"passes": 10, "devices": [{"uploaded": 10 * 20_000_000_000}]}
    lines = [
        {"part": "speed", "what": "upload", "gb_per_s": [50.0, 50.0]},
        arm("stock-512", 1, 9, 9, 8.192, 9, 8.192, 9),
        arm("lean-8192", 1, 9, 9, 0.44, 9, 0.5, 9, lean=lean),
        arm("resident-8192", 1, 9, 9, 0.3, 9, 0.32, 9),
    ]
    found = {f.id: f for f in readings.lean(lines)}
    assert set(found) == {"lean-stock-512-0", "lean-stock-512-32768", "lean-bound-0", "lean-bound-32768"}
    assert found["lean-stock-512-0"].ratio == pytest.approx(8.192 / 0.44)
    assert found["lean-bound-0"].ratio == pytest.approx(1.1) and found["lean-bound-0"].reached is True
    assert (
        found["lean-bound-32768"].ratio == pytest.approx(1.25) and found["lean-bound-32768"].reached is False
    )
    assert "upload 400 ms, kernels 300 ms" in found["lean-bound-0"].against


def test_lean_prefill_in_held_memory_its_follow_ups_and_decode_are_figures_of_their_own() -> None:
    def arm(part: str, name: str, *steps: tuple[str, int, float]) -> dict[str, Any]:
        made = [{"step": n, "tokens": tokens, "seconds": s} for n, tokens, s in steps]
        return {"part": part, "what": "arm", "name": name, "steps": made}

    def speed(name: str, chunk_s: float, follow_s: float) -> dict[str, Any]:
        return arm("speed", name, ("4096", 4096, 9), ("8192", 8192, chunk_s), ("200", 200, follow_s))

    lines = [
        speed("stock-512", 8.0, 1.0),
        speed("tiled-8192", 1.0, 0.4),
        speed("lean-8192", 0.8, 0.3),
        speed("lean-auto", 0.7, 0.3),  # not held: not told apart from a chunk of 8,192
        {"part": "speed", "what": "held", "bytes": 1, "free": 2},
        speed("lean-auto", 1.6, 0.5),
        arm("decode", "tiled-8192", ("1x512", 512, 4.0), ("1x512", 512, 4.0)),
        arm("decode", "lean-8192", ("1x96", 96, 9.0), ("1x512", 512, 5.0), ("1x512", 512, 4.0)),
    ]
    found = {f.id: f for f in readings.lean(lines)}
    assert found["lean-stock-512-0"].ratio == pytest.approx(10.0)
    assert found["lean-auto-held-stock-512-0"].ratio == pytest.approx(5.0)
    assert found["lean-auto-held-stock-512-0"].reached is False
    assert found["lean-8192-follow"].reached is True and found["lean-auto-held-follow"].reached is False
    assert found["lean-8192-decode"].ratio == pytest.approx((512 / 5 + 512 / 4) / 2 / 128)
    assert found["lean-8192-decode"].reached is False and "lean-8192-lent-decode" not in found


def bench_run(
    root: Path,
    gates: list[dict[str, Any]],
    effect: float,
    rows: int | None = None,
    arms: tuple[str, ...] = ("control", "candidate"),
    facts: dict[str, Any] | None = None,
) -> Path:
    """A folder of `flashnext bench` with that effect on the candidate's decode, cut after so many rows."""
    plan = made.plan(made.scenario("decode"), arms=arms)
    lines = made.rows(plan, Gates.model_validate({"gates": gates}), effect=effect, **(facts or {}))
    with Writer(root / "box/main/samples.jsonl") as writer:
        for row in lines[:rows]:
            writer.add(row)
    return root


def test_a_run_of_the_bench_appears_by_its_cells_and_gates(tmp_path: Path) -> None:
    gates = [{"kind": "checks", "id": "processes"}, {**DECODE, "at_least": 0.97}]
    text = readme.section(bench_run(results(tmp_path, []), gates, effect=0.9))
    assert "`flashnext bench all`; 12 of 12 planned processes" in text
    line = next(row for row in text.splitlines() if row.startswith("| decode behind 1,024 tokens"))
    assert "candidate (main) | 90 t/s (" in line and "n 6) | control: 100 t/s (" in line
    assert "| 0.90 x (0.90 to 0.91) |" in line and line.endswith("| 0.97 x or more: **missed** |")
    assert text[text.index("Missed:") :].count("decode behind 1,024 tokens") == 1


def test_a_run_of_two_sittings_says_so(tmp_path: Path) -> None:
    root = bench_run(results(tmp_path, []), [DECODE | {"at_least": 0.97}], effect=1.0)
    samples = root / "box/main/samples.jsonl"
    assert "sittings" not in readme.section(root)
    lines = samples.read_text().splitlines()
    again = json.dumps({**json.loads(lines[0]), "sitting": "another boot"})
    second = next(n for n, line in enumerate(lines) if json.loads(line).get("index") == 4)  # a half block
    samples.write_text("\n".join([*lines[:second], again, *lines[second:]]) + "\n")
    assert "12 of 12 planned processes in 2 sittings" in readme.section(root)


def test_a_third_arm_is_held_against_its_own_gates_and_the_candidate_has_its_features_name(
    tmp_path: Path,
) -> None:
    gates = [
        {**DECODE, "at_least": 0.97},
        {**DECODE, "id": "third", "candidate": "transaction", "at_least": 1.1},
    ]
    facts = {"arms": {"candidate": {"features": "expert-cache, lean-prefill"}}}
    arms = ("control", "candidate", "transaction")
    text = readme.section(bench_run(results(tmp_path, []), gates, effect=1.2, arms=arms, facts=facts))
    lines = [row for row in text.splitlines() if row.startswith("| decode behind 1,024 tokens")]
    rows = {row.split(" (main)")[0]: row for row in lines}
    lean = rows["| decode behind 1,024 tokens, lean prefill"]
    third = rows["| decode behind 1,024 tokens, transaction"]
    assert "| 1.20 x (" in lean and lean.endswith("| 0.97 x or more: reached |")
    assert "| 1.00 x (" in third and third.endswith("| 1.1 x or more: **missed** |")


def test_too_little_data_is_no_verdict_and_no_miss(tmp_path: Path) -> None:
    gates = [{**DECODE, "at_least": 0.97}]
    text = readme.section(bench_run(results(tmp_path, []), gates, effect=0.5, rows=7))
    assert "2 of 12 planned processes" in text
    assert "| 0.50 x | 0.97 x or more: no verdict (n 1 of 4) |" in text
    assert "No declared goal of these was missed." in text


def test_every_file_of_results_is_read_or_named_as_left_out(tmp_path: Path) -> None:
    assert readme.undescribed() == []
    root = results(tmp_path, [])
    (root / "box" / "new.jsonl").write_text("")
    assert [Path(path).name for path in readme.undescribed(root)] == ["new.jsonl"]


def test_values_are_all_shown_or_given_with_their_range() -> None:
    assert readings.values([1234.0, 1.0], "t/s") == "1,234, 1 t/s"
    assert readings.values([1, 2, 3, 4, 10], "ms", 1) == "3.0 ms (1.0 to 10.0, n 5)"
