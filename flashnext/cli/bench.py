"""`flashnext bench`: measure arms against each other, report, compare."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashnext.console import people, print_data, print_json, progress, say, tell
from flashnext.errors import FlashnextError
from flashnext.proc import is_nohup

if TYPE_CHECKING:
    from flashnext.bench.driver import Progress
    from flashnext.bench.invocation import Asked, Prepared
    from flashnext.bench.report import Reported

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Measure arms against each other: is it faster, and is it not worse?",
)

SCENARIOS = {
    "prefill": "Reading a fresh prompt, over depth.",
    "decode": "Writing after a prompt, by seed and depth.",
    "transition": "The fixed cost of one transition.",
    "logits": "Log probabilities of the first token.",
    "quality": "Questions over long documents, graded exactly.",
    "times": "Where the time of a prompt goes, by kind of work.",
    "soak": "Mixed prompts and clients that leave, for a long time.",
    "all": "Every scenario in one run.",
}

Profile = Annotated[str, typer.Option(metavar="NAME", help="Name of a shipped profile, or a .yaml file.")]
Arms = Annotated[
    list[str] | None,
    typer.Option(
        "--arm",
        help="control, candidate, transaction, bypass, vanilla, resident, ubatch:TOKENS, without:FEATURE; "
        "repeat.",
    ),
]
Commands = Annotated[
    list[str] | None,
    typer.Option(
        "--server-command", metavar="ARM=COMMAND", help="Arms by command line ({port}) or http:// address."
    ),
]
Builds = Annotated[
    list[str] | None, typer.Option("--build", metavar="ARM=KEY", help="Another build for an arm.")
]
Out = Annotated[Path | None, typer.Option(help="Folder of samples and report; an existing run is resumed.")]
Seed = Annotated[int, typer.Option(min=0, help="Of prompts and of the order of arms.")]
Processes = Annotated[int | None, typer.Option(min=2, help="Server processes per arm (even).")]
ShowPlan = Annotated[bool, typer.Option("--plan", help="Show what would run, and stop.")]
Limit = Annotated[
    str | None,
    typer.Option("--vram-limit", metavar="SIZE", help="Hold all but this much of every device, e.g. 24GiB."),
]
StopService = Annotated[
    bool, typer.Option("--stop-service", help="Stop a running service for the run, and start it again.")
]
MaxMinutes = Annotated[float | None, typer.Option(min=0, help="Stop between half blocks after so long.")]
StartLimit = Annotated[
    float, typer.Option("--start-limit", min=0, help="Seconds until a server must be ready.")
]
NoMemory = Annotated[bool, typer.Option("--no-memory", help="Do not watch the devices' memory.")]
Settings = Annotated[
    str | None, typer.Option(help="Settings, pace and gates of this name instead of the profile's own.")
]
GatesFile = Annotated[Path | None, typer.Option("--gates", help="Gates instead of bench/gates.yaml.")]
Model = Annotated[Path | None, typer.Option(help="Model file, instead of the profile's path.")]
Head = Annotated[Path | None, typer.Option(help="Draft head, instead of the profile's path.")]
AsJson = Annotated[bool, typer.Option("--json", help="Plan, result or error as JSON.")]


def _scenario_command(what: str) -> Callable[..., None]:
    def run(
        profile: Profile = "demo",
        arm: Arms = None,
        server_command: Commands = None,
        build: Builds = None,
        out: Out = None,
        seed: Seed = 1,
        processes: Processes = None,
        show_plan: ShowPlan = False,
        vram_limit: Limit = None,
        stop_service: StopService = False,
        max_minutes: MaxMinutes = None,
        start_limit_s: StartLimit = 900.0,
        no_memory: NoMemory = False,
        settings: Settings = None,
        gates: GatesFile = None,
        model: Model = None,
        head: Head = None,
        as_json: AsJson = False,
    ) -> None:
        from flashnext.bench.hold import parse_size
        from flashnext.bench.invocation import Asked

        options = [*(["--model", str(model)] if model else []), *(["--head", str(head)] if head else [])]
        asked = Asked(
            what=what,
            profile=profile,
            arms=tuple(arm or ()),
            commands=tuple(server_command or ()),
            builds=tuple(build or ()),
            out=out,
            seed=seed,
            processes=processes,
            limit_bytes=parse_size(vram_limit) if vram_limit else None,
            stop_service=stop_service,
            max_minutes=max_minutes,
            start_limit_s=start_limit_s,
            watch_memory=not no_memory,
            serve_options=tuple(options),
            settings=settings,
            gates_file=gates,
        )
        _run(asked, show_plan=show_plan, as_json=as_json)

    run.__doc__ = SCENARIOS[what]
    return run


for _name in SCENARIOS:
    app.command(_name)(_scenario_command(_name))


def _run(asked: Asked, *, show_plan: bool, as_json: bool) -> None:
    from flashnext.bench.invocation import execute, prepare, raise_outcome

    prepared = prepare(asked)
    if show_plan:
        _show_plan(prepared, as_json=as_json)
        return
    for remark in [*prepared.configured.remarks, *(f"left out: {t}" for t in prepared.plan.left_out)]:
        say(f"note: {remark}")
    ended = Ended()
    try:
        with progress() as bar:
            task = bar.add_task(asked.what, total=len(prepared.plan.sessions))
            asked_servers = False

            def report_progress(now: Progress) -> None:
                nonlocal asked_servers
                asked_servers = True
                ended.check()
                text = f"{now.session.arm}, block {now.session.block + 1}: {now.text}"
                text += f", {_minutes(now.left_s)} left"
                bar.update(task, completed=now.done, description=text)
                if bar.disable:
                    say(f"[{now.done}/{now.total}] {text}")

            command = ["flashnext", *sys.argv[1:]]
            reported, done = execute(prepared, command=command, on_progress=report_progress)
    except SystemExit:
        if ended.by is not None:
            _say_how_to_go_on(prepared, ended.by)
        raise
    if done and not asked_servers:
        say("note: every process of this run has run before; to measure again, use another --out folder")
    if not as_json:
        _show_report(reported, as_json=False)
        raise_outcome(reported, done)
        return
    try:
        raise_outcome(reported, done)
    except FlashnextError as error:  # one document, with what was found beside what is wrong with it
        _show_report(reported, as_json=True, error=error)
        raise typer.Exit(error.exit_code) from None
    _show_report(reported, as_json=True)


def _say_how_to_go_on(prepared: Prepared, number: int) -> None:
    from flashnext.bench.running import existing

    run = 0
    with suppress(FlashnextError):
        found = existing(prepared.folder)
        run = len(found.processes) if found is not None else 0
    of = len(prepared.plan.sessions)
    text = f"ended by {signal.Signals(number).name}: {run} of {of} processes have run"
    tell(sys.stderr, f"{text}; the same command goes on from there (samples in {prepared.folder})")


class Ended:
    """TERM, Ctrl-C and a closed terminal unwind, so that the server ends and the report is written.

    What a handler raises while the interpreter forks is lost: ``check`` raises it again at the next step.
    """

    def __init__(self) -> None:
        self.by: int | None = None
        self._terminals = [stream.fileno() for stream in (sys.stdout, sys.stderr) if stream.isatty()]
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if not is_nohup(number):
                signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: object) -> None:
        self.by = number
        if number == signal.SIGHUP:
            self._leave_terminals()
        self.check()

    def _leave_terminals(self) -> None:
        """They are closed: what is written to them on the way out would be an error that hides the end."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for handle in self._terminals:
            os.dup2(nowhere, handle)
        os.close(nowhere)

    def check(self) -> None:
        if self.by is not None:
            raise SystemExit(128 + self.by)


