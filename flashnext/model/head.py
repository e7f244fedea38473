"""Draft heads: which form a file has, and whether it fits a target."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from flashnext.artefacts import Artefact
from flashnext.model.header import Header, TensorEntry
from flashnext.model.hyper import Hyper
from flashnext.model.problems import Problem, listed, problem
from flashnext.model.synth_shape import ARCH
from flashnext.model.tensors import compare, head_shapes

Form = Literal["none", "shared", "standalone", "embedded"]

_VOCAB = ("token_embd.weight", "output.weight")
_BLOCK = re.compile(r"^blk\.(\d+)\.")
# How other software names the same parts.
_FOREIGN = re.compile(
    r"(^output_hc_|^output_norm\.|(^|\.)(fc_embd|fc_hidden|hc_norm|hc_down|hc_up)\."
    r"|\.nextn\.(shared_head_norm|shared_head_head|embed_tokens)\.)"
)


class Head(Artefact):
    """A draft head. `ratio` is its layer's compress ratio: 0 dense, else sparse attention.

    A shared head borrows `token_embd` and `output` of the target and cannot be opened alone.
    """

    form: Form
    path: Path
    layer: int | None = None
    ratio: int | None = None
    type: str | None = None
    tensors: int = 0
    tensor_bytes: int = 0


def has_prediction_layer(entries: list[TensorEntry]) -> bool:
    return any(".nextn." in entry.name for entry in entries)


def is_head_file(entries: list[TensorEntry]) -> bool:
    """A file with a prediction block and none of the trunk's own parts."""
    names = {entry.name for entry in entries}
    blocks = {match[1] for name in names if (match := _BLOCK.match(name))}
    return has_prediction_layer(entries) and len(blocks) == 1


def describe(header: Header, entries: list[TensorEntry], hyper: Hyper | None, *, embedded: bool) -> Head:
    """Form and size of the head in a file; an embedded one counts its own block only."""
    layer = hyper.layers if hyper is not None else None
    own = [e for e in entries if layer is None or not embedded or e.name.startswith(f"blk.{layer}.")]
    form: Form = "none"
    if embedded:
        form = "embedded"
    elif has_prediction_layer(entries):
        form = "standalone" if any(e.name == "token_embd.weight" for e in entries) else "shared"
    projection = next((e for e in own if e.name.endswith(".nextn.eh_proj.weight")), None)
    return Head(
        form=form,
        path=header.path,
        layer=layer,
        ratio=hyper.ratios[-1] if hyper is not None else None,
        type=projection.type.name if projection is not None else None,
        tensors=len(own),
        tensor_bytes=sum(e.size_bytes for e in own),
    )


def check_head(header: Header, entries: list[TensorEntry], hyper: Hyper | None) -> list[Problem]:
    """What is wrong with a head file by itself. Its keys were checked when `hyper` was read."""
    file, name = header.path, header.path.name
    if not has_prediction_layer(entries):
        foreign = [e.name for e in entries if _FOREIGN.search(e.name)]
        if foreign and not any(e.name.startswith("blk.0.attn_qkv") for e in entries):
            message = f"{name} names its tensors for other software: {listed(foreign)}"
            return [problem("model-head-foreign", message, file)]
        return [problem("model-head-none", f"{name} has no prediction layer", file)]
    problems: list[Problem] = []
    predicted = header.integer(f"{ARCH}.nextn_predict_layers") or 0
    if predicted != 1:
        message = f"{name}: nextn_predict_layers is {predicted}"
        problems.append(problem("model-head-count", message, file))
    if any(key.startswith(f"{ARCH}.ple.") for key in header.metadata):
        problems.append(problem("model-head-ple", f"{name} carries ple.* keys", file))
    if hyper is None or problems:
        return problems
    blocks = sorted({int(m[1]) for e in entries if (m := _BLOCK.match(e.name))})
    if blocks != [hyper.layers]:
        message = f"{name} has blocks {listed([f'blk.{b}' for b in blocks])}, expected blk.{hyper.layers}"
        return [problem("model-head-block", message, file)]
    foreign = [e.name for e in entries if _FOREIGN.search(e.name)]
    if foreign:
        message = f"{name} names its tensors for other software: {listed(foreign)}"
        return [problem("model-head-foreign", message, file)]
    return _check_tensors(header, entries, hyper)


def _check_tensors(header: Header, entries: list[TensorEntry], hyper: Hyper) -> list[Problem]:
    own = [e for e in entries if e.name in _VOCAB]
    shape = (hyper.embd, hyper.vocab)
    trimmed = [e for e in own if e.shape != shape]
    if trimmed and all(e.shape[0] == hyper.embd for e in trimmed):
        message = (
            f"{header.path.name}: {trimmed[0].name} has {trimmed[0].shape[-1]:,} of {hyper.vocab:,} tokens"
        )
        return [problem("model-head-vocab", message, header.path)]
    expected = head_shapes(hyper)
    if own:  # with one of the two, the other is missed
        expected.update(dict.fromkeys(_VOCAB, shape))
    return compare(header.path, expected, frozenset(), entries, hyper)


def check_fit(head: Hyper, target: Hyper, head_file: Path) -> list[Problem]:
    """Whether a sound head belongs to a sound target: every width that both share, and the vocabulary."""
    name = head_file.name
    pairs = (
        ("embedding_length", head.embd, target.embd),
        ("hyper_connection.count", head.hc, target.hc),
        ("trunk layers", head.layers, target.layers),
    )
    problems = []
    differing = [f"{what} {mine}, target {theirs}" for what, mine, theirs in pairs if mine != theirs]
    if differing:
        message = f"{name} belongs to another model: {listed(differing)}"
        problems.append(problem("model-head-width", message, head_file))
    if head.vocab != target.vocab:
        message = f"{name} has {head.vocab:,} tokens, the target {target.vocab:,}"
        problems.append(problem("model-head-vocab", message, head_file))
    return problems
