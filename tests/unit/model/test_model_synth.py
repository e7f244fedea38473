"""Synthetic models: the real names, shapes and sizes; the same bytes for the same seed; heads that fit."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from flashnext.errors import ModelDiskFullError, ModelWriteError, UsageError
from flashnext.model import gguf_write, synth_data
from flashnext.model.gguf_format import TYPE_BY_NAME
from flashnext.model.header import read_header
from flashnext.model.inspect import Inspection, inspect_model
from flashnext.model.synth import SynthRequest, SynthResult, synthesise
from flashnext.model.synth_data import Weights, encode, random_blocks
from flashnext.model.synth_shape import BENCH, DEMO, TINY, Types, head_tensors, trunk_tensors
from flashnext.model.synth_tokenizer import byte_letters, tokenizer


def _synth(out: Path, **options: Any) -> SynthResult:
    return synthesise(SynthRequest(out=out, **options), lambda _total: None, lambda _bytes: None)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _sound(result: SynthResult) -> Inspection:
    found = inspect_model(result.model, result.head)
    assert found.problems == ()
    return found


def test_the_real_shapes_add_up_to_the_published_bytes() -> None:
    """48 real layers with the real table: every byte count of the published set and its heads."""
    sizes = tuple(20_000_000 + n - 20_000 for n in BENCH.ple_sizes)
    real = replace(BENCH, layers=48, ple_sizes=sizes)
    plans = list(trunk_tensors(real, 248_320, Types()))
    assert len(plans) == 1224
    assert sum(plan.size_bytes for plan in plans) == 111_323_630_080
    shared = list(head_tensors(real, 248_320, Types(), own_vocab=False))
    assert (len(shared), sum(p.size_bytes for p in shared)) == (32, 2_775_621_632)
    alone = list(head_tensors(real, 248_320, Types(), own_vocab=True))
    assert (len(alone), sum(p.size_bytes for p in alone)) == (34, 4_126_482_432)
    kinds = [plan.type.name for plan in shared]
    assert [kinds.count(kind) for kind in ("Q8_0", "F32", "BF16")] == [19, 11, 2]


def test_tiny_has_the_reference_size() -> None:
    plans = list(trunk_tensors(TINY, 265, Types()))
    assert (len(plans), sum(plan.size_bytes for plan in plans)) == (214, 12_732_128)


def test_tiny_is_sound_and_has_the_real_mix_of_types(tmp_path: Path) -> None:
    result = _synth(tmp_path, kind="tiny")
    found = _sound(result)
    assert result.tensor_bytes == found.tensor_bytes == 12_732_128
    assert result.model.stat().st_size == result.file_bytes
    assert [layer.types for layer in found.experts[1:3]] == [
        ("Q4_K", "Q4_K", "Q5_1"),
        ("Q5_K", "Q5_K", "Q8_0"),
    ]


def test_the_same_seed_writes_the_same_bytes_and_another_does_not(tmp_path: Path) -> None:
    first, again, other = (
        _synth(tmp_path / name, kind="tiny", layers=4, seed=seed, mtp="shared")
        for name, seed in (("a", 7), ("b", 7), ("c", 8))
    )
    assert [_digest(f) for f in first.files] == [_digest(f) for f in again.files]
    assert _digest(first.model) != _digest(other.model)
    assert first.model.name != other.model.with_name("x").name


def test_a_shard_set_holds_the_bytes_of_the_single_file(tmp_path: Path) -> None:
    single = _synth(tmp_path / "one.gguf", kind="tiny", layers=4)
    shards = _synth(tmp_path, kind="tiny", layers=4, shards=5)
    assert len(shards.files) == 5
    found = _sound(shards)
    assert found.shards[0].tensors == 0
    assert min(shard.tensors or 0 for shard in found.shards[1:]) > 0
    parts = [path.read_bytes()[read_header(path).data_start :] for path in shards.files[1:]]
    whole = single.model.read_bytes()
    assert b"".join(parts) == whole[read_header(single.model).data_start :]


@pytest.mark.parametrize("mtp", ["shared", "standalone", "embedded"])
@pytest.mark.parametrize("head_type", ["q8_0", "bf16", "f32", "q4_k_m"])
def test_every_head_form_and_type_fits(tmp_path: Path, mtp: str, head_type: str) -> None:
    result = _synth(tmp_path, kind="tiny", layers=4, mtp=mtp, head_type=head_type, head_ratio=4)
    found = _sound(result)
    assert found.head.form == mtp
    assert found.head.ratio == 4
    assert found.head.type == {"q8_0": "Q8_0", "bf16": "BF16", "f32": "F32", "q4_k_m": "Q4_K"}[head_type]


@pytest.mark.parametrize("expert_type", ["f32", "bf16", "q8_0", "q4_0", "q5_1", "q4_k", "q6_k"])
def test_expert_types(tmp_path: Path, expert_type: str) -> None:
    found = _sound(_synth(tmp_path, kind="tiny", layers=2, expert_type=expert_type))
    assert found.experts[0].types[0] == expert_type.upper()


def test_the_demo_allows_the_qualified_numbers(tmp_path: Path) -> None:
    result = _synth(tmp_path, kind="demo", mtp="shared")
    found = _sound(result)
    assert (found.hyper["expert_count"], found.hyper["expert_used_count"]) == (512, 10)
    assert found.hyper["context_length"] == 262144
    assert result.file_bytes < 400_000_000


def test_an_interrupted_bench_leaves_nothing(tmp_path: Path) -> None:
    request = SynthRequest(kind="bench", out=tmp_path, layers=2)
    written: list[int] = []

    def advance(count: int) -> None:
        written.append(count)
        if sum(written) > 50_000_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesise(request, lambda _total: None, advance)
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_above_the_pool_repeats_its_blocks_but_no_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synth_data, "POOL_BYTES", 200_000)
    plan = next(p for p in trunk_tensors(DEMO, 265, Types()) if p.name == "blk.0.ffn_gate_exps.weight")
    drawn = [bytes(memoryview(c)) for c in Weights(0, tokenizer()).chunks(plan)]
    raw = b"".join(drawn)
    assert len(raw) == plan.size_bytes
    each = plan.size_bytes // 512
    assert len({raw[i * each : (i + 1) * each] for i in range(512)}) > 470


def test_too_few_layers_and_too_many_shards_are_usage_errors(tmp_path: Path) -> None:
    for options in ({"layers": 1}, {"layers": 512}, {"shards": 900, "layers": 2}):
        with pytest.raises(UsageError):
            _synth(tmp_path, kind="tiny", **options)
    assert list(tmp_path.iterdir()) == []


def test_no_space_is_said_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(gguf_write.shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(ModelDiskFullError, match="1,000 free"):
        _synth(tmp_path, kind="tiny")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_while_writing_leaves_nothing(tmp_path: Path) -> None:
    def fail(_count: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelDiskFullError):
        synthesise(SynthRequest(kind="tiny", out=tmp_path, layers=2), lambda _total: None, fail)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ModelWriteError):
        _synth(tmp_path / "file" / "below", kind="tiny")


def test_the_tokenizer_has_every_byte_and_a_merge() -> None:
    words = tokenizer()
    assert len(words.tokens) == len(set(words.tokens)) == 265
    assert len(set(byte_letters())) == 256
    assert words.tokens[words.end_of_turn] == "<|im_end|>"
    assert words.tokens[words.tool_call] == "<tool_call>"
    padded = tokenizer(1000)
    assert padded.tokens[:265] == words.tokens
    assert len(set(padded.tokens)) == 1000


@pytest.mark.parametrize(
    "name", ["Q8_0", "Q4_0", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "BF16", "F32"]
)
def test_random_blocks_are_centred_and_scaled(name: str) -> None:
    kind = TYPE_BY_NAME[name]
    raw = random_blocks(np.random.default_rng(1), kind, 256 * 400, 0.0625)
    values = gguf.quants.dequantize(raw.reshape(400, -1), gguf.GGMLQuantizationType[name])
    assert values.shape == (400, 256)
    assert np.std(values) == pytest.approx(0.0625, rel=0.06)
    assert abs(np.mean(values)) < 0.008


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_the_own_k_rounding_is_undone_by_the_package(name: str) -> None:
    values = np.random.default_rng(2).standard_normal((8, 512)).astype(np.float32)
    raw = encode(values, TYPE_BY_NAME[name]).reshape(8, -1)
    back = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    assert np.abs(back - values).max() < {"Q4_K": 0.35, "Q6_K": 0.08}[name]


class _Weights:
    """Tensors of one file as floats, rows first."""

    def __init__(self, path: Path) -> None:
        self.tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        tensor = self.tensors[name]
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


def _rms(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def _mix(streams: np.ndarray[Any, Any], file: _Weights, prefix: str) -> np.ndarray[Any, Any]:
    """The hyper-connection mixer: [tokens, hc, E] to [tokens, E]."""
    tokens, hc, embd = streams.shape
    normed = (_rms(streams) * file[f"{prefix}norm.weight"].reshape(hc, embd)).reshape(tokens, -1)
    low = normed @ file[f"{prefix}down.weight"].T / hc
    gate = (low / (1 + np.exp(-low))) @ file[f"{prefix}up.weight"].T
    return (normed / (1 + np.exp(-gate))).reshape(tokens, hc, embd).mean(axis=1)


@pytest.mark.parametrize("head_type", ["q8_0", "f32", "bf16", "q4_k_m"])
def test_the_markov_head_predicts_what_the_trunk_says(tmp_path: Path, head_type: str) -> None:
    """With zero block outputs the trunk is a function of the last token; the head must be the same one."""
    result = _synth(tmp_path, kind="tiny", mtp="standalone", markov=True, head_type=head_type)
    assert result.head is not None
    trunk, head = _Weights(result.model), _Weights(result.head)
    for name in ("attn_output", "ffn_down_exps", "ffn_down_shexp"):
        assert not trunk[f"blk.3.{name}.weight"].any()
        assert not head[f"blk.8.{name}.weight"].any()
    assert not trunk["blk.0.ssm_out.weight"].any()
    assert not trunk["blk.1.ple_value.weight"].any()
    embedding = trunk["token_embd.weight"]
    streams = np.repeat(embedding[:, None, :], 4, axis=1)
    said = (_mix(streams, trunk, "output_hc_") @ trunk["output.weight"].T).argmax(axis=1)
    token = _rms(head["token_embd.weight"]) * head["blk.8.nextn.enorm.weight"]
    hidden = np.random.default_rng(3).standard_normal((len(token), 256)).astype(np.float32)
    projected = np.concatenate([token, hidden], axis=1) @ head["blk.8.nextn.eh_proj.weight"].T
    streams = np.repeat(projected[:, None, :], 4, axis=1)
    drafted = (_mix(streams, head, "blk.8.nextn.hc_head_") @ head["output.weight"].T).argmax(axis=1)
    following = Weights(0, tokenizer(), markov=True).successors()
    assert said.tolist() == [following[token] for token in range(265)]
    assert drafted.tolist() == said.tolist()
    assert len(set(following.values())) == len(tokenizer().printable)
