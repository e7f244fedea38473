"""`flashnext model`: inspect model files and write synthetic ones."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flashnext.console import print_data, print_json, progress, say

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
