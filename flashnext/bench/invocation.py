"""One call of `flashnext bench <scenario>`: from options to a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flashnext import builds, paths
from flashnext.bench import facts as bench_facts
from flashnext.bench import link, report, running
from flashnext.bench.arms import Configured, from_commands, from_profile
from flashnext.bench.driver import Options, Progress
from flashnext.bench.extra import check_extra
from flashnext.bench.gates import Gates, Outcome, gate_names, load_gates
from flashnext.bench.hold import vram_limit
from flashnext.bench.occupied import free_of_services
from flashnext.bench.plan import Plan, make_plan
from flashnext.bench.quality import QUESTIONS
from flashnext.bench.scenarios import load_pace, load_scenarios, settings_names
from flashnext.errors import FlashnextError, GateFailedError, InconclusiveError, UsageError

ALL = "all"
DEFAULT_ARMS = ("control", "candidate")


@dataclass(frozen=True)
class Asked:
    """What the command line asks for. ``limit_bytes`` is the memory that every device shall have free."""

    what: str
    profile: str
    arms: tuple[str, ...] = ()  # none named: DEFAULT_ARMS
    commands: tuple[str, ...] = ()
    builds: tuple[str, ...] = ()
    out: Path | None = None
    seed: int = 1
    processes: int | None = None
    limit_bytes: int | None = None
    stop_service: bool = False
    max_minutes: float | None = None
    start_limit_s: float = 900.0
    watch_memory: bool = True
    serve_options: tuple[str, ...] = ()
    settings: str | None = None
    gates_file: Path | None = None


@dataclass(frozen=True)
class Prepared:
    """Everything that is decided before anything starts."""

    asked: Asked
    folder: Path
    plan: Plan
    gates: Gates
    configured: Configured


def prepare(asked: Asked) -> Prepared:
    """Load scenarios and gates, derive the arms, make the plan. Starts nothing, writes nothing."""
    folder = (
        asked.out or paths.bench_runs_dir() / f"{asked.what}-{asked.profile.replace('/', '-')}"
    ).resolve()
    if asked.commands:
        if asked.arms or asked.builds:
            raise UsageError(
                "--server-command names all arms of its run: it does not go with --arm or --build",
                context=[*asked.arms, *asked.builds],
                hint="give every arm by --server-command, or every arm by --arm",
            )
        configured = from_commands(asked.commands)
    else:
        named = _pairs(asked.builds)
        for key in named.values():
            builds.get_build(key)
        configured = from_profile(asked.profile, asked.arms or DEFAULT_ARMS, folder / "arms", named=named)
    scenarios = load_scenarios()
    if asked.settings is not None:
        known = settings_names(scenarios.values(), gate_names(asked.gates_file))
        if asked.settings not in known:
            raise UsageError(f"there are no settings called {asked.settings!r}", context=[", ".join(known)])
    if asked.what != ALL and asked.what not in scenarios:
        raise UsageError(f"there is no scenario {asked.what}", context=[", ".join(scenarios)])
    name = asked.settings or Path(asked.profile).stem
    chosen = [
        s
        for s in scenarios.values()
        if asked.what == s.id or (asked.what == ALL and s.for_profile(name).in_all)
    ]
    plan = make_plan(
        chosen,
        profile=name,
        arms=[a.name for a in configured.arms],
        seed=asked.seed,
        pace=load_pace(name),
        processes=asked.processes,
        context=configured.context,
    )
    return Prepared(asked, folder, plan, load_gates(name, asked.gates_file), configured)


def _pairs(entries: Sequence[str]) -> dict[str, str]:
    found = {}
    for entry in entries:
        arm, equals, key = entry.rpartition("=")
        if not equals or not arm or not key:
            raise UsageError(f"{entry!r} is not ARM=KEY")
        found[arm] = key
    return found


def planned_questions(plan: Plan) -> dict[str, int]:
    return {s.id: QUESTIONS for s in plan.scenarios if s.kind == "quality"}


def execute(
    prepared: Prepared, *, command: Sequence[str], on_progress: Callable[[Progress], None]
) -> tuple[report.Reported, bool]:
    """Run what is left and write the report; the second value is whether every process has run."""
    asked = prepared.asked
    check_extra()  # before hours of measuring, not behind them
    if not prepared.plan.sessions:
        raise UsageError("there is nothing to measure", context=prepared.plan.left_out)
    with running.folder_lock(prepared.folder), running.only_bench():
        before = running.existing(prepared.folder)
        if before is not None:  # before a service is stopped for it, and before anything is written
            running.check_same(before, prepared.plan, prepared.gates)
        with free_of_services(stop=asked.stop_service, measured=_measured_ports(prepared)) as stopped:
            return _measured(prepared, stopped, command=command, on_progress=on_progress)


def _measured_ports(prepared: Prepared) -> set[int]:
    """Services that are measured themselves; none where other arms' servers would run beside them."""
    arms = prepared.configured.arms
    if not all(arm.url is not None for arm in arms):
        return set()
    return {urlsplit(arm.url or "").port or 80 for arm in arms}


def _measured(
    prepared: Prepared,
    remarks: Sequence[str],
    *,
    command: Sequence[str],
    on_progress: Callable[[Progress], None],
) -> tuple[report.Reported, bool]:
    asked, configured = prepared.asked, prepared.configured
    with vram_limit(asked.limit_bytes) as held:
        pass  # whether it can be held at all is known before the first process; each has its own
    configured.write()
    facts = bench_facts.collect(configured.arms, [*configured.remarks, *remarks], configured.profile_facts)
    facts |= _devices_facts(asked, held, has_gpu=bool(facts["gpu"].get("cards")))
    options = Options(
        start_limit_s=asked.start_limit_s,
        serve=asked.serve_options,
        max_s=asked.max_minutes * 60 if asked.max_minutes is not None else None,
        watch_memory=asked.watch_memory,
        limit_bytes=asked.limit_bytes,
        on_progress=on_progress,
    )
    run = partial(running.run, prepared.folder, prepared.plan, prepared.gates, configured.arms)
    try:
        done = run(command=command, facts=facts, options=options)
    except (KeyboardInterrupt, SystemExit):
        with suppress(FlashnextError):  # of what was finished; the same command goes on from there
            report.write(prepared.folder)
        raise
    return report.write(prepared.folder), done


def _devices_facts(asked: Asked, held: list[dict[str, Any]], *, has_gpu: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if asked.limit_bytes is not None:
        found["vram_limit"] = {"left_free_bytes": asked.limit_bytes, "held": held}
    if has_gpu:
        found["link"] = link.probe()
    return found


def raise_outcome(reported: report.Reported, done: bool) -> None:
    """Exit codes: 9 for a gate that failed, 10 for too little data."""
    failed = [f"{g.id}: {g.text}" for g in reported.gates if g.outcome == Outcome.FAILED]
    thin = [f"{g.id}: {g.text}" for g in reported.gates if g.outcome == Outcome.TOO_LITTLE]
    if failed:
        raise GateFailedError(f"{len(failed)} of {len(reported.gates)} gates failed", context=failed)
    if not done:
        raise InconclusiveError(
            "the time was used up before every process had run",
            context=thin,
            hint="give the same command again: it goes on where it stopped",
        )
    if reported.outcome == Outcome.TOO_LITTLE:
        raise InconclusiveError(
            "too little data for a verdict" if thin else "no gate is declared for this run", context=thin
        )
