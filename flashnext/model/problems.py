"""The kinds of problems a model file can have: id, hint, and whether llama-server would abort on it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from flashnext.artefacts import Artefact


class Kind(NamedTuple):
    """`aborts`: the pinned loader dies by an assert or a crash, so only a check beforehand can explain it."""

    hint: str
    aborts: bool = False


_FETCH = "fetch the file again and compare its size and SHA-256 with those of its source"
_CONVERT = "convert the model again with a converter for qwen4exp, or take a published file"
_TYPE = "the file's converter and the pinned loader disagree: take a published file"

KINDS: dict[str, Kind] = {
    # files
    "model-file-missing": Kind("check the path; flashnext never downloads a model"),
    "model-is-folder": Kind("name the file: the first shard of a set, or the single .gguf"),
    "model-partial-download": Kind("finish the download; flashnext never downloads a model"),
    "model-file-empty": Kind(_FETCH),
    "model-header-broken": Kind(_FETCH),
    "model-truncated": Kind("the download or copy was cut short: fetch the file again"),
    "model-shard-missing": Kind("put all shards into one folder under their published names"),
    "model-not-first-shard": Kind("pass the first shard; the others are found by their names"),
    "model-shards-joined": Kind("do not join shards with cat: keep the separate files, pass the first one"),
    "model-shard-name": Kind("give every shard its published name back: NAME-0000N-of-0000M.gguf"),
    "model-shard-mismatch": Kind("the shards come from different sets: fetch the set again from one source"),
    "model-wrong-architecture": Kind("flashnext serves qwen4exp models only"),
    "model-is-head": Kind("give it as the draft head, beside the model that it belongs to"),
    # keys
    "model-key-missing": Kind(_CONVERT),
    "model-key-type": Kind(_TYPE),
    "model-array-length": Kind("one entry a block is needed, the prediction block included"),
    "model-value-zero": Kind(_CONVERT),
    "model-hc-count": Kind(_CONVERT),
    "model-ple-range": Kind("the n-gram size must be 2 to 8, (n-gram size - 1) * heads 1 to 64"),
    "model-ple-layer": Kind("exactly one PLE layer is supported, and it must be a linear-attention layer"),
    "model-ple-arrays": Kind(_CONVERT),
    "model-ple-head-range": Kind("every head needs 1 row at least and must end below 2^31"),
    "model-ple-table-rows": Kind("the n-gram table belongs to other hash constants: take one published set"),
    "model-ple-keys-missing": Kind("the file has an n-gram table but no ple.layers key: convert it again"),
    "model-expert-count": Kind("1 to 1024 experts, and 1 to all of them used", aborts=True),
    "model-block-count": Kind("a model has 1 to 512 blocks", aborts=True),
    "model-nextn-count": Kind("fewer prediction layers than blocks are needed", aborts=True),
    "model-ssm-sizes": Kind("inner = state * rank is needed, and rank a multiple of groups", aborts=True),
    "model-head-dim": Kind("key_length and value_length must be equal", aborts=True),
    "model-compress-ratio": Kind("ratios are 0 (dense) to 64", aborts=True),
    "model-rope-sections": Kind("at least one of the four sections must not be 0", aborts=True),
    "model-rope-dims": Kind("even, above 0, at most key_length and the indexer's key_length", aborts=True),
    "model-no-full-attention": Kind("one layer at least must have full attention", aborts=True),
    "model-ple-conv": Kind("the PLE convolution needs 2 taps at least", aborts=True),
    # tensors
    "model-tensor-missing": Kind("the set is incomplete, or written for other software"),
    "model-tensor-extra": Kind("the file is written for other software, or mixed from two"),
    "model-tensor-shape": Kind("the file's keys and its tensors disagree: take a published file"),
    "model-tensor-type": Kind("norms, ssm_a, ssm_dt and ssm_conv1d must be F32", aborts=True),
    # draft heads
    "model-head-is-target": Kind("leave the head out, or name the file with the prediction layer"),
    "model-head-none": Kind("take a head file (mtp-*.gguf) made for this model"),
    "model-head-count": Kind("a head has exactly one prediction layer"),
    "model-head-block": Kind("take a head that numbers its block after the trunk's last layer"),
    "model-head-foreign": Kind("the head is made for other software: take one with nextn.hc_head_* tensors"),
    "model-head-width": Kind("take the head that was published with this model"),
    "model-head-vocab": Kind("take a head with the model's full vocabulary"),
    "model-head-ple": Kind("a head must not carry ple.* keys: the loader would demand the n-gram table"),
}


class Problem(Artefact):
    """One reason why llama-server would refuse a file, or abort on it."""

    id: str
    message: str
    hint: str
    file: Path | None = None
    aborts: bool = False


def problem(kind: str, message: str, file: Path | None = None, hint: str | None = None) -> Problem:
    """A problem of a known kind; a hint overrides the kind's own where more is known."""
    known = KINDS[kind]
    return Problem(id=kind, message=message, hint=hint or known.hint, file=file, aborts=known.aborts)


def listed(names: list[str], limit: int = 6) -> str:
    """The first few names and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
