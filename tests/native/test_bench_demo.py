"""`flashnext bench all` with the real binaries on virtual GPUs, end to end."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from serve_home import Home

from flashnext.bench import samples as files

pytestmark = [pytest.mark.native, pytest.mark.slow, pytest.mark.timeout(600)]


def test_every_scenario_in_under_ten_minutes(tmp_path: Path, native_build: Any) -> None:
    home = Home(tmp_path)
    build = Path(native_build.root)
    builds = home.root / "data/flashnext/builds"
    builds.mkdir(parents=True)
    (builds / build.name).symlink_to(build)
    out = tmp_path / "out"
    began = time.monotonic()
    try:
        done = home.run("bench", "all", "--profile=demo", "--processes=2", f"--out={out}", timeout_s=590)
        home.nothing_left()
    finally:
        home.close()
    assert done.returncode == 0, done.stderr[-3000:]
    assert time.monotonic() - began < 600

    result = json.loads((out / "result.json").read_text())
    assert {g["id"]: g["outcome"] for g in result["gates"]} == {
        "processes": "passed",
        "quality": "passed",
        "logits": "passed",
    }
    samples = files.read(files.file_in(out))
    assert len(samples.processes) == 9  # two arms, twice, the soak, and two arms, twice, with times
    assert {r.scenario for r in samples.requests} == {
        "prefill", "decode", "transition", "logits", "quality", "soak", "times",
    }  # fmt: skip
    depths = {(r.depth, r.timings["prompt_n"]) for r in samples.requests if r.scenario == "prefill"}
    assert depths == {(512, 512), (2560, 2560)}
    for request in (r for r in samples.requests if r.scenario == "times"):
        assert request.prefill_times is not None and request.prefill_times["tokens"] > 2500
    assert [t["arm"] for t in result["prefill_times"]] == ["control", "candidate"]
    watched = [r for r in samples.requests if r.memory]
    assert watched and all(len(used) == 2 and min(used) > 0 for r in watched for _, used in r.memory)
    html = (out / "report.html").read_text()
    assert html.count("<svg") >= 4 and "undefined" not in html.lower()
