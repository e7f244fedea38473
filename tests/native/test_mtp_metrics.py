"""Drafted and accepted tokens by depth, in the timings and in /metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mtp_models import Models
from mtp_server import MTP, MtpServer

pytestmark = pytest.mark.native
PROMPT = "Every layer has its own slots."


def test_depths_in_timings_and_metrics(native_build: Any, mtp_models: Models, tmp_path: Path) -> None:
    trunk, head = mtp_models.trunk(markov=True), mtp_models.head("shared", markov=True)
    args = ["-md", head, *MTP, "--spec-draft-n-max", "3"]
    with MtpServer(native_build.bin, tmp_path, trunk, *args) as server:
        assert server.metric("fn_mtp_drafted_total") == {}
        runs = [server.tokens(f"{PROMPT} {i}", 30 + i).timings for i in range(3)]
        drafted = server.metric("fn_mtp_drafted_total")
        accepted = server.metric("fn_mtp_accepted_total")
    for timings in runs:
        assert timings["draft_acceptance"] == timings["draft_n_accepted"] / timings["draft_n"] == 1.0
        assert sum(d["drafted"] for d in timings["draft_depths"]) == timings["draft_n"]
        assert sum(d["accepted"] for d in timings["draft_depths"]) == timings["draft_n_accepted"]
    for i in range(3):
        assert drafted[f'depth="{i + 1}"'] == sum(t["draft_depths"][i]["drafted"] for t in runs)
    assert accepted == drafted


def test_a_rejecting_target_counts_drafts_only(native_build: Any, mtp_models: Models, tmp_path: Path) -> None:
    args = ["-md", mtp_models.head("shared"), *MTP, "--spec-draft-n-max", "2"]
    with MtpServer(native_build.bin, tmp_path, mtp_models.trunk(), *args) as server:
        timings = server.tokens(PROMPT, 60).timings
        drafted = server.metric("fn_mtp_drafted_total")
        accepted = server.metric("fn_mtp_accepted_total")
    assert sum(drafted.values()) == timings["draft_n"] > 50
    assert sum(accepted.values()) == timings["draft_n_accepted"] < 10
    assert accepted['depth="1"'] >= accepted['depth="2"']


def test_nothing_without_a_drafter(native_build: Any, mtp_models: Models, tmp_path: Path) -> None:
    with MtpServer(native_build.bin, tmp_path, mtp_models.trunk()) as server:
        timings = server.tokens(PROMPT, 8).timings
        assert server.metric("fn_mtp_drafted_total") == {}
    assert not any(name.startswith("draft") for name in timings)
