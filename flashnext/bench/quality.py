"""The quality screen: conversations over one document each, and the frozen key of their answers.

A conversation asks every question of a seed about one document, the later ones as follow-ups on the same
prefix. After each turn the *right* answer is put into the history, in both arms: so both are asked the same
at every turn, and one mistake is counted once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flashnext import paths
from flashnext.bench.documents import document
from flashnext.bench.questions import Question, Screen, make_screen
from flashnext.errors import ScenarioInvalidError

KEY_SEEDS = range(1000, 1040)
HASHED_CHARS = 60_000
INTRODUCTION = "Read the following collection of notes, logs, code and settings (number {seed}).\n\n"
QUESTIONS = len(make_screen(0).questions)
Message = dict[str, str]


def text_of(screen: Screen, chars: int) -> str:
    """The document of a screen, with its heading."""
    return INTRODUCTION.format(seed=screen.seed) + document(screen.seed, chars, screen.planted)


def turns(screen: Screen, text: str) -> Iterator[tuple[Question, list[Message]]]:
    """Every question with the messages that ask it."""
    history: list[Message] = []
    for number, question in enumerate(screen.questions):
        asked = f"{text}\n\n{question.text}" if number == 0 else question.text
        yield question, [*history, {"role": "user", "content": asked}]
        history += [{"role": "user", "content": asked}, {"role": "assistant", "content": question.answer}]


def make_key() -> dict[str, Any]:
    """The key as the generator makes it now."""
    return {
        "hashed_chars": HASHED_CHARS,
        "seeds": {str(seed): _entry(make_screen(seed)) for seed in KEY_SEEDS},
    }


def _entry(screen: Screen) -> dict[str, Any]:
    text = text_of(screen, HASHED_CHARS)
    return {
        "document_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "answers": {q.name: q.answer for q in screen.questions},
    }


def key_file() -> Path:
    return paths.bench_dir() / "prompts" / "quality-key.json"


def check_key(screen: Screen) -> None:
    """Refuse to run a generator that no longer makes what was frozen (seeds beyond the key pass)."""
    frozen = json.loads(key_file().read_text(encoding="utf-8"))["seeds"].get(str(screen.seed))
    if frozen is not None and frozen != _entry(screen):
        raise ScenarioInvalidError(
            f"the quality screen of seed {screen.seed} is not the frozen one",
            context=[f"key: {key_file()}"],
            hint="results of different screens cannot be compared: restore the generator or start a new key",
        )