def _show_plan(prepared: Prepared, *, as_json: bool) -> None:
    from flashnext.bench.invocation import planned_questions
    from flashnext.bench.plan import estimate_s, items

    plan = prepared.plan
    if as_json:
        print_json({"folder": str(prepared.folder), **plan.model_dump(mode="json")})
        return
    questions = planned_questions(plan)
    print_data(f"profile {plan.profile}, seed {plan.seed}, arms {', '.join(plan.arms)}")
    for scenario in plan.scenarios:
        cells = ", ".join(f"{c.depth} tokens x {c.requests}" for c in scenario.cells)
        print_data(f"{scenario.id}: {scenario.title}; {cells}; warm-up {scenario.warm_up}")
    total = 0.0
    for session in plan.sessions:
        seconds = estimate_s(plan, session, questions=questions)
        total += seconds
        count = sum(questions.get(i.scenario, 1) for i in items(plan, session))
        place = f"block {session.block + 1}{'ab'[session.half]}"
        text = f"{session.index:3} {session.group:8} {place:9} {session.arm:12} {count:4} requests"
        print_data(f"{text}  {seconds:6.0f} s")
    for gate in prepared.gates.gates:
        print_data(f"gate {gate.id} ({gate.kind}){': ' + gate.why if gate.why else ''}")
    for text in (*plan.left_out, *prepared.configured.remarks):
        print_data(f"note: {text}")
    print_data(f"about {_minutes(total)}, by the guess in bench/pace.yaml; samples in {prepared.folder}")


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _show_report(reported: Reported, *, as_json: bool, error: FlashnextError | None = None) -> None:
    if as_json:
        gates = [g.model_dump(mode="json") for g in reported.gates]
        found = {"folder": str(reported.folder), "outcome": str(reported.outcome), "gates": gates}
        print_json(found if error is None else {**found, **error.to_json()})
        return
    for gate in reported.gates:
        say(f"{gate.outcome}: {gate.id}: {gate.text}")
    print_data(str(reported.folder / "report.html"))


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder with a samples.jsonl.")], as_json: AsJson = False
) -> None:
    """Write result and report again, from the samples alone."""
    from flashnext.bench.extra import check_extra
    from flashnext.bench.report import write

    check_extra()
    _show_report(write(folder), as_json=as_json)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="A result.json, or its folder.")],
    b: Annotated[Path, typer.Argument(help="Another.")],
    as_json: AsJson = False,
) -> None:
    """Two results side by side (B over A)."""
    from flashnext.bench import compare as comparing

    first, second = comparing.load(a), comparing.load(b)
    rows, different = comparing.compare(first, second), comparing.differences(first, second)
    if as_json:
        print_json(comparing.as_json(rows, different))
        return
    if not rows:
        say("the two have no cell of one arm in common")
        say(f"A: {comparing.contents(first)}")
        say(f"B: {comparing.contents(second)}")
        return
    _table(
        ["scenario", "metric", "cell", "arm", "A", "B", "B / A", "interval", "n", "verdict"],
        [
            [
                r.scenario, r.metric, r.cell, r.arm, f"{r.a:.4g}", f"{r.b:.4g}", f"{r.ratio:.3f}",
                "-" if r.low is None else f"{r.low:.3f} to {r.high:.3f}", r.n, r.verdict,
            ]
            for r in rows
        ],
    )  # fmt: skip
    for line in (comparing.CAUTION, *different):
        say(f"note: {line}")


