"""The three forms of the head load and draft, on the CPU and over virtual GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mtp_models import Form, Models
from mtp_server import MTP, Completion, MtpServer
from native_servers import VirtualGpu

pytestmark = pytest.mark.native
PROMPT = "The slots of a layer live on that layer's device."
HEAD_TYPES = ["q8_0", "bf16", "q4_k_m"]


def drafter(form: Form, models: Models, **kind: Any) -> tuple[Path, list[str | Path]]:
    """The model file and the further arguments for a target with a head of this form."""
    if form == "embedded":
        return models.embedded(**kind), [*MTP]
    trunk = models.trunk(seed=kind.get("seed", 0), markov=kind.get("markov", False))
    return trunk, ["-md", models.head(form, **kind), *MTP]


def assert_all_accepted(done: Completion) -> None:
    assert done.timings["draft_n"] > 0
    assert done.timings["draft_n_accepted"] == done.timings["draft_n"]


@pytest.mark.parametrize("head_type", HEAD_TYPES)
@pytest.mark.parametrize("form", ["shared", "standalone", "embedded"])
def test_form_drafts_and_leaves_the_text_alone(
    native_build: Any, mtp_models: Models, tmp_path: Path, form: Form, head_type: str
) -> None:
    """The markov fixture: the next token depends on the last one alone, and the head predicts it exactly."""
    model, args = drafter(form, mtp_models, markov=True, head_type=head_type)
    with MtpServer(native_build.bin, tmp_path, mtp_models.trunk(markov=True)) as plain:
        expected = plain.tokens(PROMPT, 48)
    assert "draft_n" not in expected.timings
    with MtpServer(native_build.bin, tmp_path, model, *args) as server:
        done = server.tokens(PROMPT, 48)
    assert done.tokens == expected.tokens
    if head_type == "q8_0":  # a coarser head than its trunk may miss now and then
        assert_all_accepted(done)
    else:
        assert done.timings["draft_n_accepted"] > 0.9 * done.timings["draft_n"]


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_known_acceptance_at_every_depth(
    native_build: Any, mtp_models: Models, tmp_path: Path, depth: int
) -> None:
    model, args = drafter("shared", mtp_models, markov=True)
    with MtpServer(native_build.bin, tmp_path, model, *args, "--spec-draft-n-max", str(depth)) as server:
        done = server.tokens(PROMPT, 60)
    assert_all_accepted(done)
    depths = done.timings["draft_depths"]
    assert [d["depth"] for d in depths] == list(range(1, depth + 1))
    assert all(d["accepted"] == d["drafted"] > 0 for d in depths)


def test_sparse_head_drafts(native_build: Any, mtp_models: Models, tmp_path: Path) -> None:
    """Ratio 4 on the MTP layer, far beyond the 19 tokens that its selection covers."""
    trunk, head = mtp_models.trunk(markov=True), mtp_models.head("shared", markov=True, head_ratio=4)
    with MtpServer(native_build.bin, tmp_path, trunk, "-md", head, *MTP) as server:
        done = server.tokens(PROMPT * 8, 60)
        again = server.tokens(PROMPT * 8 + "!", 60)
    assert_all_accepted(done)
    assert_all_accepted(again)
    assert again.timings["cache_n"] > 0


def test_embedded_head_stays_out_unless_asked_for(
    native_build: Any, mtp_models: Models, tmp_path: Path
) -> None:
    with MtpServer(native_build.bin, tmp_path, mtp_models.embedded()) as server:
        embedded = server.tokens(PROMPT, 24)
        skipped = server.text
    with MtpServer(native_build.bin, tmp_path, mtp_models.trunk()) as server:
        trunk = server.tokens(PROMPT, 24)
    assert embedded.tokens == trunk.tokens
    assert "draft_n" not in embedded.timings
    assert skipped.count("model has unused tensor blk.8.") == 32


def test_random_head_is_accepted_at_chance(native_build: Any, mtp_models: Models, tmp_path: Path) -> None:
    """V is 265, so chance is 0.4 %: no more than a few times that."""
    model, args = drafter("shared", mtp_models, seed=0)
    drafted = accepted = 0
    with MtpServer(native_build.bin, tmp_path, model, *args) as server:
        for i in range(6):
            timings = server.tokens(f"{PROMPT} {i}", 80).timings
            drafted += timings["draft_n"]
            accepted += timings["draft_n_accepted"]
    assert drafted > 1000
    assert accepted / drafted < 6 / 265


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "device"),
    [
        *((form, device) for form in ("shared", "standalone") for device in ("RPC0", "RPC1", None)),
        ("embedded", None),  # lives where its model lives
    ],
)
def test_over_two_virtual_gpus(
    native_build: Any,
    mtp_models: Models,
    tmp_path: Path,
    vgpu: Callable[..., VirtualGpu],
    form: Form,
    device: str | None,
) -> None:
    """Layers split over both, experts in host memory, the head on either device or on both."""
    model, args = drafter(form, mtp_models, markov=True)
    if device is not None:
        args += ["-devd", device]
    gpus = (vgpu(), vgpu())
    args += ["-ngld", "99", "-otd", "exps=CPU"]
    with MtpServer(native_build.bin, tmp_path, model, *args, on=gpus) as server:
        done = server.tokens(PROMPT, 48)
        log = server.text
    assert_all_accepted(done)
    # target and head each report the devices that got weights
    loads = [
        {i for i, gpu in enumerate(gpus) if f"RPC0[{gpu.endpoint}] model buffer size" in part}
        for part in log.split("loading draft model")
    ]
    assert loads[0] == {0, 1}
    if form != "embedded":
        assert loads[1] == ({int(device[-1])} if device else {1})
    # the target's output projection is on the last device: a head elsewhere needs that one, too
    borrows_elsewhere = form == "shared" and device == "RPC0"
    assert ("adding RPC1, which holds the borrowed tensor output" in log) == borrows_elsewhere
