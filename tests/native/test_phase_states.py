"""The states of the transaction: any sequence of commands and faults against a model, and the long run."""

from __future__ import annotations

import os
import time
from typing import Any

import phase_record
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from native_servers import VirtualGpu
from phase_child import Child, GoneError
from test_phase_transaction import LARGE, SMALL, Start, allocated, words

TRANSITIONS = int(os.environ.get("FLASHNEXT_PHASE_TRANSITIONS", "100"))

pytestmark = [pytest.mark.native, pytest.mark.timeout(300 + TRANSITIONS)]

EXAMPLES = int(os.environ.get("FLASHNEXT_PHASE_EXAMPLES", "12"))
SLOTS = 16
SETTLED = 9  # transitions after which the cache holds what the same few tokens need
# fault -> what reports it; "begin" and "reserve" strike at begin, the others at end
FAULTS = {
    "begin": "quiesce",
    "reserve": "reserve",
    "restore": "restore",
    "upload": "upload",
    "generation": "generation",
}
AT_BEGIN = ("begin", "reserve")


class PhaseMachine(RuleBasedStateMachine):
    """Set by the test: a session that outlives the examples."""

    child: Child

    def __init__(self) -> None:
        super().__init__()
        self.state = "READY"
        self.begins = 0
        self.generation = 0
        self.fault: tuple[str, int] | None = None
        self.tried = 0

    @initialize(bypass=st.booleans(), draft=st.booleans(), verify=st.booleans())
    def open(self, bypass: bool, draft: bool, verify: bool) -> None:
        mode = "BYPASS" if bypass else "TRANSACTION"
        self.bypass = bypass
        opened = self.child(
            "open",
            micro_batch=SMALL,
            prompt=LARGE,
            draft=draft,
            mode=mode,
            verify=verify,
            slots=SLOTS,
            n_ctx=4096,
        )
        self.capacity = opened["capacity"]
        assert self.capacity == SLOTS * 8

    def strikes(self, at_begin: bool) -> str | None:
        if self.fault is None or self.fault[1] != self.tried:
            return None
        name = self.fault[0]
        if self.bypass and name in ("reserve", "restore", "upload"):
            return None  # bypass does none of it
        return name if (name in AT_BEGIN) == at_begin else None

    @rule(name=st.sampled_from(sorted(FAULTS)), ahead=st.integers(0, 1))
    def arm(self, name: str, ahead: int) -> None:
        if self.state in ("READY", "PROMPT"):
            self.fault = (name, self.tried + ahead)
            text = f"{name}:{self.tried + ahead}" if self.tried + ahead > 0 else ""
            self.fault = self.fault if text else None
            assert self.child("fault", text=text)["result"] == "OK"

    @rule()
    def begin(self) -> None:
        answer = self.child("begin", n=5)
        if self.state != "READY":
            assert (answer["result"], answer["check"]) == ("BAD_STATE", "state")
            return
        self.tried += 1
        struck = self.strikes(at_begin=True)
        if struck:
            assert (answer["result"], answer["check"]) == ("BROKEN", FAULTS[struck])
            self.state = "FAILED"
            return
        assert answer["result"] == "OK", answer
        self.state = "PROMPT"
        self.begins += 1
        self.generation += 0 if self.bypass else 1
        assert answer["capacity"] == (self.capacity if self.bypass else 0)

    @rule()
    def end(self) -> None:
        answer = self.child("end")
        if self.state != "PROMPT":
            assert (answer["result"], answer["check"]) == ("BAD_STATE", "state")
            return
        struck = self.strikes(at_begin=False)
        if struck:
            assert (answer["result"], answer["check"]) == ("BROKEN", FAULTS[struck])
            self.state = "FAILED"
            return
        assert answer["result"] == "OK", answer
        self.state = "READY"
        self.generation += 0 if self.bypass else 1
        assert answer["capacity"] == self.capacity

    @rule(count=st.sampled_from([1, 4, 33, 70, 300]), seed=st.integers(0, 5))
    def decode(self, count: int, seed: int) -> None:
        before = self.child("state")
        answer = self.child("decode", tokens=words(seed, count))
        after = self.child("state")
        looked_up = after["hits"] + after["misses"] - before["hits"] - before["misses"]
        if self.state == "FAILED":
            assert answer["code"] != 0 and looked_up == 0, "nothing is computed on a half restored state"
        else:
            assert answer["code"] == 0
            assert (looked_up > 0) == (self.state == "READY" and 0 < count % SMALL <= 32)

    @precondition(lambda self: self.state == "FAILED")
    @rule()
    def start_again(self) -> None:
        self.__dict__.update(state="READY", begins=0, generation=0, fault=None, tried=0)
        self.open(bypass=self.bypass, draft=False, verify=False)

    @invariant()
    def as_modelled(self) -> None:
        if not hasattr(self, "capacity"):
            return
        now = self.child("state")
        assert now["state"] == self.state
        assert now["stats"]["begins"] == self.begins
        assert now["seen"] == SMALL or self.state == "FAILED"
        if self.state == "READY":
            assert (now["phase"], now["capacity"], now["generation"]) == (0, self.capacity, self.generation)
            assert now["stats"]["ends"] == self.begins and now["stats"]["failures"] == 0
        if self.state == "FAILED":
            assert now["stats"]["failures"] == 1


