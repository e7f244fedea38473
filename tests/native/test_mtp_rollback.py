"""Rollback of the recurrent state: exact within its range, refused beyond it, and re-read by the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mtp_models import Models
from mtp_server import MTP, MtpServer, run_test_program

pytestmark = pytest.mark.native


def test_range_of_a_rollback(native_build: Any, mtp_models: Models) -> None:
    """k <= min(n_rs_seq, tokens of the last decode - 1), one at a time, equal to the bit to a fresh context.

    The pinned tree says true beyond that range and goes on with a state that another decode left behind.
    """
    said = run_test_program(native_build.bin, "rollback", mtp_models.trunk())
    assert said.count(": done") == 14
    assert said.count(": refused") == 13
    assert "saved with a rollback pending" in said


@pytest.mark.parametrize("ratio", [0, 4], ids=["dense", "sparse"])
def test_memory_of_the_draft(native_build: Any, mtp_models: Models, ratio: int) -> None:
    """Trimmed to any length, saved and restored, equal to the bit; a checkpoint of it takes a few bytes."""
    head = mtp_models.head("shared", head_ratio=ratio)
    said = run_test_program(native_build.bin, "state", mtp_models.trunk(), head)
    assert said.count("state: ") == 3


@pytest.mark.parametrize("back", [1, 2, 3, 7])
def test_trimmed_prompt_is_read_again(
    native_build: Any, mtp_models: Models, tmp_path: Path, back: int
) -> None:
    """A cached history of which the last tokens go: the server reads again from a checkpoint.

    The last step before the trim had its drafts rejected, so the snapshots belong to another length than the
    trim. Without flash attention, whose f16 sums depend on how a prompt is cut, both ways of reading give
    equal text.
    """
    args = ["-md", mtp_models.head("shared"), *MTP, "--spec-draft-n-max", "4"]
    args += ["-fa", "off"]
    with MtpServer(native_build.bin, tmp_path, mtp_models.trunk(), *args) as server:
        prompt = list(range(40, 140))
        first = server.tokens(prompt, 20)
        assert first.timings["draft_n_accepted"] < first.timings["draft_n"]
        history = prompt + list(first.tokens)
        trimmed = [*history[: len(history) - 1 - back], 7, 8, 9]
        got = server.tokens(trimmed, 20)
        fresh = server.tokens(trimmed, 20, cache_prompt=False)
    assert got.tokens == fresh.tokens
    # more than the new tokens were read, and less than everything: a checkpoint of the prompt
    assert back + 3 < got.timings["prompt_n"] < len(trimmed)
    assert fresh.timings["prompt_n"] == len(trimmed)


def test_five_turns_with_checkpoints_and_no_acceptance(
    native_build: Any, mtp_models: Models, tmp_path: Path
) -> None:
    """A checkpoint taken while a rollback is pending must not end the process (seen in the field)."""
    args = ["-md", mtp_models.head("shared"), *MTP, "--ctx-checkpoints", "8"]
    with MtpServer(native_build.bin, tmp_path, mtp_models.trunk(), *args) as server:
        history = list(range(40, 100))
        drafted = accepted = 0
        for turn in range(5):
            done = server.tokens(history, 16)
            drafted += done.timings["draft_n"]
            accepted += done.timings["draft_n_accepted"]
            history += [*done.tokens, 60 + turn, 61, 62, 63, 64, 65, 66, 67]
            if turn > 0:
                assert done.timings["cache_n"] > 0
        assert server.child.poll() is None
    assert drafted > 150
    assert accepted < 0.05 * drafted
