"""`flashnext model`: inspect model files and write synthetic ones."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashnext.console import print_data, print_json, progress, say
from flashnext.errors import ModelError

if TYPE_CHECKING:
    from flashnext.model.inspect import Inspection

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Inspect model files and write synthetic ones."
)


class SynthKind(StrEnum):
    tiny = "tiny"
    demo = "demo"
    bench = "bench"


class MtpForm(StrEnum):
    shared = "shared"
    standalone = "standalone"
    embedded = "embedded"


class HeadType(StrEnum):
    q8_0 = "q8_0"
    bf16 = "bf16"
    f32 = "f32"
    q4_k_m = "q4_k_m"


class ExpertType(StrEnum):
    f32 = "f32"
    bf16 = "bf16"
    q8_0 = "q8_0"
    q4_0 = "q4_0"
    q5_0 = "q5_0"
    q5_1 = "q5_1"
    q4_k = "q4_k"
    q5_k = "q5_k"
    q6_k = "q6_k"


@app.callback()
def _root() -> None:
    pass


@app.command()
def synth(
    kind: Annotated[
        SynthKind,
        typer.Argument(help="tiny: 13 MB; demo: every qualified number is legal; bench: real layer sizes."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder or .gguf file; default: the models folder of flashnext.")
    ] = None,
    mtp: Annotated[MtpForm | None, typer.Option(help="Also write a draft head, in this form.")] = None,
    markov: Annotated[
        bool, typer.Option("--markov", help="Next token from the last one alone: every draft is right.")
    ] = False,
    shards: Annotated[
        int, typer.Option(min=1, max=999, help="Number of files; the first holds metadata only.")
    ] = 1,
    layers: Annotated[int | None, typer.Option(help="Trunk layers (tiny 8, demo 8, bench 12).")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed writes the same bytes.")] = 0,
    expert_type: Annotated[
        ExpertType | None, typer.Option(help="One type for all experts; default: the mix of the real files.")
    ] = None,
    head_type: Annotated[HeadType, typer.Option(help="Type of the head's matrices.")] = HeadType.q8_0,
    head_ratio: Annotated[
        int, typer.Option(min=0, max=64, help="Compress ratio of the head's layer: 0 dense, 4 sparse.")
    ] = 0,
    json_: Annotated[bool, typer.Option("--json", help="The result as JSON on stdout.")] = False,
) -> None:
    """Write a random-weight model for tests, the demo or a bench."""
    from flashnext.model.synth import SynthRequest, synthesise
    from flashnext.paths import models_dir

    request = SynthRequest(
        kind=kind.value,
        out=out if out is not None else models_dir(),
        mtp=mtp.value if mtp else None,
        markov=markov,
        shards=shards,
        layers=layers,
        seed=seed,
        expert_type=expert_type.value if expert_type else None,
        head_type=head_type.value,
        head_ratio=head_ratio,
    )
    with progress(bytes_=True) as bar:
        task = bar.add_task(f"writing {kind.value}", total=None)
        result = synthesise(
            request,
            lambda total: bar.update(task, total=total),
            lambda count: bar.update(task, advance=count),
        )
    if json_:
        print_json(result.model_dump(mode="json"))
        return
    for line in result.differs:
        say(f"differs from the published model: {line}")
    say(f"{result.tensors} tensors, {result.file_bytes:,} bytes in {len(result.files)} file(s)")
    print_data(str(result.model))
    if result.head is not None:
        print_data(str(result.head))


@app.command("inspect")
def inspect_(
    path: Annotated[Path, typer.Argument(help="The model: a single .gguf, or the first shard of a set.")],
    head: Annotated[Path | None, typer.Option(help="A draft head to check against the model.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Everything as JSON on stdout.")] = False,
) -> None:
    """Show what is in a model, and every problem that llama-server would have with it (exit code 4)."""
    from flashnext.model.inspect import inspect_model

    found = inspect_model(path, head)
    if json_:
        print_json(found.model_dump(mode="json"))
    else:
        _show(found)
    if not found.ok:
        raise typer.Exit(ModelError.exit_code)


def _show(found: Inspection) -> None:
    """The report for people; the machine form is --json."""
    if found.gguf_version is not None:
        title = found.name or "no name"
        print_data(f"{found.path.name}: {title}, {found.architecture}, GGUF {found.gguf_version}")
    for key, value in sorted(found.hyper.items()):
        print_data(f"  {key:<44} {_brief(value)}")
    if found.shards:
        print_data(f"files ({len(found.shards)}):")
    for shard in found.shards:
        tensors = "" if shard.tensors is None else f"{shard.tensors:>6} tensors"
        print_data(f"  {shard.path.name:<52} {shard.state:<8} {shard.size_bytes:>18,} bytes {tensors}")
    _show_tensors(found)
    _show_head(found)
    for note in found.notes:
        say(f"note: {note}")
    for issue in found.problems:
        say(f"error[{issue.id}]: {issue.message}")
        if issue.aborts:
            say("  llama-server would abort on it without a message")
        say(f"hint: {issue.hint}")


def _show_tensors(found: Inspection) -> None:
    if found.classes:
        print_data(f"tensors ({len(found.tensors)}, {found.tensor_bytes:,} bytes):")
    for group in found.classes:
        types = ", ".join(f"{kind} x{n}" for kind, n in group.types.items())
        print_data(f"  {group.name:<40} {group.size_bytes:>18,} bytes  {types}")
    if found.experts:
        print_data("experts (types of gate, up, down; bytes of one expert; of all):")
    for layer in found.experts:
        types = " ".join(layer.types)
        sizes = f"{layer.expert_bytes:>12,} x {layer.count} = {layer.size_bytes:,}"
        print_data(f"  layer {layer.layer:<3} {types:<18} {sizes}")


def _show_head(found: Inspection) -> None:
    head = found.head
    if head.form == "none":
        print_data("draft head: none")
        return
    attention = "dense" if head.ratio == 0 else f"compress ratio {head.ratio}"
    print_data(
        f"draft head: {head.form}, {head.type}, block {head.layer}, {attention}, "
        f"{head.tensors} tensors, {head.tensor_bytes:,} bytes, in {head.path.name}"
    )


def _brief(value: object) -> str:
    """A value on one line; a long list as runs of equal entries would only be noise, so it is cut."""
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
