"""samples.jsonl: nothing lost, nothing counted twice."""

import json
from pathlib import Path
from typing import Any

import pytest
import synthetic as made

from flashnext.bench import samples as files
from flashnext.bench.matching import halves
from flashnext.bench.plan import items
from flashnext.bench.samples import Samples, Writer
from flashnext.errors import SamplesUnreadableError, StateNotWritableError


def write(path: Path, rows: list[files.Row]) -> None:
    with Writer(path) as writer:
        for row in rows:
            writer.add(row)


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    rows = made.rows(made.plan(made.scenario("decode")))
    write(tmp_path / "samples.jsonl", rows)
    found = files.read(tmp_path / "samples.jsonl")
    assert [*found.headers, *found.processes, *found.requests, *found.ends.values()] == [
        *(r for r in rows if isinstance(r, files.Header)),
        *(r for r in rows if isinstance(r, files.Process)),
        *(r for r in rows if isinstance(r, files.Request)),
        *(r for r in rows if isinstance(r, files.End)),
    ]


def test_a_process_without_its_end_is_not_counted_and_its_repeat_is() -> None:
    plan = made.plan(made.scenario("decode"))
    first = plan.sessions[0]
    item = next(items(plan, first))
    rows: list[files.Row] = [
        made.header(plan),
        made.process(first, attempt=1),
        made.request(first, item, 1, 1, process="0.1"),
        made.process(first, attempt=2),
        made.request(first, item, 2, 2, process="0.2"),
        made.end("0.2", 1),
    ]
    found = Samples(rows)
    assert [r.process for r in found.requests] == ["0.2"]
    assert (found.unfinished, found.done_for(""), found.attempts) == (1, {0}, {0: 2})


def test_two_complete_attempts_count_once() -> None:
    plan = made.plan(made.scenario("decode"))
    first = plan.sessions[0]
    item = next(items(plan, first))
    rows: list[files.Row] = [made.header(plan)]
    for attempt in (1, 2):
        name = f"0.{attempt}"
        rows += [
            made.process(first, attempt),
            made.request(first, item, 1, 1, process=name),
            made.end(name, 1),
        ]
    assert [r.process for r in Samples(rows).requests] == ["0.1"]


def in_sittings(*parts: tuple[str, list[int]]) -> Samples:
    """Complete processes of these indexes, each in its sitting."""
    plan = made.plan(made.scenario("decode"))
    rows: list[files.Row] = []
    attempts: dict[int, int] = {}
    for place, (sitting, indexes) in enumerate(parts):
        rows.append(made.header(plan).model_copy(update={"sitting": sitting}))
        for index in indexes:
            session = plan.sessions[index]
            attempts[index] = attempts.get(index, 0) + 1
            name = f"{index}.{attempts[index]}"
            rows += [
                made.process(session, attempts[index]).model_copy(update={"process": name}),
                made.request(session, next(items(plan, session)), 1, 100 + place, process=name),
                made.end(name, 1),
            ]
    return Samples(rows)


def test_arms_are_compared_within_one_sitting_alone() -> None:
    # two half blocks of two arms: the second is begun on one machine, and another would end it
    split = in_sittings(("a", [0, 1, 2]), ("b", [3]))
    assert [(p.index, q.index) for p, q in halves(split, "control", "candidate")] in ([(0, 1)], [(1, 0)])
    assert split.done_for("b") == {0, 1}
    assert in_sittings(("a", [0, 1, 2])).done_for("b") == {0, 1}
    assert in_sittings(("a", [0, 1, 2])).done_for("a") == {0, 1, 2}
    whole = in_sittings(("a", [0, 1, 2]), ("b", [2, 3]))
    assert len(list(halves(whole, "control", "candidate"))) == 2
    assert {p.process: whole.sitting[p.process] for p in whole.processes} == {
        "0.1": "a", "1.1": "a", "2.2": "b", "3.1": "b",
    }  # fmt: skip
    assert whole.done_for("c") == {0, 1, 2, 3}
    assert whole.unfinished == 0
    again = in_sittings(("a", [0, 1]), ("b", [0, 1]))
    assert {again.sitting[p.process] for p in again.processes} == {"a"}, "the first of two equals counts"


def test_a_torn_line_is_passed_over_and_the_next_writer_starts_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    rows = made.rows(made.plan(made.scenario("decode")))
    write(path, rows[:1])
    with path.open("a") as stream:
        stream.write('{"type": "request", "proc')
    write(path, rows[1:])
    found = files.read(path)
    assert found.torn == 1
    assert len(found.processes) == 12


def test_a_line_that_is_no_row_is_an_error_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('{"type": "request", "speed": 5}\n')
    with pytest.raises(SamplesUnreadableError, match=r"samples.jsonl:1"):
        files.read(path)


def lines(*rows: files.Row) -> list[dict[str, Any]]:
    return [json.loads(row.model_dump_json()) for row in rows]


@pytest.mark.parametrize(
    ("number", "changes", "words"),
    [
        (0, {"schema_version": 2}, "another version"),
        (0, {"plan": {}}, "no plan of a run"),
        (0, {"plan": {"sessions": "none"}}, "no plan of a run"),
        (1, {"arm": "mine"}, "its plan does not have"),
        (1, {"index": 99}, "its plan does not have"),
        (2, {"speed": 5}, "speed"),
        (2, {"type": "answer"}, "not a row of samples"),
    ],
)
def test_what_somebody_edited_or_another_version_wrote_is_refused(
    tmp_path: Path, number: int, changes: dict[str, Any], words: str
) -> None:
    plan = made.plan(made.scenario("decode"))
    first = plan.sessions[0]
    rows = lines(
        made.header(plan), made.process(first), made.request(first, next(items(plan, first)), 1, 1),
        made.end("0.1", 1),
    )  # fmt: skip
    rows[number].update(changes)
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SamplesUnreadableError) as caught:
        files.read(path)
    assert words in " ".join([caught.value.message, *caught.value.context])


def test_a_process_whose_first_line_is_damaged_is_replaced_not_added_to(tmp_path: Path) -> None:
    plan = made.plan(made.scenario("decode"))
    first = plan.sessions[0]
    whole: list[files.Row] = [
        made.process(first), made.request(first, next(items(plan, first)), 1, 50), made.end("0.1", 1)
    ]  # fmt: skip
    path = tmp_path / "samples.jsonl"
    write(path, [made.header(plan)])
    with path.open("a") as stream:
        stream.write('{"type": "process", "pro\n')
    write(path, whole[1:])
    assert files.read(path).done_for("") == set()
    write(path, whole)  # as the run that resumes does, by the same name
    found = files.read(path)
    assert len(found.requests) == 1 and found.done_for("") == {0}


def test_a_full_disk_has_its_reason() -> None:
    writer = Writer(Path("/dev/full"))
    with pytest.raises(StateNotWritableError, match="No space left"):
        writer.add(made.header(made.plan(made.scenario("decode"))))


def test_bytes_that_are_no_text_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SamplesUnreadableError):
        files.read(tmp_path / "samples.jsonl")


def test_no_file_and_no_header_are_errors(tmp_path: Path) -> None:
    with pytest.raises(SamplesUnreadableError):
        files.read(tmp_path / "samples.jsonl")
    with pytest.raises(SamplesUnreadableError, match="no header"):
        _ = Samples([]).header
