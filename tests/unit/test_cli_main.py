"""The entry point: exit codes, and errors for people and for programs."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest
import typer

from flashnext import cli
from flashnext.cli import stop as stop_verb


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["flashnext", *arguments])
    # else the parser calls itself by the module that `python -m` was given
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code


def verb_that_raises(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Put a verb in the place of `flashnext stop`."""
    app = typer.Typer(rich_markup_mode=None)

    @app.command()
    def stop(as_json: bool = typer.Option(False, "--json")) -> None:
        raise error

    monkeypatch.setattr(stop_verb, "app", app)


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, option) == 0
    assert "flashnext" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (["serve", "--nope"], "flashnext serve"),
        (["serve"], "flashnext serve"),
        (["profile", "show"], "flashnext profile show"),
        (["nope"], "flashnext"),
    ],
)
def test_usage_errors(
    arguments: list[str],
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(monkeypatch, *arguments) == 2
    text = capsys.readouterr()
    assert text.out == "" and f"Try '{place} --help'" in text.err
    assert call(monkeypatch, *arguments, "--json") == 2
    told = json.loads(capsys.readouterr().out)
    assert told["error"] == "usage" and told["message"] in text.err and told["exit_code"] == 2
    assert told["hint"] == f"see `{place} --help`"


@pytest.mark.parametrize(
    ("error", "code"),
    [(typer.Exit(7), 7), (typer.Exit(), 0), (typer.Abort(), 1), (KeyboardInterrupt(), 130)],
)
def test_other_endings(error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    verb_that_raises(monkeypatch, error)
    assert call(monkeypatch, "stop") == code


def test_a_bug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    verb_that_raises(monkeypatch, ZeroDivisionError("over nothing"))
    monkeypatch.delenv("FLASHNEXT_TRACEBACK", raising=False)
    assert call(monkeypatch, "stop") == 1
    text = capsys.readouterr().err
    assert text.startswith("error[bug]: ZeroDivisionError: over nothing\nhint: ")
    assert call(monkeypatch, "stop", "--json") == 1
    assert json.loads(capsys.readouterr().out)["error"] == "bug"
    monkeypatch.setenv("FLASHNEXT_TRACEBACK", "1")
    assert call(monkeypatch, "stop") == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize("verb", sorted(cli.VERBS))
def test_one_help_text_per_verb(verb: str) -> None:
    module, line = cli.VERBS[verb]
    command = typer.main.get_command(importlib.import_module(module).app)
    own = " ".join((command.help or "").split())
    assert own.startswith(line), f"{verb}: {own}"


def test_a_reader_that_leaves_is_no_error() -> None:
    """`flashnext ... | head`: silence. SIGPIPE stays ignored: it would end a supervisor."""
    argv = [sys.executable, "-m", "flashnext", "profile", "schema"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141, "as a shell says of SIGPIPE; 1 would be a bug"
    code = "import signal, sys; from flashnext import cli; sys.argv = ['flashnext', '--version']\n"
    code += "try: cli.main()\nexcept SystemExit: print(signal.getsignal(signal.SIGPIPE).name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "SIG_IGN"
