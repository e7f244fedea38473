"""The command line. Each verb lives in its own module and is imported only when it is called."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from flashnext import __version__
from flashnext.console import say, show_error
from flashnext.errors import FlashnextError, UsageError

# Base of what the parser raises. Found this way because click is either a package or a part of typer.
_ParserError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

# verb -> (module with `app`, help line). The line stands here so that `--help` imports no verb; the
# verb's own help begins with it.
VERBS: dict[str, tuple[str, str]] = {
    "build": ("flashnext.cli.build", "Fetch, patch and compile the pinned llama.cpp, and install it."),
    "patch": (
        "flashnext.cli.patch",
        "Work on the native features.",
    ),
    "model": ("flashnext.cli.model", "Inspect model files and write synthetic ones."),
    "profile": ("flashnext.cli.profile", "List, show and check profiles."),
    "plan": ("flashnext.cli.plan", "Print the memory plan of a profile."),
    "doctor": ("flashnext.cli.doctor", "Look at cards, driver, memory, disk, ports and stray settings."),
    "serve": ("flashnext.cli.serve", "Serve a model until Ctrl-C."),
    "status": ("flashnext.cli.status", "Show what is served, or how the last service ended."),
    "stop": ("flashnext.cli.stop", "Ask the supervisor to end, and wait for it and its children."),
    "service": ("flashnext.cli.service", "Run a profile as a systemd service."),
    "report": ("flashnext.cli.report", "Write one redacted archive for a bug report."),
    "logs": ("flashnext.cli.logs", "Show the log of a service, live or past."),
    "bench": ("flashnext.cli.bench", "Measure arms against each other: is it faster, and is it not worse?"),
}


class LazyGroup(TyperGroup):
    """Lists verbs from VERBS and imports a verb's module when it is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, name: str) -> Any:
        if name not in VERBS:
            return None
        module, text = VERBS[name]
        if getattr(ctx, "resilient_parsing", False) or "--help" in sys.argv[1:2]:
            return TyperCommand(name, help=text)
        command = typer.main.get_command(importlib.import_module(module).app)
        command.name = name
        return command


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Build, serve and measure Qwen3.8-Flash-Next on a home box.",
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"flashnext {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print it and exit."
    ),
) -> None:
    pass


def main() -> None:
    """Entry point: every failure becomes its message and its exit code, and JSON on request."""
    as_json = "--json" in sys.argv
    try:
        code = app(standalone_mode=False)
    except FlashnextError as error:
        show_error(error, as_json=as_json)
        raise SystemExit(error.exit_code) from None
    except _ParserError as error:
        raise SystemExit(_show_usage(error, as_json=as_json)) from None
    except typer.Abort:
        say("Aborted!")
        raise SystemExit(1) from None
    except SystemExit as end:
        # the parser makes a closed pipe an exit of its own, with the number of a bug
        raise SystemExit(141 if isinstance(end.__context__, BrokenPipeError) else end.code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        raise SystemExit(_show_bug(error, as_json=as_json)) from None
    raise SystemExit(code if isinstance(code, int) else 0)  # a number comes from typer.Exit


def _show_usage(error: Any, *, as_json: bool) -> int:
    """What the parser says: in its own form for people, as one of ours for programs."""
    if as_json:
        context = getattr(error, "ctx", None)
        place = context.command_path if context is not None else "flashnext"
        show_error(UsageError(error.format_message(), hint=f"see `{place} --help`"), as_json=True)
    else:
        error.show()
    return int(error.exit_code)


def _show_bug(error: Exception, *, as_json: bool) -> int:
    """The net under everything: an exception that nobody explained."""
    if os.environ.get("FLASHNEXT_TRACEBACK"):
        traceback.print_exception(error)
    bug = FlashnextError(
        f"{type(error).__name__}: {error}",
        hint="this is a bug in flashnext: please report it, with what FLASHNEXT_TRACEBACK=1 adds to this",
    )
    show_error(bug, as_json=as_json)
    return bug.exit_code
