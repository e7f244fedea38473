"""samples.jsonl: everything a run observed, append-only, one JSON object a line.

Rows, by ``type``:

- ``header``   first line of every invocation: what was asked, the frozen plan and gates, facts of the host;
- ``process``  a server process became ready: arm, place in the order, pid, environment check, build;
- ``request``  one request: the server's raw timings, the client's clock, the answer;
- ``end``      that process ended in order: counts of its markers, what was wrong.

Requests count only when their process has its ``end``: a process that was cut off leaves rows that are never
read, and the run that resumes does that process again from the start under the next attempt number. Arms are
compared within a half block of one sitting (one boot of one machine): a half block that one sitting began and
did not finish is done again, whole, by the next.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from flashnext.artefacts import Artefact, state_written
from flashnext.bench.plan import Plan
from flashnext.errors import SamplesUnreadableError

NAME = "samples.jsonl"
SCHEMA = 1


class Header(Artefact):
    """One invocation of the bench. ``plan`` and ``gates`` are the frozen data of the run, as JSON."""

    type: Literal["header"] = "header"
    schema_version: int = SCHEMA
    sitting: str = Field("", description="one boot of one machine")
    created: str
    command: list[str]
    profile: str
    seed: int
    plan: dict[str, Any]
    gates: dict[str, Any]
    facts: dict[str, Any]


class Process(Artefact):
    """A server process at the moment it became ready. ``process`` is ``<index>.<attempt>``."""

    type: Literal["process"] = "process"
    process: str
    index: int
    attempt: int
    arm: str
    block: int
    half: int
    place: int = Field(description="position among all processes of the run: the order in time")
    pid: int | None
    started: str
    ready_s: float = Field(description="seconds from start to ready")
    argv: tuple[str, ...] = ()
    environment: dict[str, str] = Field(
        default_factory=dict, description="LLAMA_*, GGML_* and CUDA_* of the process itself, read from /proc"
    )
    facts: dict[str, Any] = Field(default_factory=dict)


class Request(Artefact):
    """One request. ``item`` is the same in every arm, so that answers can be matched."""

    type: Literal["request"] = "request"
    process: str
    scenario: str
    cell: str
    item: str
    depth: int
    seed: int
    started: str
    wall_ms: float
    ttft_ms: float | None = None
    timings: dict[str, Any] = Field(default_factory=dict, description="as llama-server sent them, untouched")
    text: str = ""
    top: list[tuple[int, float]] = Field(
        default_factory=list,
        description="token id and log probability of the first token's likeliest, then of a spread of others",
    )
    vocabulary: int | None = Field(None, description="tokens that the spread was drawn from")
    correct: bool | None = None
    memory: list[tuple[float, list[int]]] = Field(
        default_factory=list, description="ms since the request began, bytes in use on each device"
    )
    prefill_times: dict[str, Any] | None = Field(
        None,
        description="payload of the marker prefill:times of this prompt, where its process times prompts",
    )
    cancelled: bool = False
    error: str | None = None


class End(Artefact):
    """How a process ended. ``problems`` is empty for a run that may be believed."""

    type: Literal["end"] = "end"
    process: str
    ended: str
    requests: int
    prompts: int = Field(description="requests whose prompt the server worked on")
    begins: int
    ends: int
    used_bytes: list[int] = Field(default_factory=list, description="on each device, at the end")
    problems: tuple[str, ...] = ()
    transitions: list[dict[str, Any]] = Field(
        default_factory=list, description="payloads of the phase markers"
    )


Row = Header | Process | Request | End
_ROW: TypeAdapter[Row] = TypeAdapter(Annotated[Row, Field(discriminator="type")])


class Samples:
    """What a samples file says: complete processes only (see the module's text)."""

    def __init__(self, rows: Iterable[Row], torn: int = 0) -> None:
        self.headers: list[Header] = []
        self.torn = torn
        started: dict[str, Process] = {}
        requests: dict[str, list[Request]] = {}
        ends: dict[str, End] = {}
        sitting = ""
        self.sitting: dict[str, str] = {}
        for row in rows:
            if isinstance(row, Header):
                self.headers.append(row)
                sitting = row.sitting
            elif isinstance(row, Process):
                started[row.process] = row
                self.sitting[row.process] = sitting
            elif row.process not in started:
                continue  # its first line is damaged: the next attempt has its name and is counted instead
            elif isinstance(row, Request):
                requests.setdefault(row.process, []).append(row)
            else:
                ends.setdefault(row.process, row)
        complete = [process for name, process in started.items() if name in ends]
        chosen = self._choose(complete)
        self.processes = [started[name] for _, name in sorted(chosen.items())]
        self.requests = [r for p in self.processes for r in requests.get(p.process, [])]
        self.ends = {p.process: ends[p.process] for p in self.processes}
        self.unfinished = sum(name not in ends for name in started)
        self.attempts = {p.index: 0 for p in started.values()}
        for process in started.values():
            self.attempts[process.index] = max(self.attempts[process.index], process.attempt)

    def _half(self, process: Process) -> tuple[str, int, int]:
        """The half block that a process belongs to."""
        return (self._groups.get(process.index, ""), process.block, process.half)

    @cached_property
    def _groups(self) -> dict[int, str]:
        sessions = self.headers[0].plan.get("sessions", ()) if self.headers else ()
        return {s["index"]: s["group"] for s in sessions}

    def _choose(self, complete: Sequence[Process]) -> dict[int, str]:
        """Index -> the process that counts: of the sitting that has most of its half block, the first."""
        count = Counter((self._half(p), self.sitting[p.process], p.index) for p in complete)
        width = Counter((half, sitting) for half, sitting, _ in count)
        chosen: dict[int, Process] = {}
        for process in complete:
            now = chosen.get(process.index)
            if now is None or (
                width[self._half(process), self.sitting[process.process]]
                > width[self._half(now), self.sitting[now.process]]
            ):
                chosen[process.index] = process
        return {index: process.process for index, process in chosen.items()}

    def done_for(self, sitting: str) -> set[int]:
        """Indexes that a run in this sitting need not do: whole half blocks, and what it has done itself."""
        planned = Counter((s["group"], s["block"], s["half"]) for s in self.header.plan["sessions"])
        of_half: dict[tuple[str, int, int], list[Process]] = {}
        for process in self.processes:
            of_half.setdefault(self._half(process), []).append(process)
        done: set[int] = set()
        for half, processes in of_half.items():
            sittings = {self.sitting[p.process] for p in processes}
            if len(sittings) == 1 and (len(processes) == planned[half] or sittings == {sitting}):
                done |= {p.index for p in processes}
        return done

    @property
    def header(self) -> Header:
        if not self.headers:
            raise SamplesUnreadableError("the samples have no header line")
        return self.headers[0]


def file_in(folder: Path) -> Path:
    return folder / NAME


def read(path: Path) -> Samples:
    """Read samples. A torn line (its writer was killed) is counted; any other line must be a row.

    Raises SamplesUnreadableError: no such file, a line that is no row, another version's format, or processes
    that the plan in the header does not have.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SamplesUnreadableError(f"cannot read {path}", context=[str(error)]) from None
    rows: list[Row] = []
    torn = 0
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            data = json.loads(line)
        except ValueError:
            torn += 1  # the next writer began on a new line
            continue
        version = data.get("schema_version", SCHEMA) if isinstance(data, dict) else SCHEMA
        if version != SCHEMA:
            raise SamplesUnreadableError(
                f"{path}:{number} was written by another version of flashnext",
                context=[f"its format is {version}, this version reads {SCHEMA}"],
                hint="read it with the version that wrote it, or begin a new --out folder",
            )
        try:
            rows.append(_ROW.validate_python(data))
        except ValidationError as error:
            raise SamplesUnreadableError(
                f"{path}:{number} is not a row of samples",
                context=_lines(error),
            ) from None
    arms = _planned_arms(path, rows)
    samples = Samples(rows, torn)
    strange = [f"{p.process}, arm {p.arm}" for p in samples.processes if arms.get(p.index) != p.arm]
    if samples.headers and strange:  # somebody's edit: what it stands for would never be run
        raise SamplesUnreadableError(f"{path} has processes that its plan does not have", context=strange[:4])
    return samples


def _planned_arms(path: Path, rows: Iterable[Row]) -> dict[int, str]:
    """Index of a session -> its arm, by the first header; empty where there is none."""
    header = next((row for row in rows if isinstance(row, Header)), None)
    if header is None:
        return {}
    try:
        return {s.index: s.arm for s in Plan.model_validate(header.plan).sessions}
    except ValidationError as error:
        what = f"the header of {path} holds no plan of a run"
        raise SamplesUnreadableError(what, context=_lines(error)) from None


def _lines(error: ValidationError) -> list[str]:
    return [f"{'.'.join(map(str, e['loc'])) or 'it'}: {e['msg']}" for e in error.errors()[:4]]


class Writer:
    """Appends rows; a row is on the disk when ``add`` returns. One writer at a time (the caller locks).

    Raises StateNotWritableError; a part of a row that it leaves is a torn line for the reader.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with state_written(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            if _ends_in_mid_line(path):
                os.write(self._handle, b"\n")

    def add(self, row: Row) -> None:
        data = row.model_dump_json(exclude_defaults=False).encode() + b"\n"
        with state_written(self._path):
            while data:  # a disk that becomes full takes a part, and says why at the next try
                data = data[os.write(self._handle, data) :]
            os.fsync(self._handle)

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._handle)


def _ends_in_mid_line(path: Path) -> bool:
    size = path.stat().st_size
    if not size:
        return False
    with path.open("rb") as stream:
        stream.seek(size - 1)
        return stream.read(1) != b"\n"


def by_process(requests: Iterable[Request]) -> Iterator[tuple[str, list[Request]]]:
    """Requests grouped by process, in order of appearance."""
    groups: dict[str, list[Request]] = {}
    for request in requests:
        groups.setdefault(request.process, []).append(request)
    yield from groups.items()
