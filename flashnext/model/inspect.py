"""Inspection of a model and its draft head: what the files hold, and every reason not to load them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from flashnext.artefacts import Artefact
from flashnext.errors import ModelProblemsError
from flashnext.model.gguf_format import ValueType
from flashnext.model.head import Head, check_fit, check_head, describe, has_prediction_layer, is_head_file
from flashnext.model.header import Header, TensorEntry
from flashnext.model.hyper import Hyper, read_hyper
from flashnext.model.problems import Problem, problem
from flashnext.model.shards import FileSet, Shard, open_set
from flashnext.model.synth_shape import ARCH
from flashnext.model.tensors import compare, head_shapes, trunk_shapes

_BLOCK = re.compile(r"^blk\.(\d+)\.")
_EXPERTS = ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_gate_up_exps.weight", "ffn_down_exps.weight")


class Tensor(Artefact):
    """One tensor: shape in ggml order, the file that holds it."""

    name: str
    shape: tuple[int, ...]
    type: str
    size_bytes: int
    file: str


class TensorClass(Artefact):
    """All tensors of one name over the layers: `blk.*.attn_q.weight`."""

    name: str
    count: int
    types: dict[str, int]
    size_bytes: int


class LayerExperts(Artefact):
    """The experts of one layer. `expert_bytes` is one whole expert: gate, up and down."""

    layer: int
    types: tuple[str, ...]
    count: int
    expert_bytes: int
    size_bytes: int


class Inspection(Artefact):
    """What is known of a model. With problems, `hyper` and what follows from it may be empty."""

    path: Path
    architecture: str | None
    name: str | None
    gguf_version: int | None
    hyper: dict[str, int | float | str | bool | list[int]]
    shards: tuple[Shard, ...]
    tensor_bytes: int
    classes: tuple[TensorClass, ...]
    experts: tuple[LayerExperts, ...]
    tensors: tuple[Tensor, ...]
    head: Head
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def raise_for_problems(self) -> None:
        """Raise ModelProblemsError with all problems in its context; do nothing without one."""
        if not self.problems:
            return
        lines = [f"[{p.id}] {p.message} ({p.hint})" for p in self.problems]
        count = len(self.problems)
        noun = "one problem" if count == 1 else f"{count} problems"
        raise ModelProblemsError(f"{self.path.name} has {noun}", context=lines)


def inspect_model(path: Path, head: Path | None = None) -> Inspection:
    """Read the headers of a model (single file or first shard) and of its draft head, and judge them.

    Reads no tensor data and never raises for a bad file: every problem is in the result.
    """
    found = open_set(path)
    main = found.main
    entries = [entry for entry, _ in found.tensors()]
    problems = list(found.problems)
    hyper: Hyper | None = None
    if main is not None:
        hyper, more = _judge_model(main, found, entries)
        problems += more
    head_info, more = _judge_head(found, hyper, entries, path, head)
    problems += more
    return Inspection(
        path=path,
        architecture=main.text("general.architecture") if main else None,
        name=main.text("general.name") if main else None,
        gguf_version=main.version if main else None,
        hyper=_plain_keys(main) if main else {},
        shards=tuple(found.shards),
        tensor_bytes=sum(entry.size_bytes for entry in entries),
        classes=_classes(entries),
        experts=_layer_experts(entries),
        tensors=tuple(
            Tensor(name=e.name, shape=e.shape, type=e.type.name, size_bytes=e.size_bytes, file=h.path.name)
            for e, h in found.tensors()
        ),
        head=head_info,
        problems=tuple(problems),
        notes=tuple(found.notes),
    )


def _architecture(header: Header) -> list[Problem]:
    name = header.text("general.architecture")
    if name == ARCH:
        return []
    file = header.path
    if name == "clip" or header.text("general.type") == "mmproj":
        message = f"{file.name} is a projector for images, not a language model"
        hint = "flashnext serves text only: pass the model itself"
        return [problem("model-wrong-architecture", message, file, hint)]
    message = f"{file.name} has architecture {name or 'unknown'}, expected {ARCH}"
    return [problem("model-wrong-architecture", message, file)]


def _judge_model(
    main: Header, found: FileSet, entries: list[TensorEntry]
) -> tuple[Hyper | None, list[Problem]]:
    problems = _architecture(main)
    if problems:
        return None, problems
    if found.complete and is_head_file(entries):
        message = f"{main.path.name} is a draft head, not a model"
        return None, [problem("model-is-head", message, main.path)]
    hyper, problems = read_hyper(main)
    if hyper is not None and found.complete:
        expected = trunk_shapes(hyper)
        if hyper.nextn and has_prediction_layer(entries):
            expected.update(head_shapes(hyper))
        elif hyper.nextn:
            name = main.path.name
            found.notes.append(f"{name} announces a prediction layer and holds none: it cannot draft itself")
        problems = problems + compare(main.path, expected, frozenset({"output.weight"}), entries, hyper)
    return hyper, problems


def _judge_head(
    found: FileSet, hyper: Hyper | None, entries: list[TensorEntry], path: Path, head: Path | None
) -> tuple[Head, list[Problem]]:
    if head is None:
        main = found.main
        if main is None:
            return Head(form="none", path=path), []
        embedded = has_prediction_layer(entries) and not is_head_file(entries)
        return describe(main, entries, hyper, embedded=embedded), []
    if any(head.exists() and shard.path.exists() and head.samefile(shard.path) for shard in found.shards):
        message = f"{head.name} is the target itself"
        return Head(form="none", path=head), [problem("model-head-is-target", message, head)]
    files = open_set(head)
    header = files.main
    problems = list(files.problems)
    if header is None:
        return Head(form="none", path=head), problems
    own = [entry for entry, _ in files.tensors()]
    problems += _architecture(header)
    if problems:
        return describe(header, own, None, embedded=False), problems
    own_hyper, key_problems = read_hyper(header)
    own_problems = check_head(header, own, own_hyper)
    if not any(p.id == "model-head-none" for p in own_problems):
        own_problems = key_problems + own_problems
    if own_hyper is not None and hyper is not None and not own_problems:
        own_problems += check_fit(own_hyper, hyper, head)
    return describe(header, own, own_hyper, embedded=False), own_problems


def _plain_keys(header: Header) -> dict[str, int | float | str | bool | list[int]]:
    """All qwen4exp.* keys without the prefix, short arrays included."""
    keys: dict[str, int | float | str | bool | list[int]] = {}
    for name, value in header.metadata.items():
        if name.startswith(f"{ARCH}.") and value.data is not None:
            keys[name.removeprefix(f"{ARCH}.")] = value.data
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if tokens is not None and tokens.type is ValueType.ARRAY:
        keys["vocab_size"] = tokens.count
    return keys


def _classes(entries: list[TensorEntry]) -> tuple[TensorClass, ...]:
    groups: dict[str, list[TensorEntry]] = {}
    for entry in entries:
        groups.setdefault(_BLOCK.sub("blk.*.", entry.name), []).append(entry)
    return tuple(
        TensorClass(
            name=name,
            count=len(group),
            types=dict(Counter(e.type.name for e in group)),
            size_bytes=sum(e.size_bytes for e in group),
        )
        for name, group in groups.items()
    )


def _layer_experts(entries: list[TensorEntry]) -> tuple[LayerExperts, ...]:
    layers: dict[int, list[TensorEntry]] = {}
    for entry in entries:
        match = _BLOCK.match(entry.name)
        if match and entry.name.endswith(_EXPERTS) and len(entry.shape) == 3 and entry.shape[2]:
            layers.setdefault(int(match[1]), []).append(entry)
    return tuple(
        LayerExperts(
            layer=layer,
            types=tuple(e.type.name for e in group),
            count=group[0].shape[2],
            expert_bytes=sum(e.size_bytes // e.shape[2] for e in group),
            size_bytes=sum(e.size_bytes for e in group),
        )
        for layer, group in sorted(layers.items())
    )
