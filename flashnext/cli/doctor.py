"""`flashnext doctor`: what is right and wrong with this machine, each fault with its fix."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from flashnext.console import people, print_json

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@app.command()
def doctor(
    profile: Annotated[
        str, typer.Option(metavar="NAME", help="Judge for this profile: a name, or a .yaml file.")
    ] = "demo",
    model: Annotated[Path | None, typer.Option(help="Model file, instead of the profile's path.")] = None,
    head: Annotated[Path | None, typer.Option(help="Draft head, instead of the profile's path.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Look at cards, driver, memory, disk, ports and stray settings. Exit code 4 where something fails."""
    from rich.console import Console
    from rich.text import Text

    from flashnext.doctor.facts import gather
    from flashnext.doctor.judge import judge
    from flashnext.errors import HostError
    from flashnext.profile.load import load
    from flashnext.serve import weights

    loaded = load(profile)
    files = weights.locate(loaded, model=model, head=head)
    findings = judge(gather(loaded, files.model, files.head))
    counts: Counter[str] = Counter(f.level for f in findings)
    if as_json:
        print_json({"profile": loaded.profile.name, "findings": [f.model_dump() for f in findings]})
    else:
        console = Console(highlight=False, soft_wrap=True)
        for found in findings:
            console.print(
                Text(f"{found.level:<5}", style=_COLOURS[found.level]),
                Text(found.check + ":"),
                Text(found.text),
            )
            if found.fix:
                console.print(Text(f"      fix: {found.fix}"))
        summary = ", ".join(f"{counts[level]} {level}" for level in _COLOURS)
        people().print(f"for {loaded.profile.name}: {summary}", markup=False)
    raise typer.Exit(HostError.exit_code if counts["fail"] else 0)
