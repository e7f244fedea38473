"""The marker grammar, by golden lines and by anything."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from flashnext.markers import parse

GOLDEN = (Path(__file__).parents[1] / "data" / "markers.txt").read_text(encoding="utf-8").splitlines()
NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,10}", fullmatch=True)


def test_golden_lines() -> None:
    good = bad = 0
    for number, line in enumerate(GOLDEN):
        if line.startswith("= "):
            kind, event, data = GOLDEN[number + 1].removeprefix("> ").split(" ", 2)
            marker = parse(line[2:])
            assert marker is not None, line
            assert (marker.kind, marker.event, marker.data) == (kind, event, json.loads(data))
            good += 1
        elif line.startswith("-"):
            assert parse(line[2:]) is None, line
            bad += 1
    assert good >= 5 and bad >= 10


@given(st.text())
def test_any_line_is_a_marker_or_none(line: str) -> None:
    marker = parse(line)
    assert marker is None or line.lstrip("0123456789. IWED").startswith("fn:")


@given(
    NAMES, NAMES, st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=9) | st.booleans())
)
def test_what_is_written_is_read(kind: str, event: str, data: dict[str, object]) -> None:
    marker = parse(f"fn:{kind}:{event} {json.dumps(data)}")
    assert marker is not None
    assert (marker.kind, marker.event, dict(marker.data)) == (kind, event, data)


def test_deep_and_long_lines_are_no_markers() -> None:
    assert parse("fn:a:b {" + '"a":[' * 30_000 + "}") is None
    assert parse('fn:a:b {"a":"' + "x" * 70_000 + '"}') is None
