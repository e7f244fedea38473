"""The quality screen: reproducible, planted where it says, graded exactly."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashnext.bench import quality
from flashnext.bench.documents import STYLES, Planted, document, filler, fit
from flashnext.bench.questions import NOT_STATED, Question, grade, make_screen
from flashnext.errors import ScenarioInvalidError

NAMES = (
    "needle-1", "needle-2", "needle-3", "needle-4", "counting", "ordering", "recall-12", "latest",
    "two-steps", "absent",
)  # fmt: skip


def question(name: str, seed: int = 1000) -> Question:
    return next(q for q in make_screen(seed).questions if q.name == name)


def test_the_key_is_frozen() -> None:
    """Fails when the generator changes: then old and new results must not be compared."""
    assert json.loads(quality.key_file().read_text()) == quality.make_key()


def test_a_changed_generator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    quality.check_key(make_screen(1003))
    quality.check_key(make_screen(7))  # beyond the key
    screen = make_screen(1003)
    monkeypatch.setattr(quality, "_entry", lambda s: {"answers": {}})
    with pytest.raises(ScenarioInvalidError, match="1003"):
        quality.check_key(screen)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_every_seed_asks_the_same_kinds_and_answers_them_itself(seed: int) -> None:
    screen = make_screen(seed)
    assert tuple(q.name for q in screen.questions) == NAMES
    for q in screen.questions:
        assert grade(q, q.answer)
        assert not grade(q, "I do not know.")
    others = [q.answer for q in screen.questions if q.grader == "number"]
    for q in screen.questions:
        if q.grader == "number":
            assert not any(grade(q, other) for other in others if other != q.answer)


@given(seed=st.integers(0, 10**6), chars=st.integers(0, 60_000))
@settings(max_examples=25, deadline=None)
def test_the_text_holds_every_fact_once_and_answers_can_be_worked_out(seed: int, chars: int) -> None:
    screen = make_screen(seed)
    text = quality.text_of(screen, chars)
    answers = {q.name: q.answer for q in screen.questions}
    asked = {q.name: q.text for q in screen.questions}
    for n in range(1, 5):
        name = re.search(r"vault (\w+)\?", asked[f"needle-{n}"])[1]  # type: ignore[index]
        assert re.findall(rf"the pass code of vault {name} is (\d+)\.", text) == [answers[f"needle-{n}"]]
    valve = re.search(r"valve (\S+) stuck", asked["counting"])[1]  # type: ignore[index]
    assert text.count(f"valve {valve} stuck\n") == int(answers["counting"])
    assert ", ".join(re.findall(r"The (\w+) parcel arrived", text)) == answers["ordering"]
    store = re.search(r"store of (\w+)", asked["recall-12"])[1]  # type: ignore[index]
    found = re.findall(rf"In the store of {store} lies one ([a-z ]+)\.", text)
    assert sorted(found) == sorted(answers["recall-12"].split(", "))
    assert re.findall(r"crane\.load_limit = (\d+)", text)[-1] == answers["latest"]
    cabinet = re.search(r"cabinet (\d+)", asked["two-steps"])[1]  # type: ignore[index]
    holder = re.search(rf"(\w+) holds the key of cabinet {cabinet}\.", text)[1]  # type: ignore[index]
    assert re.findall(rf"{holder} works in the ([a-z ]+)\.", text) == [answers["two-steps"]]
    assert answers["absent"] == NOT_STATED and "built" not in text


def test_facts_are_spread_from_the_beginning_to_the_end() -> None:
    text = quality.text_of(make_screen(1001), 200_000)
    places = [m.start() / len(text) for m in re.finditer(r"the pass code of vault [a-z]+ is", text)]
    assert min(places) < 0.1 and max(places) > 0.9
    thirds = {int(3 * m.start() / len(text)) for m in re.finditer("In the store of", text)}
    assert thirds == {0, 1, 2}


def test_answers_do_not_depend_on_the_depth() -> None:
    screen = make_screen(1002)
    short, long = (quality.text_of(screen, n) for n in (0, 150_000))
    for line in (p.line for p in screen.planted):
        assert line in short and line in long


def test_a_document_has_its_size_and_all_four_styles() -> None:
    text = filler(5, 30_000)
    assert 30_000 <= len(text) < 31_500
    assert "def " in text and " ms\n" in text and " = " in text and "and nobody thought" in text
    planted = [Planted(0.5, style, f"fact in {style}") for style in STYLES]
    assert [document(5, 9_000, planted).count(p.line) for p in planted] == [1, 1, 1, 1]
    assert filler(5, 30_000) == text != filler(6, 30_000)


def test_a_text_is_fitted_to_a_number_of_tokens() -> None:
    text = fit(lambda n: filler(1, n), lambda t: len(t) // 3, 5000)
    assert 0.95 * 5000 <= len(text) // 3 <= 5000


def test_a_text_that_cannot_be_that_short_is_as_short_as_it_can() -> None:
    screen = make_screen(1)
    least = quality.text_of(screen, 0)
    assert fit(lambda n: quality.text_of(screen, n), len, 100) == least


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("3611", True),
        ("3611.", True),
        ("<think>5532 or 3611?</think>\n3611", True),
        ("The pass code is 3611", True),
        ("3611 or 5532", False),
        ("36110", False),
        ("", False),
        ("<think>3611", False),
    ],
)
def test_numbers_are_right_alone(said: str, right: bool) -> None:
    assert grade(Question("n", "?", "3611", "number"), said) is right


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("amber, ochre, russet", True),
        ("Amber, Ochre and Russet.", True),
        ("ochre, amber, russet", False),
        ("amber, ochre", False),
        ("amber, ochre, russet, umber", False),
    ],
)
def test_sequences_keep_their_order(said: str, right: bool) -> None:
    assert grade(Question("n", "?", "amber, ochre, russet", "sequence"), said) is right


def test_sets_are_whole_and_without_more() -> None:
    q = Question("n", "?", "tin lantern, cedar chest", "set")
    assert grade(q, "a cedar chest, one tin lantern")
    assert not grade(q, "cedar chest")
    assert not grade(q, "cedar chest, tin lantern, clay pipe")
    assert not grade(q, "cedar chest, cedar chest, tin lantern")


def test_words() -> None:
    q = Question("n", "?", "map archive", "word")
    assert grade(q, "The map archive.") and grade(q, "map archive")
    assert not grade(q, "map archive or east loft")
    assert grade(question("absent"), "Not stated.")


def test_a_conversation_puts_the_right_answer_into_the_history() -> None:
    screen = make_screen(1000)
    asked = list(quality.turns(screen, "TEXT"))
    assert len(asked) == quality.QUESTIONS == 10
    _, last = asked[-1]
    assert [m["role"] for m in last] == ["user", "assistant"] * 9 + ["user"]
    assert last[1]["content"] == screen.questions[0].answer
    assert sum("TEXT" in m["content"] for m in last) == 1
