"""Questions over a document: planted facts, look-alikes beside them, and exact graders.

Everything here depends on the seed alone, never on the document's size, so that one frozen key holds the
answers at every depth.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from flashnext.bench.documents import Planted, Style

Grader = Literal["number", "word", "sequence", "set"]
NOT_STATED = "not stated"

_STATIONS = (
    "Arvika",
    "Brandal",
    "Corvo",
    "Drevja",
    "Eidsund",
    "Fjordby",
    "Grimsay",
    "Halvik",
    "Innset",
    "Jarlso",
)
_KEYS = (
    "kestrel",
    "plover",
    "siskin",
    "dunlin",
    "avocet",
    "garganey",
    "wheatear",
    "brambling",
    "twite",
    "smew",
)
_PERSONS = (
    "Ottilie",
    "Bertrand",
    "Ximena",
    "Leopold",
    "Annegret",
    "Casimir",
    "Philippa",
    "Tancred",
    "Rosamund",
)
_ROOMS = ("boiler room", "map archive", "glass house", "east loft", "tool store", "dark room", "salt cellar")
_EVENTS = (
    "amber",
    "cobalt",
    "ivory",
    "magenta",
    "russet",
    "turquoise",
    "umber",
    "viridian",
    "ochre",
    "saffron",
)
_GOODS = (
    "copper kettle", "oilskin coat", "brass sextant", "coil of hemp", "tin lantern", "cedar chest",
    "pewter jug", "woollen blanket", "iron anchor", "leather satchel", "glass float", "oak ladder",
    "clay pipe", "silver whistle", "canvas sail", "cork jacket", "bone needle", "slate board",
)  # fmt: skip


@dataclass(frozen=True)
class Question:
    """One question. ``answer`` is in the form that the grader compares; sequences are joined by commas."""

    name: str
    text: str
    answer: str
    grader: Grader


@dataclass(frozen=True)
class Screen:
    """The questions of a seed and the lines that hold their answers and their look-alikes."""

    seed: int
    questions: tuple[Question, ...]
    planted: tuple[Planted, ...]


def make_screen(seed: int) -> Screen:
    """The screen of a seed: the same on every machine."""
    rng = random.Random(f"screen {seed}")
    questions: list[Question] = []
    planted: list[Planted] = []
    for part in (_needles, _counting, _ordering, _recall, _latest, _two_steps, _absent):
        for entry in part(rng):
            (questions if isinstance(entry, Question) else planted).append(entry)  # type: ignore[arg-type]
    return Screen(seed, tuple(questions), tuple(planted))


Part = Iterator[Question | Planted]


def _needles(rng: random.Random) -> Part:
    """One number per style, from the first twentieth to the last, each between two look-alikes."""
    names = rng.sample(_KEYS, 4)
    styles: list[Style] = ["log", "code", "config", "prose"]
    rng.shuffle(styles)
    for number, (style, name, where) in enumerate(
        zip(styles, names, (0.04, 0.35, 0.66, 0.97), strict=True), 1
    ):
        value, old, other = rng.sample(range(1000, 10000), 3)
        line = "the pass code of vault {} is {}."
        yield Planted(where, style, line.format(name, value))
        yield Planted(_near(rng, where), style, line.format(f"{name}-old", old))
        yield Planted(_near(rng, where), style, line.format(_mirror(name), other))
        text = f"What is the pass code of vault {name}? Answer with the number alone."
        yield Question(f"needle-{number}", text, str(value), "number")


def _counting(rng: random.Random) -> Part:
    """How often one valve stuck, among reports that another stuck or that this one was freed."""
    count = rng.randint(4, 9)
    valve = f"V-{rng.randint(1, 4)}{rng.randint(5, 9)}"
    twin = f"V-{valve[3]}{valve[2]}"
    for _ in range(count):
        yield Planted(rng.random(), "log", f"valve {valve} stuck")
    for _ in range(rng.randint(3, 5)):
        yield Planted(rng.random(), "log", f"valve {twin} stuck")
        yield Planted(rng.random(), "log", f"valve {valve} freed")
    text = f"How many log lines report that valve {valve} stuck? Answer with the number alone."
    yield Question("counting", text, str(count), "number")


def _ordering(rng: random.Random) -> Part:
    """Five parcels in the order of their arrival in the text; three more only left."""
    names = rng.sample(_EVENTS, 8)
    arrived, left = names[:5], names[5:]
    places = sorted(rng.uniform(0.02, 0.98) for _ in arrived)
    for name, where in zip(arrived, places, strict=True):
        yield Planted(where, "prose", f"The {name} parcel arrived.")
    for name in left:
        yield Planted(rng.random(), "prose", f"The {name} parcel left.")
    text = (
        "List the colours of the parcels that arrived, in the order in which the text says so. "
        "Answer with the five colours alone, separated by commas."
    )
    yield Question("ordering", text, ", ".join(arrived), "sequence")


def _recall(rng: random.Random) -> Part:
    """Twelve goods of one store, scattered; four of another store between them."""
    here, there = rng.sample(_STATIONS, 2)
    goods = rng.sample(_GOODS, 16)
    for name in goods[:12]:
        yield Planted(rng.random(), "prose", f"In the store of {here} lies one {name}.")
    for name in goods[12:]:
        yield Planted(rng.random(), "prose", f"In the store of {there} lies one {name}.")
    text = (
        f"Which twelve things lie in the store of {here}? "
        "Answer with the twelve names alone, separated by commas."
    )
    yield Question("recall-12", text, ", ".join(goods[:12]), "set")


def _latest(rng: random.Random) -> Part:
    """A setting that is given three times; the last one counts."""
    values = rng.sample(range(100, 1000), 3)
    for value, where in zip(values, sorted(rng.uniform(0.05, 0.95) for _ in values), strict=True):
        yield Planted(where, "config", f"harbour.crane.load_limit = {value}")
    text = "To which value was harbour.crane.load_limit set last? Answer with the number alone."
    yield Question("latest", text, str(values[-1]), "number")


def _two_steps(rng: random.Random) -> Part:
    """Who holds the key, and where that person works: two facts far apart."""
    holder, other = rng.sample(_PERSONS, 2)
    room, wrong = rng.sample(_ROOMS, 2)
    number = rng.randint(20, 90)
    yield Planted(rng.uniform(0.05, 0.4), "prose", f"{holder} holds the key of cabinet {number}.")
    yield Planted(rng.uniform(0.05, 0.9), "prose", f"{other} holds the key of cabinet {number + 1}.")
    yield Planted(rng.uniform(0.6, 0.95), "prose", f"{holder} works in the {room}.")
    yield Planted(rng.uniform(0.05, 0.9), "prose", f"{other} works in the {wrong}.")
    text = (
        f"In which room works the person who holds the key of cabinet {number}? Answer with the room alone."
    )
    yield Question("two-steps", text, room, "word")


def _absent(rng: random.Random) -> Part:
    """A fact that the text does not hold, of a kind that it does hold for others."""
    name = rng.choice(_STATIONS)
    yield Planted(rng.random(), "config", f"lighthouse.{name.lower()}.height_m = {rng.randint(11, 60)}")
    text = (
        f"In which year was the lighthouse of {name} built? "
        f'Answer with the year alone, or with "{NOT_STATED}" if the text does not say.'
    )
    yield Question("absent", text, NOT_STATED, "word")


def _near(rng: random.Random, where: float) -> float:
    return min(1.0, max(0.0, where + rng.uniform(-0.03, 0.03)))


def _mirror(name: str) -> str:
    """A look-alike: the second and third letter changed places (or one letter more, where they are equal)."""
    swapped = name[0] + name[2] + name[1] + name[3:]
    return swapped if swapped != name else name + name[-1]


def grade(question: Question, text: str) -> bool:
    """Whether an answer is right, exactly: one value (or list) and no other."""
    said = final_answer(text)
    if question.grader == "number":
        return re.findall(r"\d+", said) == [question.answer]
    if question.grader == "word":
        return _plain(said) in (_plain(question.answer), _plain(f"the {question.answer}"))
    found = [_plain(p) for p in re.split(r"[,\n;]| and ", said) if _plain(p)]
    wanted = [_plain(p) for p in question.answer.split(",")]
    return found == wanted if question.grader == "sequence" else sorted(found) == sorted(wanted)


def final_answer(text: str) -> str:
    """An answer without a thinking block; of one that never ends nothing is left."""
    if "<think>" in text:
        text = text.split("</think>", 1)[1] if "</think>" in text else ""
    return text.strip()


def _plain(text: str) -> str:
    """Lower case, without quotes, punctuation and an article before a thing of a list."""
    words = re.sub(r"[^a-z0-9 -]", " ", text.lower()).split()
    return " ".join(words[1:] if len(words) > 1 and words[0] in ("a", "an", "one") else words)
