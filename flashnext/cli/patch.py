"""``flashnext patch``: list, check, make, edit and carry over the native features."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from flashnext import console, paths, proc
from flashnext.build import edit, fetch, lint, rebase, series, tree
from flashnext.build.hunks import read_hooks
from flashnext.build.pin import Pin, load_pin
from flashnext.build.series import Feature
from flashnext.errors import SamePinError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="Work on the native features."
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Patches = Annotated[Path | None, typer.Option("--patches", metavar="DIR", help="Another patches folder.")]
PinFile = Annotated[Path | None, typer.Option("--pin", metavar="FILE", help="Another pin file.")]
Sdist = Annotated[
    Path | None, typer.Option("--sdist", metavar="FILE", help="The pinned sdist, instead of a download.")
]
Name = Annotated[str, typer.Argument(metavar="ID", help="The feature's id.")]


def _pristine(pin: Pin, sdist: Path | None) -> Path:
    if sdist is not None:  # also where the tree is there already and nothing is read from it
        fetch.check_sdist(sdist, pin)
    return tree.pristine_tree(pin, lambda: fetch.fetch_sdist(pin, sdist=sdist))


def _folder(patches: Path | None) -> Path:
    return patches or paths.patches_dir()


def _row(feature: Feature) -> dict[str, Any]:
    patch = read_hooks(feature.hooks_patch) if feature.hooks_patch else None
    return {
        "id": feature.id,
        "summary": feature.summary,
        "requires": list(feature.requires),
        "kill_switch": feature.kill_switch,
        "sha256": feature.sha256,
        "hooks": {
            "added": patch.added if patch else 0,
            "removed": patch.removed if patch else 0,
            "files": [one.path for one in patch.edits] if patch else [],
        },
        "files": feature.listed_files(),
    }


@app.command("list")
def list_features(patches: Patches = None, as_json: Json = False) -> None:
    """List the features in order, with their hooks and kill switches."""
    features = series.load_series(_folder(patches))
    rows = [_row(feature) for feature in features]
    digest = series.series_hash(features, paths.cmake_include())
    if as_json:
        console.print_json({"series_sha256": digest, "features": rows})
        return
    for row in rows:
        hooks = row["hooks"]
        needs = f"  requires {', '.join(row['requires'])}" if row["requires"] else ""
        console.print_data(f"{row['id']}: {row['summary']}")
        console.print_data(
            f"  hooks +{hooks['added']} -{hooks['removed']} in {len(hooks['files'])} files{needs}"
        )
        console.print_data(f"  off: {row['kill_switch']}")
    console.say(f"{len(rows)} features, series {digest[:16]}")


@app.command()
def check(
    patches: Patches = None,
    pin: PinFile = None,
    sdist: Sdist = None,
    no_apply: Annotated[
        bool, typer.Option("--no-apply", help="Read only; do not try the hooks on the pinned source.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check every rule of the feature folders, and that each feature applies with only what it requires."""
    pristine = None if no_apply else _pristine(load_pin(pin), sdist)
    features = lint.check(_folder(patches), pristine)
    if as_json:
        console.print_json({"ok": True, "applied": not no_apply, "features": [f.id for f in features]})
    else:
        console.say(f"{len(features)} features are sound" + (" (hooks not tried)" if no_apply else ""))


@app.command()
def new(
    name: Name,
    summary: Annotated[str, typer.Option(help="What the feature does, in one line.")],
    kill_switch: Annotated[str, typer.Option(help="How a run turns it off, or `none: <reason>`.")],
    patches: Patches = None,
) -> None:
    """Make a feature folder and put it at the end of the series."""
    folder = edit.create(_folder(patches), name, summary=summary, kill_switch=kill_switch)
    console.print_data(str(folder))
    console.say(
        f"next: sources in src/fn-*.cpp, listed in feature.toml; hooks by `flashnext patch shell {name}`"
    )


