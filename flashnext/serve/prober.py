"""Asks the server, from a thread of its own: is it up, does it write sane text, does it still move?

It owns no state and decides nothing: each answer goes to the supervisor as an event.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flashnext.loopback import Reply, UnreachableError, ask_line, request
from flashnext.serve import metrics, sanity

# Two different prompts, since one report's server died on its second request; the third is as long as a
# verify batch. Sampling is on: broken logits repeat at any temperature, random weights only without it.
DeviceBooks = tuple[dict[str, int | str], ...]
Prompt = tuple[str, str | list[int]]  # its name, and text or tokens
CHECKS: tuple[Prompt, ...] = (
    ("first", "The capital of France is"),
    ("second", "A haiku about winter:\n"),
    ("verify-shape", [1, 2, 3, 4]),
)
# Asked before the others where the profile has the memory transaction: the first prompt of a process begins
# and ends one whatever its size (LLAMA_PHASE_PREFILL_REHEARSE), and the text after it has to be sane as well.
REHEARSAL = ("rehearsal", "A letter from the lighthouse:\n")
CHECK_TOKENS = 24
_EVERY_HEALTH_S = 0.1
_EVERY_SLOTS_S = 1.0
# llama-server looks whether a waiting client is still there when no result of any request has come for a
# second; the answers to our own questions are such results. Asked every second or faster, it never looks and
# works on for a client that has left. So more than a second passes between our rounds while somebody waits.
EVERY_SLOTS_BUSY_S = 1.6
_DEVICES_EVERY = 5  # rounds of slots
_GPUS_EVERY = 20  # a driver's answer takes longer, and is not free
_DEVICE_KEYS = ("memory_bytes", "allocated_bytes", "peak_bytes", "refusals")


@dataclass(frozen=True)
class Healthy:
    """The server has loaded its model."""


@dataclass(frozen=True)
class CheckPassed:
    """All ready checks (or one later text check) gave sane text."""

    what: str
    tokens_per_second: float


@dataclass(frozen=True)
class CheckFailed:
    """A completion came back wrong (``insane``: degenerate text) or not at all (``unanswered``)."""

    what: str
    reason: str
    insane: bool
    unanswered: bool = False


@dataclass(frozen=True)
class Slots:
    """What the server is doing. ``mark`` changes whenever a token was read or written.

    ``read`` counts tokens of prompts under way, ``cached`` those among them that were not computed.
    """

    busy: bool
    mark: tuple[Any, ...]
    read: int
    written: int
    cached: int = 0


@dataclass(frozen=True)
class Silent:
    """The server did not answer a question about its slots in time."""

    reason: str


@dataclass(frozen=True)
class Devices:
    """Memory of the devices: name, memory_bytes, allocated_bytes. Virtual GPUs tell it from their own books,
    CUDA devices from the driver's."""

    devices: DeviceBooks


@dataclass(frozen=True)
class Metrics:
    """The server's own counters: by series name, and its text."""

    values: dict[str, float]
    text: str


Answer = Metrics | Devices | Healthy | CheckPassed | CheckFailed | Slots | Silent


