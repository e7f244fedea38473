"""`flashnext profile`: list, show, check, and the schema."""

from __future__ import annotations

from typing import Annotated

import typer

from flashnext.console import print_data, print_json, say

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="List, show and check profiles.",
)
Json = Annotated[bool, typer.Option("--json", help="As JSON.")]
Name = Annotated[str, typer.Argument(help="Name of a shipped profile, or a .yaml file.")]


@app.command("list")
def list_(as_json: Json = False) -> None:
    """The profiles that are shipped."""
    from flashnext.profile.load import available, load

    rows = [(file, load(str(file)).profile) for file in available()]
    if as_json:
        print_json([{"name": p.name, "kind": p.kind, "summary": p.summary, "file": str(f)} for f, p in rows])
        return
    width = max(len(profile.name) for _, profile in rows)
    for _, profile in rows:
        print_data(f"{profile.name:<{width}} {profile.kind:<13} {profile.summary}")


@app.command()
def show(name: Name, as_json: Json = False) -> None:
    """One profile with every default written out."""
    from flashnext.profile.load import load

    loaded = load(name)
    data = loaded.profile.model_dump(mode="json", exclude_none=True)
    if as_json:
        print_json(data)
        return
    import yaml

    print_data(yaml.safe_dump(data, sort_keys=False, allow_unicode=True).rstrip())


@app.command()
def check(name: Name, as_json: Json = False) -> None:
    """Check one profile: form, values, rules, and the qualified set. Launches nothing."""
    from flashnext.profile.load import load

    loaded = load(name)
    notes = [f"{loaded.place(d.path)}: {'.'.join(map(str, d.path))}: {d.text()}" for d in loaded.deviations]
    if as_json:
        print_json({"name": loaded.profile.name, "kind": loaded.profile.kind, "deviations": notes})
        return
    for note in notes:
        say(f"experimental: {note}")
    print_data(f"{loaded.file.name}: {loaded.profile.kind}, sound")


@app.command()
def diff(
    name: Name, other: Annotated[str, typer.Argument(help="The other one.")], as_json: Json = False
) -> None:
    """Every value in which two profiles differ, defaults written out. Exit code 0 also when they do."""
    from flashnext.profile.load import load
    from flashnext.profile.schema import differences

    found = differences(load(name).profile, load(other).profile)
    if as_json:
        print_json([{"key": key, "left": left, "right": right} for key, left, right in found])
        return
    for key, left, right in found:
        print_data(f"{key}: {left} | {right}")


@app.command()
def schema() -> None:
    """The JSON schema of a profile, for editors."""
    from flashnext.profile.schema import json_schema

    print_json(json_schema())