@app.command()
def timeline(
    file: Annotated[Path, typer.Argument(help="JSON lines of lean-prefill's timeline.")],
    out: Annotated[Path, typer.Option(help="The plot, an .svg file.")],
    number: Annotated[
        int | None, typer.Option("--pass", help="Which pass; default: the last of the largest.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw the uploads of a prompt's pass over its compute."""
    from flashnext.artefacts import state_written, write_atomic
    from flashnext.bench import timeline as lanes

    passes = lanes.read(file)
    chosen = lanes.choose(passes, number)
    with state_written(out):
        write_atomic(out, lanes.svg(chosen))
    if as_json:
        print_json({"plot": str(out), "passes": [p.summary() for p in passes]})
        return
    for found in passes:
        say(lanes.text(found))
    print_data(str(out))


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="Output of `llama-bench -o json`.")],
    out: Annotated[Path, typer.Option(help="Folder for the samples and report, a new one.")],
    arm: Annotated[str, typer.Option(help="Name of the arm that it becomes.")] = "llama-bench",
    as_json: AsJson = False,
) -> None:
    """Take over a run of llama-bench as samples of one process."""
    from flashnext.bench import llama_bench
    from flashnext.bench.asking import now
    from flashnext.bench.extra import check_extra
    from flashnext.bench.report import write
    from flashnext.bench.running import folder_lock
    from flashnext.bench.samples import Writer, file_in
    from flashnext.errors import SamplesMismatchError

    check_extra()
    tests = llama_bench.read(file)
    with folder_lock(out):
        if file_in(out).exists():
            raise SamplesMismatchError(f"{out} holds samples already")
        with Writer(file_in(out)) as writer:
            for row in llama_bench.rows(tests, arm=arm, source=file.name, created=now()):
                writer.add(row)
        _show_report(write(out), as_json=as_json)


def _table(heads: list[str], rows: list[list[Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*heads)
    for row in rows:
        table.add_row(*row)
    Console(width=None if people().is_terminal else 160).print(table)