class Prober:
    """One thread per launch of the server. ``stop`` returns at once; late answers are the caller's."""

    def __init__(
        self,
        address: tuple[str, int],
        post: Callable[[Answer], None],
        *,
        key: str | None,
        check_limit_s: float,
        text_check_s: float,
        rehearse: bool = False,
        controls: tuple[tuple[str, int], ...] = (),
        gpus: Callable[[], DeviceBooks] | None = None,
    ) -> None:
        self._controls = controls
        self._gpus = gpus
        self._address = address
        self._post = post
        self._key = key
        self._check_limit_s = check_limit_s
        self._text_check_s = text_check_s
        self._checks = (REHEARSAL, *CHECKS) if rehearse else CHECKS
        self._over = threading.Event()
        threading.Thread(target=self._run, name="prober", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _run(self) -> None:
        if not self._until_healthy():
            return
        self._post(Healthy())
        result = self._patient_check("ready", self._checks)
        if self._over.is_set():
            return
        if isinstance(result, CheckFailed):
            self._post(result)
            return
        self._post_devices()
        self._post_metrics()
        self._post(result)
        self._watch()

    def _until_healthy(self) -> bool:
        while not self._over.wait(_EVERY_HEALTH_S):
            try:
                if request(self._address, "/health", timeout_s=2.0).status == 200:
                    return True
            except UnreachableError:
                continue
        return False

    def _watch(self) -> None:
        last_check = time.monotonic()
        last_busy = time.monotonic()
        rounds = 0
        busy = True
        while not self._over.wait(EVERY_SLOTS_BUSY_S if busy else _EVERY_SLOTS_S):
            rounds += 1
            if rounds % (_GPUS_EVERY if self._gpus is not None else _DEVICES_EVERY) == 0:
                self._post_devices()
            if rounds % _DEVICES_EVERY == 0:
                self._post_metrics()
            answer = self._slots()
            self._post(answer)
            now = time.monotonic()
            busy = not isinstance(answer, Slots) or answer.busy
            if busy:
                last_busy = now
            due = self._text_check_s and now - last_check >= self._text_check_s
            if due and now - last_busy >= min(5.0, self._text_check_s):
                self._post(self._patient_check("text", CHECKS[:1]))
                last_check = time.monotonic()

    def _post_devices(self) -> None:
        found = list(self._gpus()) if self._gpus is not None else []
        for index, address in enumerate(self._controls):
            try:
                stats = ask_line(address, "stats")
            except UnreachableError:
                continue
            device: dict[str, int | str] = {key: _number(stats.get(key)) for key in _DEVICE_KEYS}
            found.append({**device, "name": f"vgpu{index}"})
        if found:
            self._post(Devices(tuple(found)))

    def _post_metrics(self) -> None:
        try:
            reply = request(self._address, "/metrics", key=self._key, timeout_s=10.0)
        except UnreachableError:
            return
        if reply.status == 200:
            self._post(Metrics(metrics.parse(reply.text), reply.text))

    def _slots(self) -> Slots | Silent:
        try:
            reply = request(self._address, "/slots", key=self._key, timeout_s=10.0)
        except UnreachableError as error:
            return Silent(str(error))
        if reply.status != 200 or not isinstance(reply.data, list):
            return Silent(f"/slots: {reply.status}")
        return read_slots(reply.data)

    def _patient_check(self, name: str, prompts: Sequence[Prompt]) -> CheckPassed | CheckFailed:
        """A check that waits its turn: clients may stand before it, as long as the server moves."""
        mark: tuple[Any, ...] | None = None
        while True:
            result = self._check(name, prompts)
            if isinstance(result, CheckPassed) or not result.unanswered or self._over.is_set():
                return result
            answer = self._slots()
            self._post(answer)
            if not isinstance(answer, Slots) or not answer.busy or answer.mark == mark:
                return result
            mark = answer.mark

    def _check(self, name: str, prompts: Sequence[Prompt]) -> CheckPassed | CheckFailed:
        """One request with all prompts: one task each, in this order, and only one wait behind clients."""
        body = {
            "prompt": [prompt for _, prompt in prompts],
            "n_predict": CHECK_TOKENS,
            "seed": 1,
            "temperature": 1.0,
            "ignore_eos": True,
            "return_tokens": True,
        }
        try:
            reply = request(
                self._address, "/completion", body=body, key=self._key, timeout_s=self._check_limit_s
            )
        except UnreachableError as error:
            reason = f"no answer to a completion: {error}"
            return CheckFailed(name, reason, insane=False, unanswered=True)
        return judge_all(name, [what for what, _ in prompts], reply)


def judge_all(name: str, parts: Sequence[str], reply: Reply) -> CheckPassed | CheckFailed:
    """What a reply to several prompts says: its first part that is wrong, or the fastest of all."""
    answers = reply.data if isinstance(reply.data, list) else [reply.data]
    if reply.status != 200 or len(answers) != len(parts):
        return _refused(name, reply)
    speed = 0.0
    for part, answer in zip(parts, answers, strict=True):
        result = judge(part, Reply(reply.status, reply.text, answer))
        if isinstance(result, CheckFailed):
            return result
        speed = max(speed, result.tokens_per_second)
    return CheckPassed(name, speed)


def _refused(name: str, reply: Reply) -> CheckFailed:
    reason = f"a completion was answered with {reply.status}: {reply.text[:200]}"
    return CheckFailed(name, reason, insane=False)


def judge(name: str, reply: Reply) -> CheckPassed | CheckFailed:
    """What one completion says about the server."""
    data = reply.data
    if reply.status != 200 or not isinstance(data, dict):
        return _refused(name, reply)
    tokens = data.get("tokens")
    tokens = [t for t in tokens if isinstance(t, int)] if isinstance(tokens, list) else []
    why = sanity.degenerate(str(data.get("content", "")), tokens)
    if why is not None:
        return CheckFailed(name, f"degenerate text: {why}", insane=True)
    timings = data.get("timings")
    speed = timings.get("predicted_per_second", 0.0) if isinstance(timings, dict) else 0.0
    return CheckPassed(name, float(speed) if isinstance(speed, int | float) else 0.0)


def read_slots(slots: list[Any]) -> Slots:
    """Condense ``/slots``; unknown or missing fields count as zero."""
    busy, mark, read, written, cached = False, [], 0, 0, 0
    for slot in slots:
        if not isinstance(slot, dict):
            continue
        kept = _number(slot.get("n_prompt_tokens_cache"))
        done = _number(slot.get("n_prompt_tokens_processed")) + kept
        nexts = slot.get("next_token")
        first = nexts[0] if isinstance(nexts, list) and nexts else nexts
        made = _number(first.get("n_decoded")) if isinstance(first, dict) else 0
        mark += [slot.get("id_task"), done, made]
        if slot.get("is_processing"):
            busy = True
            read += done
            written += made
            cached += kept
    return Slots(busy, tuple(mark), read, written, cached)


def _number(value: Any) -> int:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0