def test_any_sequence_of_commands(phase_child: Start) -> None:
    PhaseMachine.child = phase_child()
    run_state_machine_as_test(
        PhaseMachine,
        settings=settings(
            max_examples=EXAMPLES, stateful_step_count=14, deadline=None, derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip


@pytest.mark.parametrize(("event", "moment"), [("alloc", "begin"), ("alloc", "end")])
def test_a_device_that_refuses(
    phase_child: Start, phase_gpus: tuple[VirtualGpu, ...], event: str, moment: str
) -> None:
    """The real thing instead of the switch: an allocation that fails on the second device."""
    one = phase_child()
    one("open", micro_batch=SMALL, prompt=LARGE)
    if moment == "end":
        assert one("begin", n=1)["result"] == "OK"
    phase_gpus[1].control(f"fault {event}:1")
    answer = one(moment, **({"n": 1} if moment == "begin" else {}))
    assert answer["result"] == "BROKEN"
    assert answer["check"] == ("reserve" if moment == "begin" else "restore")
    assert one("decode", tokens=[1])["code"] != 0
    one("close")


def test_a_device_that_is_lost_ends_the_process(
    phase_child: Start, phase_gpus: tuple[VirtualGpu, ...]
) -> None:
    one = phase_child()
    one("open", micro_batch=SMALL, prompt=LARGE)
    one("begin", n=1)
    phase_gpus[0].stop()
    with pytest.raises(GoneError) as gone:
        one("end")
    assert gone.value.code == -6


def test_a_cache_that_somebody_else_moved(phase_child: Start) -> None:
    one = phase_child()
    one("open", micro_batch=SMALL, prompt=LARGE)
    assert one("quiesce_cache")["code"] == 0
    answer = one("begin", n=1)
    assert (answer["result"], answer["check"]) == ("BROKEN", "cache-phase")


def test_verify_finds_a_planted_corruption(phase_child: Start) -> None:
    one = phase_child()
    for verify in (True, False):
        one("open", micro_batch=SMALL, prompt=LARGE, verify=verify)
        one("decode", tokens=words(1, 40))
        assert one("fault", text="corrupt:2")["result"] == "OK"
        assert one("begin", n=1)["result"] == "OK"
        assert one("end")["result"] == "OK"
        answer = one("begin", n=1)
        assert (answer["result"], answer["check"]) == (("BROKEN", "verify") if verify else ("OK", ""))


def test_verify_finds_a_slot_that_arrived_wrong(
    phase_child: Start, phase_gpus: tuple[VirtualGpu, ...]
) -> None:
    one = phase_child()
    one("open", micro_batch=SMALL, prompt=LARGE, verify=True)
    one("decode", tokens=words(1, 8))
    one("generate", token=1, n=8)
    assert one("begin", n=1)["result"] == "OK"
    phase_gpus[0].control("fault upload-corrupt:3")
    answer = one("end")
    assert (answer["result"], answer["check"]) == ("BROKEN", "upload"), "hashes of KV alone would not see it"


def test_many_transitions_leave_nothing_behind(
    phase_child: Start, phase_gpus: tuple[VirtualGpu, ...]
) -> None:
    """Device memory, RSS, slots (VERIFY compares them with the host) and hit rate, early and late."""
    one = phase_child()
    one("open", micro_batch=SMALL, prompt=LARGE, draft=True, verify=True)
    first: dict[str, Any] = {}
    rss: list[int] = []
    start = time.monotonic()
    for n in range(TRANSITIONS):
        one("clear")
        before = one("state")
        assert one("begin", n=90)["result"] == "OK"
        last = one("decode", tokens=words(7, 90))
        ended = one("end")
        assert ended["result"] == "OK", ended
        assert one("generate", token=last["best"], n=6)["logits"]
        after = one("state")
        now = {
            "allocated": allocated(phase_gpus),
            "hit_rate": (after["hits"] - before["hits"])
            / (after["hits"] + after["misses"] - before["hits"] - before["misses"]),
            "capacity": after["capacity"],
            "size_bytes": after["size_bytes"],
        }
        if n == SETTLED:
            first = now
        if n >= SETTLED:
            rss.append(one("rss")["rss_bytes"])
    quarter = len(rss) // 4
    # graphs of a few MiB come and go: what every late sample has above the early ones is growth
    growth = min(rss[-quarter:]) - max(rss[:quarter])
    phase_record.keep(
        f"transitions-{TRANSITIONS}",
        transitions=TRANSITIONS, seconds=round(time.monotonic() - start, 1), settled_after=SETTLED + 1,
        settled=first, last=now, generation=after["generation"],
        rss_bytes={"first_quarter_max": max(rss[:quarter]), "last_quarter_min": min(rss[-quarter:])},
        begin_ms=phase_record.parts(one.markers("begin")), end_ms=phase_record.parts(one.markers("end")),
    )  # fmt: skip
    assert now == first
    assert after["generation"] == 2 * TRANSITIONS
    assert growth < 2 << 20, f"{growth / TRANSITIONS:.0f} bytes a transition"
