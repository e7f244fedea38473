"""The text never depends on the drafter, beyond what the shape of a batch does to the logits.

Tokens that are decoded four at a time get logits a little different from those of tokens decoded one at a
time; that is so without any drafter, and it is measured here. So two heads of random weights must give the
same text to the byte, and a run with a head may leave the run without one only where the two best logits were
closer than that.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from mtp_models import Models
from mtp_server import MTP, MtpServer, run_test_program
from mtp_talk import Completion, Turn, conversation, divergences, run, situations

pytestmark = pytest.mark.native
DEPTH = 3
CONVERSATIONS = int(os.environ.get("FLASHNEXT_MTP_CONVERSATIONS", "100"))
# small micro-batches, so that a prompt of a few hundred tokens is read in chunks
ARGS = ["-c", "1024", "-ub", "64", "-b", "256", "--ctx-checkpoints", "16", "--cache-ram", "0"]


def mtp(head: Path) -> list[str | Path]:
    return ["-md", head, *MTP, "--spec-draft-n-max", str(DEPTH)]


def shape_bound(bin_dir: Path, trunk: Path) -> float:
    """How far two logits can move apart when only the batch shape changes: twice the largest move of one."""
    moves = []
    for seed in range(4):
        said = run_test_program(bin_dir, "shape", trunk, str(seed), "96", str(DEPTH), "1")
        moves.append(float(said.rpartition("shape: ")[2]))
    assert min(moves) > 0.0
    return 2.0 * max(moves)


class Arms:
    """The same turns without a head and with two heads of other random weights."""

    def __init__(self, native_build: Any, models: Models, log_dir: Path) -> None:
        self._bin = native_build.bin
        self._log_dir = log_dir
        self.trunk = models.trunk()
        self.heads = (models.head("shared", seed=11), models.head("shared", seed=12))
        self.bound = shape_bound(self._bin, self.trunk)

    def server(self, head: Path | None = None) -> MtpServer:
        args = ARGS if head is None else [*ARGS, *mtp(head)]
        return MtpServer(self._bin, self._log_dir, self.trunk, *args)

    def compare(self, turns: list[Turn], off: dict[str, Completion]) -> dict[str, Any]:
        """Runs both heads; what to report. Fails on a difference that the batch shape does not explain."""
        arms = []
        for head in self.heads:
            with self.server(head) as server:
                arms.append(run(server, turns))
                assert server.child.poll() is None
        between = [name for name in off if arms[0][name].tokens != arms[1][name].tokens]
        assert between == [], "two heads, two texts"
        left = divergences(off, arms[0])
        assert all(d.gap < self.bound for d in left), (self.bound, left)
        drafted = sum(done.timings.get("draft_n", 0) for arm in arms for done in arm.values())
        accepted = sum(done.timings.get("draft_n_accepted", 0) for arm in arms for done in arm.values())
        assert drafted > 0
        return {
            "turns": len(off),
            "tokens_per_arm": sum(len(done.tokens) for done in off.values()),
            "bound": self.bound,
            "diverged_from_off": len(left),
            "largest_gap_at_divergence": max((d.gap for d in left), default=0.0),
            "two_heads_differ": len(between),
            "drafted": drafted,
            "accepted": accepted,
        }


@pytest.mark.slow
def test_every_situation(native_build: Any, mtp_models: Models, tmp_path: Path) -> None:
    arms = Arms(native_build, mtp_models, tmp_path)
    answers: dict[str, tuple[int, ...]] = {}
    off: dict[str, Completion] = {}
    with arms.server() as server:
        # a turn that quotes an earlier answer can be written only once that answer is there
        names = [turn.name for turn in situations(5, {})]
        for i in range(len(names)):
            turn = situations(5, answers)[i]
            off |= run(server, [turn], gaps=True)
            if not turn.leaves:
                answers[turn.name] = off[turn.name].tokens
    turns = situations(5, answers)
    report = arms.compare(turns, off)
    print("fn-mtp text, situations:", json.dumps(report))
    # the situations are what they are called
    assert off["follow-up"].timings["cache_n"] >= 60
    assert off["edit-in-mid-history"].timings["cache_n"] <= 30
    assert off["chunked-prefill"].timings["prompt_n"] > 6 * 64
    assert off["unrelated-after-long"].timings["cache_n"] == 0
    assert 0 < off["checkpoint-restore"].timings["cache_n"] < 299


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_conversations(native_build: Any, mtp_models: Models, tmp_path: Path) -> None:
    arms = Arms(native_build, mtp_models, tmp_path)
    turns = [turn for seed in range(CONVERSATIONS) for turn in conversation(seed)]
    with arms.server() as server:
        off = run(server, turns, gaps=True)
    report = {"conversations": CONVERSATIONS, "depth": DEPTH} | arms.compare(turns, off)
    print("fn-mtp text, random conversations:", json.dumps(report))