@app.command()
def shell(
    name: Annotated[str | None, typer.Argument(metavar="[ID]", help="Default: the whole series.")] = None,
    only_print: Annotated[bool, typer.Option("--print", help="Only print the folder.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Throw an existing checkout away.")] = False,
    patches: Patches = None,
    pin: PinFile = None,
    sdist: Sdist = None,
) -> None:
    """Open a shell in a git checkout of the source with the series below a feature, and its hooks on top."""
    the_pin = load_pin(pin)
    features = series.load_series(_folder(patches))
    edit.below(features, name)
    made = edit.open_tree(the_pin, _pristine(the_pin, sdist), features, name, fresh=fresh)
    if made.kept:
        console.say("this checkout was there already; `--fresh` makes a new one")
    for reject in made.rejects:
        console.say(f"did not fit: {made.tree / reject}")
    if name is not None:
        console.say(f"edit the vendored files, then: flashnext patch refresh {name}")
    if only_print:
        console.print_data(str(made.tree))
        return
    program = os.environ.get("SHELL") or "/bin/sh"
    console.say(f"{made.tree}: `git diff` shows the hooks; leave with exit")
    raise typer.Exit(proc.hand_over([program], cwd=made.tree))


@app.command()
def refresh(
    name: Name,
    reason: Annotated[
        str | None, typer.Option(help="Why the hooks are needed (kept when not given).")
    ] = None,
    patches: Patches = None,
    pin: PinFile = None,
    sdist: Sdist = None,
    as_json: Json = False,
) -> None:
    """Write a feature's hooks.patch anew from its checkout."""
    the_pin = load_pin(pin)
    features = series.load_series(_folder(patches))
    done = edit.refresh(the_pin, _pristine(the_pin, sdist), features, name, reason=reason)
    if as_json:
        console.print_json(
            {
                "patch": str(done.patch),
                "added": done.added,
                "removed": done.removed,
                "changed": done.changed,
                "left_out": list(done.left_out),
            }
        )
        return
    word = "wrote" if done.changed else "unchanged:"
    console.say(f"{word} {done.patch} (+{done.added} -{done.removed})")
    for path in done.left_out:
        console.say(f"left out: {path} (new files belong in src/)")


@app.command("rebase")
def carry_over(
    to: Annotated[Path, typer.Option("--to", metavar="PIN_FILE", help="The pin to carry the series to.")],
    sdist: Annotated[Path | None, typer.Option(metavar="FILE", help="The sdist of the new pin.")] = None,
    old_sdist: Annotated[Path | None, typer.Option(metavar="FILE", help="That of the present pin.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Write the new patches and the new pin.")] = False,
    patches: Patches = None,
    pin: PinFile = None,
    as_json: Json = False,
) -> None:
    """Carry the series to another pin by a 3-way merge; conflicts are named by feature, file and hunk."""
    old_pin, new_pin = load_pin(pin), load_pin(to)
    if old_pin.sha256 == new_pin.sha256:
        raise SamePinError("both pins name the same sdist", context=[str(to), f"sha256 {new_pin.sha256}"])
    features = series.load_series(_folder(patches))
    old, new_tree = _pristine(old_pin, old_sdist), _pristine(new_pin, sdist)
    result = rebase.Rebase(old_pin, new_pin, features).run(old, new_tree)
    written = rebase.write(result, to, pin or paths.pin_file()) if write else []
    if as_json:
        rows = [{"id": r.feature.id, "changed": r.changed, "hooks": r.text is not None} for r in result]
        console.print_json({"to": new_pin.version, "features": rows, "written": [str(p) for p in written]})
        return
    for one in result:
        state = "needs no hooks any more" if one.text is None else "changes" if one.changed else "stays"
        console.print_data(f"{one.feature.id}: {state}")
    for path in written:
        console.say(f"wrote {path}")
    if not write:
        console.say(f"the series carries over to {new_pin.name} {new_pin.version}; `--write` writes it")
