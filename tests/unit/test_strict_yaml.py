"""The strict reader: one reading of every line, or a refusal that names the line."""

from __future__ import annotations

import pytest

from flashnext.profile import strict_yaml

BASE = "name: x\n"


def problems(text: str) -> list[tuple[int, str, str]]:
    return [(p.line, p.key, p.text) for p in strict_yaml.read(text.encode()).problems]


@pytest.mark.parametrize(
    ("line", "at", "key", "words"),
    [
        ("a: on", 2, "a", "true or false"),
        ("a: yes", 2, "a", "true or false"),
        ("a: No", 2, "a", "true or false"),
        ("a: True", 2, "a", "true or false"),
        ("a: 010", 2, "a", "different numbers"),
        ("a: 0x1F", 2, "a", "different numbers"),
        ("a: 0o17", 2, "a", "different numbers"),
        ("a: 1_000", 2, "a", "different numbers"),
        ("a: 1e9", 2, "a", "different numbers"),
        ("a: +5", 2, "a", "different numbers"),
        ("a: .5", 2, "a", "different numbers"),
        ("a: 5.", 2, "a", "different numbers"),
        ("a: .inf", 2, "a", "different numbers"),
        ("a: .NaN", 2, "a", "different numbers"),
        ("a: 99999999999999999999", 2, "a", "different numbers"),
        ("a:", 2, "a", "no value"),
        ("a: ~", 2, "a", "no value"),
        ("a: null", 2, "a", "no value"),
        ("a: {b: NULL}", 2, "a.b", "no value"),
        ("a: [1, on]", 2, "a[1]", "true or false"),
        ("name: y", 2, "name", "on lines 1 and 2"),
        ("a: {b: 1, b: 2}", 2, "a.b", "given twice"),
        ("a: &x 1", 2, "", "anchor &x"),
        ("a: *x", 2, "", "alias *x"),
        ("a: !!int 5", 2, "", "tag"),
        ("a: !python/object:os.system 5", 2, "", "tag"),
        ("<<: {a: 1}", 2, "", "merge keys"),
        ("5: a", 2, "", "no name for a key"),
        ("? [a, b]\n: c", 2, "", "no name for a key"),
        ("a:\tb", 2, "", "a tab"),
        ("\ta: b", 2, "", "a tab"),
        ("a: [1, 2", 3, "", "not YAML"),
        ("a: b: c", 2, "", "not YAML"),
        ("a: 'open", 3, "", "not YAML"),
        ("a: @b", 2, "", "not YAML"),
        ("---\na: b", 2, "", "not YAML"),
        ("%FOO\n", 4, "", "not YAML"),
        ("a: \x01", 2, "", "does not allow"),
        ("a: [[[[[[[[[[[[[1]]]]]]]]]]]]]", 2, "", "nested deeper"),
    ],
)
def test_refused(line: str, at: int, key: str, words: str) -> None:
    found = problems(BASE + line + "\n")
    assert found, line
    assert (at, key) in [(p[0], p[1]) for p in found], found
    assert any(words in p[2] for p in found), found


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("false", False),
        ("0", 0),
        ("-12", -12),
        ("3.25", 3.25),
        ("'010'", "010"),
        ('"on"', "on"),
        ("1.2.3", "1.2.3"),
        ("2026-01-02", "2026-01-02"),
        ("12:30", "12:30"),
        ("2k", "2k"),
        ("one", "one"),
        ("norway", "norway"),
        ("=", "="),
        (r"'blk\.\d+'", r"blk\.\d+"),
        ("[1, 2]", (1, 2)),
        ("{b: c}", {"b": "c"}),
    ],
)
def test_read(text: str, value: object) -> None:
    doc = strict_yaml.read(f"a: {text}\n".encode())
    assert doc.problems == []
    assert doc.data == {"a": value}
    assert type(doc.data["a"]) is type(value)


def test_every_problem_is_reported_at_once_in_order() -> None:
    found = problems("a: on\nb: 010\nc: ~\nb: 2\nd: &e 1\n")
    assert [line for line, _, _ in found] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "empty"),
        (b"# only a comment\n", "empty"),
        (b"- a\n- b\n", "mapping of sections"),
        (b"just text\n", "mapping of sections"),
        (b"a: \xff\n", "not UTF-8"),
        (b"a: b\n" * 60_000, "larger than"),
    ],
)
def test_no_document(raw: bytes, words: str) -> None:
    doc = strict_yaml.read(raw)
    assert doc.data is None
    assert len(doc.problems) == 1 and words in doc.problems[0].text


def test_lines_of_keys_and_of_what_is_missing() -> None:
    doc = strict_yaml.read(b"a:\n  b: 1\n  c:\n    - x\n    - y\n")
    assert doc.line(("a", "b")) == 2
    assert doc.line(("a", "c", 1)) == 5
    assert doc.line(("a", "missing")) == 1
    assert doc.line(("missing",)) == 0
