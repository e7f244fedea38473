"""Synthesis of qwen4exp models with random weights: which files, under which names, with which content."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field

from flashnext.artefacts import Artefact
from flashnext.errors import UsageError
from flashnext.model.gguf_write import Advance, check_space, file_bytes, shard_name, split, write_gguf
from flashnext.model.synth_data import Weights
from flashnext.model.synth_shape import (
    SHAPES,
    Metadata,
    Part,
    Plan,
    Shape,
    Types,
    head_tensors,
    metadata,
    trunk_tensors,
)
from flashnext.model.synth_tokenizer import tokenizer, tokenizer_metadata

Kind = Literal["tiny", "demo", "bench"]
HeadForm = Literal["shared", "standalone", "embedded"]
HEAD_TYPES = {"q8_0": "Q8_0", "bf16": "BF16", "f32": "F32", "q4_k_m": "Q4_K"}
EXPERT_TYPES = {t.lower(): t for t in ("F32", "BF16", "Q8_0", "Q4_0", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")}
# Names of the published files carry the type in this spelling.
_HEAD_LABEL = {"q8_0": "Q8_0", "bf16": "BF16", "f32": "F32", "q4_k_m": "Q4_K_M"}
_MAX_LAYERS = 512


class SynthRequest(Artefact):
    """What to write. `layers` None keeps the kind's own count; `out` is a folder or a .gguf file."""

    kind: Kind
    out: Path
    mtp: HeadForm | None = None
    markov: bool = False
    shards: int = Field(1, ge=1, le=999)
    layers: int | None = None
    seed: int = Field(0, ge=0)
    expert_type: str | None = None
    head_type: str = "q8_0"
    head_ratio: int = Field(0, ge=0, le=64)


class SynthResult(Artefact):
    """What was written. `model` is the file to give to llama-server, `head` the one for its draft option."""

    kind: Kind
    model: Path
    head: Path | None
    files: tuple[Path, ...]
    tensors: int
    tensor_bytes: int
    file_bytes: int
    layers: int
    differs: tuple[str, ...]


class _File(NamedTuple):
    path: Path
    metadata: Metadata
    plans: list[Plan]


def synthesise(request: SynthRequest, on_total: Callable[[int], None], advance: Advance) -> SynthResult:
    """Write the model and its head, each file atomically. `on_total` hears the bytes to come, once.

    Raises UsageError (a shape llama-server cannot load), ModelDiskFullError, ModelWriteError.
    """
    shape = _shape(request)
    model, files, head = _files(request, shape)
    total = sum(file_bytes(file.metadata, file.plans) for file in files)
    check_space(model.parent, total)
    on_total(total)
    weights = Weights(request.seed, tokenizer(shape.vocab), markov=request.markov)
    for file in files:
        write_gguf(file.path, file.metadata, file.plans, weights.chunks, advance)
    plans = [plan for file in files for plan in file.plans]
    return SynthResult(
        kind=request.kind,
        model=model,
        head=head,
        files=tuple(file.path for file in files),
        tensors=len(plans),
        tensor_bytes=sum(plan.size_bytes for plan in plans),
        file_bytes=total,
        layers=shape.layers,
        differs=_differences(request, shape),
    )


def _shape(request: SynthRequest) -> Shape:
    shape = SHAPES[request.kind]
    if request.layers is None:
        return shape
    if not 2 <= request.layers <= _MAX_LAYERS - 1:
        raise UsageError(
            f"--layers {request.layers}: a model needs 2 to {_MAX_LAYERS - 1} layers",
            hint="one layer has no room for both attention kinds, and llama-server would abort on it",
        )
    return replace(shape, layers=request.layers)


def default_stem(request: SynthRequest, shape: Shape) -> str:
    """File name without suffix: it says what is not the default, so that two models never share a name."""
    parts = [f"flashnext-{shape.name}"]
    if request.layers is not None:
        parts.append(f"{shape.layers}l")
    if request.expert_type is not None:
        parts.append(request.expert_type)
    if request.seed:
        parts.append(f"seed{request.seed}")
    if request.markov:
        parts.append("markov")
    if request.mtp == "embedded":
        parts.append("mtp")
    return "-".join(parts)


def _files(request: SynthRequest, shape: Shape) -> tuple[Path, list[_File], Path | None]:
    vocabulary = tokenizer(shape.vocab)
    size = len(vocabulary.tokens)
    words = tokenizer_metadata(vocabulary)
    expert = EXPERT_TYPES[request.expert_type] if request.expert_type else None
    types = Types(expert=expert, head=HEAD_TYPES[request.head_type])
    if request.out.suffix == ".gguf":
        folder, stem = request.out.parent, request.out.stem
    else:
        folder, stem = request.out, default_stem(request, shape)

    def keys(part: Part) -> Metadata:
        return {**metadata(shape, part, request.head_ratio, vocabulary.end_of_text), **words}

    trunk = list(trunk_tensors(shape, size, types))
    if request.mtp == "embedded":
        trunk += head_tensors(shape, size, types, own_vocab=False)
    files = _sharded(folder, stem, keys("embedded" if request.mtp == "embedded" else "trunk"), trunk, request)
    model = files[0].path
    if request.mtp in (None, "embedded"):
        return model, files, None
    form: Part = "shared" if request.mtp == "shared" else "standalone"
    label = "shared-" if form == "shared" else ""
    head = folder / f"mtp-{stem}-{label}{_HEAD_LABEL[request.head_type]}.gguf"
    plans = list(head_tensors(shape, size, types, own_vocab=form == "standalone"))
    files.append(_File(head, keys(form), plans))
    return model, files, head


def _sharded(
    folder: Path, stem: str, keys: Metadata, plans: Sequence[Plan], request: SynthRequest
) -> list[_File]:
    if request.shards == 1:
        return [_File(folder / f"{stem}.gguf", keys, list(plans))]
    if request.shards > len(plans):
        raise UsageError(f"--shards {request.shards}: the model has only {len(plans)} tensors")
    parts = split(keys, plans, request.shards)
    return [
        _File(folder / shard_name(stem, i, request.shards), part_keys, part)
        for i, (part_keys, part) in enumerate(parts)
    ]


def _differences(request: SynthRequest, shape: Shape) -> tuple[str, ...]:
    """How a bench model differs from the published one, for whoever reads its numbers."""
    if request.kind != "bench":
        return ()
    return (
        f"{shape.layers} layers instead of 48",
        f"n-gram table of {shape.ple_rows:,} rows instead of 320,001,536",
        "vocabulary of 265 byte tokens padded to 248,320 with unused ones",
        "random weights: routing is nearly uniform, text means nothing; repeated blocks inside large tensors",
    )
