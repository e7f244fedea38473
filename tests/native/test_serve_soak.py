"""Mixed requests against the demo while everything that can fail fails in turn: nobody waits for ever.

FLASHNEXT_SOAK_S sets the length (default: three minutes); FLASHNEXT_SOAK_LOG names a folder for the account.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict
from pathlib import Path

import pytest
from soak import FAULTS, NO_PROGRESS_S, Recovery, Soak
from test_serve_demo import RealHome, home

__all__ = ["home"]

SOAK_S = float(os.environ.get("FLASHNEXT_SOAK_S", "180"))
LOG = os.environ.get("FLASHNEXT_SOAK_LOG")
MIB = 1024 * 1024
pytestmark = [pytest.mark.native, pytest.mark.slow, pytest.mark.timeout(SOAK_S + 240)]


def test_soak(home: RealHome) -> None:
    # the account of restarts is closed after 2 s of quiet here, not after ten minutes
    life = {"quiet_s": 2, "no_progress_s": NO_PROGRESS_S, "check_limit_s": 30}
    profile = home.profile(model={"synthetic": "demo"}, context={"size": 8192}, life=life)
    lines: list[str] = []

    def tell(recovery: Recovery) -> None:
        lines.append(json.dumps(asdict(recovery)))
        print(lines[-1])
        if LOG is not None:
            Path(LOG).mkdir(parents=True, exist_ok=True)
            (Path(LOG) / "faults.jsonl").write_text("\n".join(lines) + "\n")

    soak = Soak(home, profile, tell)
    soak.run(SOAK_S)
    summary = soak.summary()
    print(json.dumps(summary, indent=1))
    if LOG is not None:
        (Path(LOG) / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")

    assert SOAK_S < 170 or set(summary["faults"]) == set(FAULTS)
    assert not summary["late"], "ready within a cold start and 5 s"
    outcomes = soak.outcomes
    assert outcomes["hung"] == 0 and outcomes["short"] == 0
    assert outcomes["answer"] > SOAK_S / 6 and outcomes["left"] > SOAK_S / 36 and outcomes["error"] > 0
    for low, high in (summary["supervisor_bytes"], summary["server_bytes"]):
        assert high - low < 40 * MIB, "memory is flat"
    assert len(summary["device_bytes"]) <= 2, "the same on both devices after every start"
    soak.running.signal(signal.SIGTERM)
    assert soak.running.end() == 143
    home.nothing_left()
