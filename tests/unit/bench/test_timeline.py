"""The timeline of a prompt's pass: lanes, totals and the picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flashnext.bench import timeline
from flashnext.cli.bench import app
from flashnext.errors import SamplesUnreadableError, StateNotWritableError, UsageError


def stop(number: int, layer: int, reached: int, released: int, device: int = 0) -> dict[str, Any]:
    return {
        "what": "stop", "pass": number, "layer": layer, "device": device, "place": layer % 2, "rows": 8192,
        "whole": True, "t_reached_us": reached, "t_released_us": released, "ready": reached == released,
    }  # fmt: skip


def upload(layer: int, begin: int, end: int, device: int = 0) -> dict[str, Any]:
    return {
        "what": "upload", "layer": layer, "device": device, "place": layer % 2, "t_submit_us": begin,
        "t_begin_us": begin, "t_end_us": end, "bytes_uploaded": (end - begin) * 50_000, "bytes_copied": 0,
    }  # fmt: skip


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """One pass of three layers: the first waits 10 ms for its upload, the others come under compute."""
    return write(
        tmp_path / "lean.jsonl",
        upload(0, 0, 30_000), upload(1, 30_000, 60_000), upload(2, 60_000, 90_000),
        stop(4, 0, 20_000, 30_000), stop(4, 1, 80_000, 80_000), stop(4, 2, 130_000, 130_000),
        {**stop(5, 0, 200_000, 200_000), "rows": 64}, {**stop(5, 1, 201_000, 201_000), "rows": 64},
    )  # fmt: skip


def test_a_pass_is_read_into_lanes(file: Path) -> None:
    first, second = timeline.read(file)
    assert [(s.lane, s.layer, s.us) for s in first.spans] == [
        ("wait", 0, 10_000), ("compute", 0, 50_000), ("wait", 1, 0), ("compute", 1, 50_000), ("wait", 2, 0),
        ("upload", 0, 10_000), ("upload", 1, 30_000), ("upload", 2, 30_000),
    ]  # fmt: skip
    found = first.summary()
    assert (found["ms"], found["wait_ms"], found["compute_ms"], found["upload_ms"]) == (110, 10, 100, 70)
    # layer 1 wholly, layer 2 for all its 30 ms, layer 0 not at all
    assert found["hidden_share"] == pytest.approx(60 / 70)
    assert found["uploaded_bytes"] == 70_000 * 50_000, "of an upload that began before, its share"
    assert second.rows == 64 and second.summary()["hidden_share"] is None


def test_the_largest_and_last_pass_is_drawn(file: Path) -> None:
    passes = timeline.read(file)
    assert timeline.choose(passes, None).number == 4
    assert timeline.choose(passes, 5).number == 5
    with pytest.raises(UsageError):
        timeline.choose(passes, 6)
    text = timeline.svg(passes[0])
    assert text.startswith("<svg") and text == timeline.svg(passes[0])
    assert "device 0: upload" in text and "8,192 tokens" in text and "device 1" not in text
    assert "86%" in timeline.text(passes[0])


def test_two_devices_have_lanes_of_their_own(tmp_path: Path) -> None:
    path = write(
        tmp_path / "two.jsonl", upload(0, 0, 10), upload(1, 5, 15, device=1),
        stop(1, 0, 10, 10), stop(1, 1, 20, 20, device=1), stop(1, 2, 30, 30, device=1),
    )  # fmt: skip
    assert "device 1: compute" in timeline.svg(timeline.read(path)[0])


def test_a_last_line_that_was_cut_is_left_out(file: Path) -> None:
    whole = timeline.read(file)
    with file.open("a") as stream:
        stream.write('{"what": "stop", "pass": 5, "la')
    assert timeline.read(file) == whole
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[-1], *lines[:-1]]) + "\n")
    with pytest.raises(SamplesUnreadableError):
        timeline.read(file)


def test_a_plot_that_cannot_be_written(file: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["timeline", str(file), "--out", str(tmp_path)])
    assert isinstance(done.exception, StateNotWritableError)


@pytest.mark.parametrize("text", ["", "nonsense", '{"what": "stop"}', "[1]", '{"what": "other"}', '{"a": 1}'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(SamplesUnreadableError) as caught:
        timeline.read(path)
    assert "FN_LEAN_TIMELINE" in caught.value.advice, "samples.jsonl is not what it draws"
    with pytest.raises(SamplesUnreadableError):
        timeline.read(tmp_path / "absent")
