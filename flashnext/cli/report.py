"""`flashnext report`: one archive for a bug report, without prompts, keys and names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashnext.console import print_data, print_json, say

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def report(
    profile: Annotated[
        str, typer.Option(metavar="NAME", help="The profile it is about: a name, or a .yaml file.")
    ] = "demo",
    out: Annotated[
        Path | None, typer.Option(help="Archive to write; default: here, with date and time.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Model file, instead of the profile's path.")] = None,
    head: Annotated[Path | None, typer.Option(help="Draft head, instead of the profile's path.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Write one redacted archive for a bug report.

    It holds versions, builds, profile, plan, doctor, states and last logs.
    """
    from datetime import datetime

    from flashnext.profile.load import load
    from flashnext.report import collect
    from flashnext.serve import weights

    loaded = load(profile)
    files = weights.locate(loaded, model=model, head=head)
    found = collect.pieces(loaded, files.model, files.head)
    name = f"flashnext-report-{datetime.now():%Y%m%d-%H%M%S}.tar.gz"
    file = collect.write(out or Path(name), found)
    if as_json:
        print_json({"file": str(file), "pieces": {key: len(text) for key, text in found.items()}})
        return
    print_data(str(file))
    say(f"{len(found)} pieces: {', '.join(found)}")
    say("prompt text, keys, user and host names were left out; look through it before you send it")
