"""`flashnext logs`: the last lines of a service's log, and those to come."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashnext.console import print_data, print_json
from flashnext.errors import NotServingError

if TYPE_CHECKING:
    from flashnext.services import Service

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def logs(
    port: Annotated[
        int | None, typer.Option(help="Which service; default: the one that started last.")
    ] = None,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="How many of the last lines.")] = 100,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show the log of a service, live or past."""
    from flashnext import services

    found = sorted((s for s in services.every() if port in (None, s.port)), key=lambda s: s.started)
    if not found:
        raise NotServingError("there is no log: nothing was served here")
    service = found[-1]
    text = _last(Path(service.log), lines)
    if as_json:
        print_json({"log": service.log, "lines": text})
        return
    for line in text:
        print_data(line)
    if follow:
        _follow(service)


def _last(path: Path, count: int) -> list[str]:
    text: list[str] = []
    for file in (path.with_name(path.name + ".1"), path):
        if file.is_file():
            text += file.read_text(encoding="utf-8", errors="replace").splitlines()
    return text[-count:] if count else []


def _follow(service: Service) -> None:
    """Print what is appended, across rotations, until the service ends."""
    path = Path(service.log)
    stream = path.open(encoding="utf-8", errors="replace")
    stream.seek(0, 2)
    while True:
        line = stream.readline()
        if line:
            print_data(line.rstrip("\n"))
            continue
        if not service.supervisor.alive:
            return
        if path.exists() and path.stat().st_ino != _inode(stream.fileno()):
            stream.close()
            stream = path.open(encoding="utf-8", errors="replace")
            continue
        time.sleep(0.2)


def _inode(handle: int) -> int:
    import os

    return os.fstat(handle).st_ino
