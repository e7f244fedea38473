"""Asks a server one item of the plan and turns what comes back into rows."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from flashnext.bench.documents import filler, fit
from flashnext.bench.memory import Watch
from flashnext.bench.plan import Item
from flashnext.bench.quality import check_key, text_of, turns
from flashnext.bench.questions import grade, make_screen
from flashnext.bench.samples import Request
from flashnext.bench.scenarios import SAMPLINGS
from flashnext.loopback import RefusedError, UnreachableError, request, stream

Address = tuple[str, int]
_TIMEOUT_S = 3600.0
_WHOLE_VOCABULARY = 2**31 - 1
_NO_PROBABILITY = -1e30  # llama-server's own mark for a probability of nought
_CHARS_PER_TOKEN = 5  # more than any tokenizer needs on this text, so that one try is enough


class TokenizeError(Exception):
    """The server could not tokenize."""


@dataclass
class Answer:
    """What came back of one request, and when."""

    text: str = ""
    timings: dict[str, Any] = field(default_factory=dict)
    top: list[tuple[int, float]] = field(default_factory=list)
    ttft_ms: float | None = None
    wall_ms: float = 0.0
    error: str | None = None
    cancelled: bool = False


class Asker:
    """Sends the items of one process. Texts of prompts are made once per process and item."""

    def __init__(self, address: Address, process: str, watch: Watch | None = None) -> None:
        self.address, self.process, self.watch = address, process, watch
        self._texts: dict[tuple[int, int], str] = {}

    def tokens(self, text: str) -> list[int]:
        """Token ids of a text, by the server's own tokenizer. Raises TokenizeError."""
        try:
            reply = request(self.address, "/tokenize", body={"content": text}, timeout_s=120.0)
        except UnreachableError as error:
            raise TokenizeError(str(error)) from None
        if reply.status != 200 or not isinstance(reply.data, dict):
            raise TokenizeError(f"/tokenize: HTTP {reply.status} {reply.text[:200]}")
        return [int(t) for t in reply.data.get("tokens", [])]

    def prompt(self, seed: int, depth: int) -> list[int]:
        """Exactly ``depth`` tokens of a text of that seed; unlike any other seed's from the first line on."""
        text = f"Notes, number {seed}.\n" + filler(f"speed {seed}", depth * _CHARS_PER_TOKEN)
        ids = self.tokens(text)
        if len(ids) < depth:
            raise TokenizeError(f"{len(text)} characters gave only {len(ids)} tokens, {depth} are needed")
        return ids[:depth]

    def rows(self, item: Item) -> Iterator[Request]:
        """The rows of an item: one, or for a quality conversation one per question."""
        if item.kind == "quality":
            yield from self._conversation(item)
            return
        began = now()
        try:
            body = speed_body(item, self.prompt(item.seed, item.depth))
        except TokenizeError as error:
            yield self._row(item, began, Answer(error=str(error)))
            return
        deep = item.scenario == "prefill"
        answer = self._watched("/completion", body) if deep else ask(self.address, "/completion", body)
        yield self._row(item, began, answer)

    def warm_up(self, item: Item, number: int) -> Answer:
        """A request like ``item`` that nothing is recorded of, with a text of its own."""
        ids = self.prompt(item.seed + 500_000 + number, item.depth)
        return ask(self.address, "/completion", speed_body(item, ids))

    def _conversation(self, item: Item) -> Iterator[Request]:
        screen = make_screen(item.seed)
        check_key(screen)
        key = (item.seed, item.depth)
        for question, messages in self._turns(item, key):
            body = {
                "messages": messages,
                "max_tokens": item.generate,
                "seed": item.seed,
                "chat_template_kwargs": {"enable_thinking": False},
                **SAMPLINGS[item.sampling],
            }
            began = now()
            answer = ask(self.address, "/v1/chat/completions", body)
            correct = None if answer.error else grade(question, answer.text)
            yield self._row(item, began, answer, name=f"{item.item}/{question.name}", correct=correct)

    def _turns(self, item: Item, key: tuple[int, int]) -> Iterator[tuple[Any, list[dict[str, str]]]]:
        screen = make_screen(item.seed)
        if key not in self._texts:
            # room for the questions, the answers of the turns before and the template
            room = item.depth - min(700, item.depth // 4)
            self._texts[key] = fit(lambda n: text_of(screen, n), lambda t: len(self.tokens(t)), room)
        yield from turns(screen, self._texts[key])

    def _watched(self, path: str, body: dict[str, Any]) -> Answer:
        if self.watch is None:
            return ask(self.address, path, body)
        self.watch.begin()
        try:
            return ask(self.address, path, body)
        finally:
            self.watch.end()

    def _row(
        self, item: Item, began: str, answer: Answer, *, name: str | None = None, correct: bool | None = None
    ) -> Request:
        return Request(
            process=self.process,
            scenario=item.scenario,
            cell=item.cell,
            item=name or item.item,
            depth=item.depth,
            seed=item.seed,
            started=began,
            wall_ms=answer.wall_ms,
            ttft_ms=answer.ttft_ms,
            timings=answer.timings,
            text=answer.text,
            top=kept(answer.top, item.top, item.spread),
            vocabulary=len(answer.top) if item.spread else None,
            correct=correct,
            memory=self.watch.taken() if self.watch is not None else [],
            cancelled=answer.cancelled,
            error=answer.error,
        )

    def soak(self, items: list[Item], duration_s: float, seed: int) -> Iterator[Request]:
        """Mixed requests until the time is over: fresh prompts, follow-ups, edits, clients that leave."""
        rng = random.Random(f"soak {seed}")
        deadline = time.monotonic() + duration_s
        last: list[int] = []
        number = 0
        while time.monotonic() < deadline and items:
            item = rng.choice(items)
            kind = rng.choice(("fresh", "fresh", "follow-up", "edit", "leave"))
            began = now()
            try:
                last = self._soak_prompt(rng, kind, item, last, number)
            except TokenizeError as error:
                yield self._row(item, began, Answer(error=str(error)))
                return
            body = {**speed_body(item, last), "cache_prompt": True}
            leave_s = rng.uniform(0.05, 1.0) if kind == "leave" else None
            answer = ask(self.address, "/completion", body, leave_after_s=leave_s)
            yield self._row(item, began, answer, name=f"{item.item}/{kind}/{number}")
            number += 1
            if answer.error is not None:
                return

    def _soak_prompt(
        self, rng: random.Random, kind: str, item: Item, last: list[int], number: int
    ) -> list[int]:
        fresh = self.prompt(item.seed + 1000 * (number + 1), item.depth)
        if kind == "follow-up" and last:
            return [*last, *fresh[:32]] if len(last) < 2 * item.depth else fresh
        if kind == "edit" and len(last) > 64:
            at = rng.randrange(len(last) // 2, len(last) - 16)
            return [*last[:at], *fresh[:16], *last[at + 16 :]]
        return fresh


def speed_body(item: Item, ids: list[int]) -> dict[str, Any]:
    """A request of exactly ``item.generate`` tokens behind a prompt that nothing is reused of."""
    body: dict[str, Any] = {
        "prompt": ids,
        "n_predict": item.generate,
        "ignore_eos": True,
        "cache_prompt": False,
        "seed": item.seed,
        **SAMPLINGS[item.sampling],
    }
    if item.top:
        body["n_probs"] = _WHOLE_VOCABULARY if item.spread else item.top
    return body


def kept(found: Sequence[tuple[int, float]], top: int, spread: int) -> list[tuple[int, float]]:
    """The ``top`` most likely of all tokens, and about ``spread`` of the others, by id alone.

    Padding of a vocabulary, which shares one lowest value, is no token: it would thin out every mean.
    """
    size = len(found)
    lowest = min((value for _, value in found), default=0.0)
    if spread and sum(value == lowest for _, value in found) * 100 > size:
        found = [(token, value) for token, value in found if value > lowest]
    likely, others = list(found[:top]), found[top:]
    share = spread / size if size else 0.0
    return likely + [(t, v) for t, v in others if _strewn(t) < share and v > _NO_PROBABILITY]


def _strewn(token: int) -> float:
    """A number from 0 to 1 that only the id decides (Knuth's multiplicative hash)."""
    return (token * 2_654_435_761 % 2**32) / 2**32


def ask(
    address: Address,
    path: str,
    body: dict[str, Any],
    *,
    leave_after_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Answer:
    """One streamed request to its end. ``leave_after_s``: close the connection at the first event after that.

    Never raises for what the server does: an error is part of the answer.
    """
    answer = Answer()
    began = clock()
    events = stream(address, path, {**body, "stream": True}, timeout_s=leave_after_s or _TIMEOUT_S)
    try:
        for event in events:
            _take(answer, event, (clock() - began) * 1000)
            if leave_after_s is not None and clock() - began >= leave_after_s:
                answer.cancelled = True
                break
    except RefusedError as error:
        answer.error = str(error)
    except UnreachableError as error:
        # a client that gives up in mid-prompt sees no event at all: its own time limit ends the wait
        if leave_after_s is not None and clock() - began >= leave_after_s:
            answer.cancelled = True
        else:
            answer.error = str(error)
    finally:
        events.close()  # type: ignore[attr-defined]
    answer.wall_ms = (clock() - began) * 1000
    if answer.error is None and not answer.cancelled and not answer.timings:
        answer.error = "the stream ended without timings"
    return answer


def _take(answer: Answer, event: dict[str, Any], at_ms: float) -> None:
    """One event of either form, /completion or chat."""
    if "error" in event:
        answer.error = str(event["error"])[:300]
    choices = event.get("choices") or []
    delta = (choices[0].get("delta") or {}) if choices else {}
    piece = event.get("content") or delta.get("content") or ""
    tokens = event.get("tokens") or event.get("completion_probabilities")
    if answer.ttft_ms is None and (piece or tokens or delta.get("reasoning_content")):
        answer.ttft_ms = at_ms
    answer.text += piece
    probabilities = event.get("completion_probabilities") or []
    if not answer.top and probabilities:
        answer.top = [(int(t["id"]), float(t["logprob"])) for t in probabilities[0].get("top_logprobs", [])]
    if event.get("timings"):
        answer.timings = event["timings"]


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
