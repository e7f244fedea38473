"""`flashnext serve`: a profile, checked, launched, watched and ended."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashnext.console import print_data, print_json, progress, say, tell

if TYPE_CHECKING:
    from flashnext.profile.load import Loaded
    from flashnext.serve.child import Child
    from flashnext.serve.plan import Plan
    from flashnext.serve.prepare import Options
    from flashnext.serve.states import State

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def serve(
    profile: Annotated[str, typer.Option(metavar="NAME", help="Name of a shipped profile, or a .yaml file.")],
    port: Annotated[
        int | None, typer.Option(min=0, max=65_535, help="Instead of the profile's; 0 finds a free one.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Model file, instead of the profile's path.")] = None,
    head: Annotated[Path | None, typer.Option(help="Draft head, instead of the profile's path.")] = None,
    sha256: Annotated[
        bool, typer.Option("--sha256", help="Compare the model files' hashes, too: minutes for a real model.")
    ] = False,
    print_command: Annotated[
        bool, typer.Option("--print-command", help="Show command lines and environment, and stop.")
    ] = False,
    build: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="With --print-command: of this build, whatever its series."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --print-command, or for errors: JSON.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the server's own lines, too.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing of single requests.")] = False,
) -> None:
    """Serve a model until Ctrl-C. Prints one line with the URL when it answers; the rest goes to stderr."""
    from flashnext import services
    from flashnext.errors import UsageError
    from flashnext.profile.load import load
    from flashnext.serve.prepare import Options, choose_port, sketch

    loaded = load(profile)
    if build is not None and not print_command:
        raise UsageError(
            "--build goes with --print-command: what is served is a build of this package's series"
        )
    options = Options(series=package_series(), port=port, model=model, head=head, build=build)
    if print_command:
        show_command(sketch(loaded, options), as_json=as_json)
        return
    chosen = choose_port(loaded, options)
    with services.PortLock(chosen):
        services.prune()
        options = Options(options.series, port=chosen, model=model, head=head, hashes=sha256)
        code = _serve(loaded, options, verbose=verbose, quiet=quiet)
    raise typer.Exit(code)


def package_series() -> str:
    """The hash of the patches that this package ships: what a build must have been made from."""
    from flashnext import paths
    from flashnext.build.series import load_series, series_hash

    return series_hash(load_series(paths.patches_dir()), paths.cmake_include())


def _serve(loaded: Loaded, options: Options, *, verbose: bool, quiet: bool) -> int:
    from flashnext.serve.prepare import prepare
    from flashnext.serve.supervisor import Supervisor

    with progress(bytes_=True) as bar:
        plan = prepare(loaded, options, _progress(bar))
    _announce(plan)
    narrator = Narrator(plan, verbose=verbose, quiet=quiet)
    return Supervisor(plan, on_change=narrator.changed, on_line=narrator.line).run()


def _progress(bar: Any) -> Callable[[int | None, int], None]:
    task: list[Any] = []

    def report(total: int | None, count: int) -> None:
        if not task:
            task.append(bar.add_task("writing the synthetic model", total=total))
        elif count:
            bar.update(task[0], advance=count)

    return report


def _announce(plan: Plan) -> None:
    profile = plan.loaded.profile
    say(f"profile {profile.name} ({profile.kind}), build {plan.build_key[:12]}, model {plan.place.model}")
    for deviation in plan.loaded.deviations:
        say(f"experimental: {plan.loaded.place(deviation.path)}: {deviation.text()}")
    for warning in plan.warnings:
        say(f"warning: {warning}")
    say(f"log: {plan.log}")


_LEVELS = {"fatal": 2, "degraded": 4, "backoff": 4}


class Narrator:
    """Tells people what happens, on stderr; the URL goes to stdout, once. It serves on when they leave."""

    def __init__(self, plan: Plan, *, verbose: bool, quiet: bool) -> None:
        self._plan = plan
        self._verbose, self._quiet = verbose, quiet
        self._ready = self._said = False
        self._journal = "JOURNAL_STREAM" in os.environ

    def changed(self, state: State, reason: str) -> None:
        self._ready = state == "ready"
        # journald reads a level in front of a line; a terminal does not want one
        level = f"<{_LEVELS.get(state.value, 6)}>" if self._journal else ""
        tell(sys.stderr, f"{level}{state}: {reason}")
        if self._ready and not self._said:
            self._said = True
            tell(sys.stdout, f"{self._plan.url}/v1")

    def line(self, child: Child, line: str) -> None:
        """Called from reader threads: with --verbose every line, else the two of a request's speed."""
        if self._verbose:
            tell(sys.stderr, f"{child.name}| {line}")
        elif self._ready and not self._quiet and child.name == "server" and " print_timing: " in line:
            text = " ".join(line.rpartition("|")[2].split())
            if text.startswith(("prompt eval time", "eval time")):
                tell(sys.stderr, f"  {text}")


def show_command(plan: Plan, *, as_json: bool) -> None:
    """Every command line with its environment, for a person's shell or as JSON."""
    names = [f"vgpu{n}" for n in range(len(plan.vgpu_lines()))]
    endpoints = tuple(f"127.0.0.1:{name.upper()}_PORT" for name in names)
    processes = [(n, a, plan.vgpu_env()) for n, a in zip(names, plan.vgpu_lines(), strict=True)]
    processes.append(("server", plan.server_line(endpoints), plan.server_env()))
    if as_json:
        print_json([{"name": name, "argv": argv, "env": env} for name, argv, env in processes])
        return
    for name, argv, env in processes:
        words = [f"{k}={shlex.quote(v)}" for k, v in sorted(env.items())]
        print_data(f"# {name}\nenv -i {' '.join(words)} {shlex.join(argv)}")
