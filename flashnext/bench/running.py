"""A whole invocation: the folder, its lock, resuming, the header, the plan's run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from flashnext import paths
from flashnext.artefacts import state_written
from flashnext.bench import samples as sample_files
from flashnext.bench.arms import Arm
from flashnext.bench.asking import now
from flashnext.bench.driver import Driver, Options
from flashnext.bench.gates import Gates
from flashnext.bench.plan import Plan
from flashnext.bench.samples import Header, Samples, Writer
from flashnext.errors import GpuBusyError, LockedError, SamplesMismatchError


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """One bench per folder."""
    with _locked(folder / ".lock", LockedError(f"another bench writes to {folder}")):
        yield


@contextmanager
def only_bench() -> Iterator[None]:
    """One bench of a user at a time. Its servers are not always services that another would see."""
    hint = "wait until it has ended: two at once would measure each other"
    with _locked(
        paths.bench_runs_dir() / ".running", GpuBusyError("another bench is running here", hint=hint)
    ):
        yield


@contextmanager
def _locked(file: Path, held: LockedError) -> Iterator[None]:
    lock = FileLock(file)
    with state_written(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise held from None
    try:
        yield
    finally:
        lock.release()


def sitting() -> str:
    """This boot of this machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def existing(folder: Path) -> Samples | None:
    """The samples of a folder that was begun before, None for a new one."""
    path = sample_files.file_in(folder)
    if not path.exists() or not path.stat().st_size:
        return None
    found = sample_files.read(path)
    return found if found.headers else None


def check_same(before: Samples, plan: Plan, gates: Gates) -> None:
    """A run is resumed only with the plan and gates it began with. Raises SamplesMismatchError."""
    header = before.header
    wanted = plan.model_dump(mode="json")
    # the pace is a guess of the time, no part of what is measured
    different = [k for k, value in wanted.items() if k != "pace" and header.plan.get(k) != value]
    if header.gates != gates.model_dump(mode="json"):
        different.append("gates")
    if different:
        raise SamplesMismatchError(
            "this folder holds a run with another plan", context=[f"different: {', '.join(different)}"]
        )


def check_same_arms(before: Samples, facts: Mapping[str, Any]) -> None:
    """Nor with other arms (builds by their content, kill switches) or another limit on memory."""
    first = before.header.facts
    different = [key for key in _FIXED if _fixed(first, key) != _fixed(facts, key)]
    if different:
        context = [f"{key}: {_fixed(first, key)} then, {_fixed(facts, key)} now" for key in different]
        raise SamplesMismatchError("this folder holds a run of other arms", context=context)


_FIXED = ("arms", "vram_limit")


def _fixed(facts: Mapping[str, Any], key: str) -> Any:
    found = facts.get(key) or {}
    return found.get("left_free_bytes") if key == "vram_limit" else found


def run(
    folder: Path,
    plan: Plan,
    gates: Gates,
    arms: Sequence[Arm],
    *,
    command: Sequence[str],
    facts: Mapping[str, Any],
    options: Options,
) -> bool:
    """Run or resume a plan in ``folder`` (the caller holds its lock). True when every process has run."""
    before = existing(folder)
    if before is not None:
        check_same(before, plan, gates)
        check_same_arms(before, facts)
    options = replace(options, sitting=sitting())
    driver = Driver(plan, {a.name: a for a in arms}, folder, before, options)
    if before is not None and not driver.left:
        return True
    with Writer(sample_files.file_in(folder)) as writer:
        writer.add(
            Header(
                sitting=options.sitting,
                created=now(),
                command=list(command),
                profile=plan.profile,
                seed=plan.seed,
                plan=plan.model_dump(mode="json"),
                gates=gates.model_dump(mode="json"),
                facts=dict(facts),
            )
        )
        return driver.run(writer)
