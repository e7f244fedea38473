"""A set of the real size and layout, as sparse files: headers are real, the tensor data are holes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from model_variants import Draft

from flashnext.model.gguf_write import file_bytes, header_bytes, split
from flashnext.model.inspect import inspect_model
from flashnext.model.synth_shape import BENCH, Types, metadata, trunk_tensors
from flashnext.model.synth_tokenizer import tokenizer, tokenizer_metadata

_REAL = replace(BENCH, layers=48, ple_sizes=tuple(19_980_000 + n for n in BENCH.ple_sizes))


@pytest.fixture
def published(tmp_path: Path) -> list[Path]:
    words = tokenizer(_REAL.vocab)
    keys = {**metadata(_REAL, "trunk", 0, words.end_of_text), **tokenizer_metadata(words)}
    whole = Draft(keys, list(trunk_tensors(_REAL, len(words.tokens), Types())))
    paths = []
    for i, (part, plans) in enumerate(split(whole.keys, whole.plans, 4)):
        path = tmp_path / f"Qwen3.8-Flash-Next-UD-Q4_K_XL-{i + 1:05d}-of-00004.gguf"
        with path.open("wb") as stream:
            stream.write(header_bytes(part, plans))
            stream.truncate(file_bytes(part, plans))
        paths.append(path)
    return paths


def test_the_real_set_is_read_in_a_moment_and_adds_up(published: list[Path]) -> None:
    start = time.process_time()
    found = inspect_model(published[0])
    assert time.process_time() - start < 3
    assert found.ok
    assert len(found.tensors) == 1224
    assert found.tensor_bytes == 111_323_630_080
    assert sum(layer.size_bytes for layer in found.experts) == 77_017_907_200
    sizes = {layer.layer: layer.expert_bytes for layer in found.experts}
    assert {layer: size for layer, size in sizes.items() if size != 3_072_000} == {
        2: 3_993_600,
        **dict.fromkeys((4, 30, 46, 47), 3_584_000),
    }


def test_a_layer_may_lie_in_two_shards(published: list[Path]) -> None:
    files: dict[str, set[str]] = {}
    for tensor in inspect_model(published[0]).tensors:
        files.setdefault(".".join(tensor.name.split(".")[:2]), set()).add(tensor.file)
    assert any(len(names) == 2 for block, names in files.items() if block.startswith("blk."))


def test_a_cut_last_shard_of_the_real_set(published: list[Path]) -> None:
    with published[3].open("r+b") as stream:
        stream.truncate(published[3].stat().st_size - 1_000_000_000)
    found = inspect_model(published[0])
    assert [problem.id for problem in found.problems] == ["model-truncated"]
