"""What people and programs see: data on stdout, everything for people on stderr, JSON on request."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from flashnext.errors import FlashnextError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def people() -> Console:
    """The console on stderr. NO_COLOR and a pipe switch colours off (rich does both)."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_data(text: str) -> None:
    """One piece of result on stdout."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_json(value: Any) -> None:
    print_data(json.dumps(value, indent=2, ensure_ascii=False))


def say(text: str) -> None:
    """One plain line for people, on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def tell(stream: TextIO, text: str) -> None:
    """One line on stdout or stderr. Once its reader has left (`| head`), nobody is told."""
    try:
        stream.write(text + "\n")
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # what is buffered must not fail again when the process ends
        os.close(nowhere)


def show_error(error: FlashnextError, *, as_json: bool = False) -> None:
    """Print an error in the house form (people) or as one JSON object on stdout (programs)."""
    if as_json:
        print_json(error.to_json())
        return
    say(f"error[{error.id}]: {error.message}")
    for line in error.context:
        say(f"  {line}")
    say(f"hint: {error.advice}")


@contextmanager
def progress(*, bytes_: bool = False) -> Iterator[Progress]:
    """A progress display on stderr; silent bars become nothing where stderr is no terminal.

    Use ``bar.add_task(text, total=n)`` and ``bar.update(task, advance=k)``; with ``bytes_`` n counts bytes.
    """
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amount = [DownloadColumn(), TransferSpeedColumn()] if bytes_ else [MofNCompleteColumn()]
    console = people()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *amount,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as bar:
        yield bar
