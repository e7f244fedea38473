"""The Grafana board and the alert rules name series that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from dashboards import ALERTS, BOARD, expressions, names

from flashnext.serve import metrics
from flashnext.services import Process, Service


def full_service() -> Service:
    """One that shows everything."""
    gauges = dict.fromkeys(metrics._GAUGES, 1.0)
    return Service(
        profile="demo", kind="demo", profile_file="demo.yaml", port=1, url="http://127.0.0.1:1",
        state="ready", reason="", started=datetime.now(UTC), supervisor=Process(name="f", pid=1, started=0.0),
        counters={**gauges, "marker phase:failed": 2, "vram": 1},
        devices=({"name": 'a "card"', "memory_bytes": 10, "allocated_bytes": 4},),
    )  # fmt: skip


def test_our_own_series_exist() -> None:
    there = set(re.findall(r"^(flashnext_\w+)[{ ]", metrics.exposition(full_service()), re.MULTILINE))
    used = {name for name in names() if name.startswith("flashnext")}
    assert len(used) > 10
    assert used - there == set(), {name: names()[name] for name in used - there}


def test_exposition_is_sound_and_passes_the_server_through() -> None:
    server = '# TYPE fn_expert_cache_hits_total counter\nfn_expert_cache_hits_total{device="RPC0"} 7\n'
    text = metrics.exposition(full_service(), server)
    assert text.endswith(server), "labels and types as the server gave them"
    assert 'flashnext_markers_total{marker="phase:failed"} 2' in text
    assert 'flashnext_findings_total{kind="vram"} 1' in text
    assert 'flashnext_device_allocated_bytes{device="a \\"card\\""} 4' in text
    types = re.findall(r"^# TYPE (\S+) (counter|gauge)$", text, re.MULTILINE)
    assert len(types) == len(dict(types)), "each series is declared once"
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = re.split(r"[{ ]", line, maxsplit=1)[0], line.rsplit(" ", 1)[1]
            assert name in dict(types) and float(value) >= 0


def test_rules_have_what_a_person_needs() -> None:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    for rule in group["rules"]:
        assert rule["annotations"]["summary"] and rule["labels"]["severity"] in (
            "critical",
            "warning",
            "info",
        )
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"])


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(BOARD.read_text())["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(at["x"] + i, at["y"] + k) for i in range(at["w"]) for k in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_reads_all_of_it(tmp_path: Path) -> None:
    asked = [text.replace("$instance", "x") for where, text in expressions() if "label_values" not in text]
    rules = [
        {"record": f"r{n}", "expr": text}
        for n, text in enumerate(asked)
        if "flashnext" in text or "{" in text
    ]
    board = tmp_path / "board.yml"
    board.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    assert len(rules) > 25
    done = subprocess.run(
        ["promtool", "check", "rules", str(ALERTS), str(board)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
