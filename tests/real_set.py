"""The published files as sparse ones: real headers and sizes, holes for data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flashnext.model.gguf_write import file_bytes, header_bytes, split
from flashnext.model.synth_shape import BENCH, Metadata, Plan, Types, head_tensors, metadata, trunk_tensors
from flashnext.model.synth_tokenizer import tokenizer, tokenizer_metadata

REAL = replace(BENCH, layers=48, ple_sizes=tuple(19_980_000 + n for n in BENCH.ple_sizes))
NAME = "Qwen3.8-Flash-Next-UD-Q4_K_XL"


def _sparse(path: Path, keys: Metadata, plans: list[Plan]) -> Path:
    with path.open("wb") as stream:
        stream.write(header_bytes(keys, plans))
        stream.truncate(file_bytes(keys, plans))
    return path


def write_real_set(folder: Path) -> tuple[Path, Path]:
    """(first shard, shared head)."""
    words = tokenizer(REAL.vocab)
    keys = {**metadata(REAL, "trunk", 0, words.end_of_text), **tokenizer_metadata(words)}
    plans = list(trunk_tensors(REAL, len(words.tokens), Types()))
    shards = [
        _sparse(folder / f"{NAME}-{i + 1:05d}-of-00004.gguf", part, some)
        for i, (part, some) in enumerate(split(keys, plans, 4))
    ]
    keys = {**metadata(REAL, "shared", 0, words.end_of_text), **tokenizer_metadata(words)}
    own = list(head_tensors(REAL, len(words.tokens), Types(), own_vocab=False))
    return shards[0], _sparse(folder / "head.gguf", keys, own)
