"""The transaction in-process: what it gives back, that nothing else moves, and the bytes of decode."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from native_servers import VirtualGpu
from phase_child import Child

pytestmark = pytest.mark.native

SMALL, LARGE = 64, 256
Start = Callable[..., Child]


def words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(count)]


def allocated(gpus: tuple[VirtualGpu, ...]) -> list[int]:
    return [gpu.books()["allocated_bytes"] for gpu in gpus]


def conversation(child: Child, transaction: bool) -> list[str]:
    """Two prompts with an answer each. Batches end so that no micro-batch is small enough for the cache."""
    digests = []
    for turn, batches in enumerate(([600, 200], [512, 60])):
        if transaction:
            assert child("begin", n=sum(batches))["result"] == "OK"
        for i, size in enumerate(batches):
            last = child("decode", tokens=words(turn * 10 + i, size))
            assert last["code"] == 0
            digests.append(last["logits"])
        if transaction:
            assert child("end")["result"] == "OK"
        digests.append(child("generate", token=last["best"], n=24)["logits"])
        digests.append(child("digest")["digest"])
    return digests


@pytest.mark.parametrize(("draft", "verify"), [(False, False), (True, True)], ids=["alone", "draft-verify"])
def test_decode_equals_the_run_without_it_to_the_byte(phase_child: Start, draft: bool, verify: bool) -> None:
    one = phase_child()
    one("open", micro_batch=LARGE, draft=draft)
    plain = conversation(one, transaction=False)
    hits = one("state")
    one("open", micro_batch=SMALL, prompt=LARGE, draft=draft, verify=verify)
    assert conversation(one, transaction=True) == plain
    after = one("state")
    for name in ("hits", "misses"):
        assert after[name] == hits[name] > 0, "the cache saw the same"
    assert (after["state"], after["stats"]["begins"], after["stats"]["ends"]) == ("READY", 2, 2)
    assert after["generation"] == 4 and after["capacity"] == 16 * 8


def test_the_micro_batch_is_what_moves_the_bytes(phase_child: Start) -> None:
    """The comparison above can fail: the same prompts at the small micro-batch give other bytes."""
    one = phase_child()
    one("open", micro_batch=LARGE)
    plain = conversation(one, transaction=False)
    one("open", micro_batch=SMALL)
    assert conversation(one, transaction=False) != plain


def test_the_devices_are_cleared_and_come_back(
    phase_child: Start, phase_gpus: tuple[VirtualGpu, ...]
) -> None:
    one = phase_child()
    one("open", micro_batch=SMALL, prompt=LARGE, draft=True)
    one("decode", tokens=words(1, 100))
    one("generate", token=1, n=8)
    before = allocated(phase_gpus)
    opened = one("state")
    assert opened["seen"] == SMALL
    begun = one("begin", n=800)
    assert (begun["state"], begun["seen"], begun["capacity"], begun["size_bytes"]) == ("PROMPT", SMALL, 0, 0)
    (marker,) = one.markers("begin")
    assert marker["bytes"] > opened["size_bytes"] and marker["micro_batch"] == LARGE
    during = allocated(phase_gpus)
    assert sum(before) - sum(during) == marker["bytes"] - marker["workspace_bytes"]
    one("decode", tokens=words(2, 800))
    assert allocated(phase_gpus) == during, "nothing grows in the prompt"
    ended = one("end")
    assert (ended["state"], ended["seen"], ended["capacity"]) == ("READY", SMALL, opened["capacity"])
    assert ended["size_bytes"] == opened["size_bytes"]
    for gpu, bytes_before in zip(phase_gpus, before, strict=True):
        gpu.wait_for(allocated_bytes=bytes_before)
    (marker,) = one.markers("end")
    assert marker["generation"] == 2 and marker["capacity"] == 128 and marker["n_tokens"] == 800
    parts = [marker[name] for name in ("quiesce_ms", "restore_ms", "reserve_ms")]
    assert 0 < sum(parts) <= marker["ms"]


def test_bypass_has_the_boundaries_and_releases_nothing(
    phase_child: Start, phase_gpus: tuple[VirtualGpu, ...]
) -> None:
    one = phase_child()
    one("open", micro_batch=SMALL, prompt=SMALL)
    released = conversation(one, transaction=True)
    one("open", micro_batch=SMALL, prompt=LARGE, mode="BYPASS")
    before = allocated(phase_gpus)
    assert one("begin", n=10)["capacity"] == 128
    assert allocated(phase_gpus) == before
    steps = one("state")
    one("decode", tokens=words(1, 10))
    assert {k: one("state")[k] for k in ("hits", "misses")} == {k: steps[k] for k in ("hits", "misses")}
    assert one("end")["generation"] == 0
    one("open", micro_batch=SMALL, prompt=LARGE, mode="BYPASS")
    assert conversation(one, transaction=True) == released
    assert one.markers("begin")[-1]["micro_batch"] == SMALL


def test_wrong_order_changes_nothing(phase_child: Start) -> None:
    one = phase_child()
    one("open", micro_batch=SMALL, prompt=LARGE)
    assert one("end")["result"] == "BAD_STATE"
    assert one("state")["state"] == "READY"
    assert one("begin", n=1)["result"] == "OK"
    again = one("begin", n=1)
    assert (again["result"], again["state"], again["check"]) == ("BAD_STATE", "PROMPT", "state")
    assert one("end")["result"] == "OK"


def test_a_stopped_batch_is_a_shorter_batch(phase_child: Start) -> None:
    one = phase_child()
    tokens = words(3, 1000)
    one("open", micro_batch=SMALL, prompt=LARGE)
    one("begin", n=1000)
    one("stop_after", n=2)
    stopped = one("decode", tokens=tokens)
    assert (stopped["code"], stopped["done"], stopped["pos"]) == (0, 2 * LARGE, 2 * LARGE - 1)
    one("stop_after", n=None)
    rest = one("decode", tokens=tokens[2 * LARGE :])
    one("end")
    one("open", micro_batch=SMALL, prompt=LARGE)
    one("begin", n=1000)
    assert one("decode", tokens=tokens)["logits"] == rest["logits"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"slots": 0}, "no expert cache"),
        ({"prompt": SMALL - 1}, "between"),
        ({"prompt": 1025}, "between"),
    ],
)
def test_contexts_that_do_not_fit_are_refused(
    phase_child: Start, options: dict[str, Any], reason: str
) -> None:
    one = phase_child()
    answer = one("open", **{"micro_batch": SMALL, "prompt": LARGE, **options})
    assert reason in answer["refused"]
