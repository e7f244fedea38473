"""Small model files with one thing wrong, and what is to be said about each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flashnext.model.gguf_format import TYPE_BY_NAME, ValueType
from flashnext.model.gguf_write import split, write_gguf
from flashnext.model.synth_shape import (
    ARCH,
    TINY,
    Metadata,
    Part,
    Plan,
    Types,
    head_tensors,
    metadata,
    trunk_tensors,
)
from flashnext.model.synth_tokenizer import tokenizer, tokenizer_metadata

MICRO = replace(TINY, name="micro", layers=4, experts=4, experts_used=2, context=256)
WORDS = tokenizer()
U32, I32, U64, F32, ARRAY = ValueType.U32, ValueType.I32, ValueType.U64, ValueType.F32, ValueType.ARRAY


@dataclass
class Draft:
    """A file before it is written: keys and tensors can be changed."""

    keys: Metadata
    plans: list[Plan] = field(default_factory=list)

    def put(self, key: str, kind: ValueType, value: Any) -> None:
        self.keys[f"{ARCH}.{key}"] = (kind, value)

    def u32(self, key: str, value: int) -> None:
        self.put(key, U32, value)

    def drop(self, key: str) -> None:
        del self.keys[key if key in self.keys else f"{ARCH}.{key}"]

    def drop_tensors(self, *parts: str) -> None:
        before = len(self.plans)
        self.plans = [p for p in self.plans if not p.name.startswith(parts)]
        assert len(self.plans) < before

    def drop_keys(self, part: str) -> None:
        self.keys = {key: value for key, value in self.keys.items() if part not in key}

    def add_tensor(self, name: str, *shape: int, kind: str = "F32") -> None:
        self.plans.append(Plan(name, shape, TYPE_BY_NAME[kind]))

    def reshape(self, name: str, *shape: int) -> None:
        self.plans = [p._replace(shape=shape) if p.name == name else p for p in self.plans]

    def rename(self, old: str, new: str) -> None:
        assert any(old in p.name for p in self.plans)
        self.plans = [p._replace(name=p.name.replace(old, new)) for p in self.plans]

    def write(self, path: Path) -> Path:
        write_gguf(path, self.keys, self.plans, _zeros, lambda _n: None)
        return path

    def write_shards(self, folder: Path, count: int, stem: str = "model") -> list[Path]:
        paths = []
        for i, (keys, plans) in enumerate(split(self.keys, self.plans, count)):
            path = folder / f"{stem}-{i + 1:05d}-of-{count:05d}.gguf"
            paths.append(Draft(keys, plans).write(path))
        return paths


def _zeros(plan: Plan) -> Iterator[bytes]:
    yield bytes(plan.size_bytes)


def draft(part: Part = "trunk", shape: Any = MICRO, ratio: int = 0) -> Draft:
    """A sound file of this part; zeros for weights."""
    keys = {**metadata(shape, part, ratio, WORDS.end_of_text), **tokenizer_metadata(WORDS)}
    plans: list[Plan] = []
    if part in ("trunk", "embedded"):
        plans += trunk_tensors(shape, len(WORDS.tokens), Types())
    if part != "trunk":
        plans += head_tensors(shape, len(WORDS.tokens), Types(), own_vocab=part == "standalone")
    return Draft(keys, plans)


Change = Callable[[Draft], Any]


@dataclass(frozen=True)
class Case:
    """One change to a sound trunk and the ids of the problems it must lead to; none = it loads."""

    name: str
    change: Change
    ids: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


def _without(key: str) -> Case:
    return Case(f"no {key}", lambda d: d.drop(key), ("model-key-missing",))


def _zero(key: str, *more: str) -> Case:
    return Case(f"{key} 0", lambda d: d.u32(key, 0), ("model-value-zero", *more))


def _short(key: str) -> Case:
    def change(d: Draft) -> None:
        element, items = d.keys[f"{ARCH}.{key}"][1]
        d.put(key, ARRAY, (element, items[:-1]))

    return Case(f"short {key}", change, ("model-ple-arrays",))


def _array(key: str, element: ValueType, items: list[int]) -> Change:
    return lambda d: d.put(key, ARRAY, (element, items))


def _retype(name: str, kind: str) -> Change:
    def change(d: Draft) -> None:
        d.plans = [p._replace(type=TYPE_BY_NAME[kind]) if p.name == name else p for p in d.plans]

    return change


def _no_experts(d: Draft) -> None:
    d.drop("expert_count")
    d.drop("expert_used_count")


def _announced(d: Draft) -> None:
    """Says that a fifth block predicts, and does not carry it: the loader never looks for it."""
    d.u32("block_count", 5)
    d.u32("nextn_predict_layers", 1)
    d.put("attention.compress_ratios", ARRAY, (I32, [0, 0, 0, 4, 0]))


def _one_layer(d: Draft) -> None:
    d.u32("block_count", 1)
    d.drop_keys("compress_ratios")
    d.drop_keys(".ple.")
    d.drop("embedding_length_per_layer_input")
    d.drop_tensors("blk.1.", "blk.2.", "blk.3.", "per_layer_token_embd")


def _dense_heads(d: Draft) -> None:
    """Key and value length follow from E / heads when they are absent: 256 / 4."""
    d.drop("attention.key_length")
    d.drop("attention.value_length")


def _fused(d: Draft) -> None:
    for layer in range(MICRO.layers):
        d.drop_tensors(f"blk.{layer}.ffn_gate_exps", f"blk.{layer}.ffn_up_exps")
        d.add_tensor(f"blk.{layer}.ffn_gate_up_exps.weight", 256, 128, 4, kind="Q4_K")


def _odd_groups(d: Draft) -> None:
    d.u32("ssm.group_count", 3)
    for layer in range(3):  # shapes that follow, so that the loader gets as far as its assert
        d.reshape(f"blk.{layer}.attn_qkv.weight", 256, 320)
        d.reshape(f"blk.{layer}.ssm_conv1d.weight", 4, 320)


def _short_values(d: Draft) -> None:
    d.u32("attention.value_length", 32)
    d.reshape("blk.3.attn_v.weight", 256, 64)


def _one_tap(d: Draft) -> None:
    d.u32("ple.conv_kernel", 1)
    d.reshape("blk.1.ple_conv1d.weight", 1, 1024)


# Every row of the loader's rules: what it refuses, what it aborts on, what it accepts.
REFUSED = [
    *(
        _without(key)
        for key in (
            "context_length",
            "embedding_length",
            "block_count",
            "attention.layer_norm_rms_epsilon",
            "attention.indexer.head_count",
            "attention.indexer.key_length",
            "attention.indexer.top_k",
            "rope.dimension_sections",
            "ssm.conv_kernel",
            "ssm.state_size",
            "ssm.group_count",
            "ssm.time_step_rank",
            "ssm.inner_size",
            "hyper_connection.count",
            "hyper_connection.low_rank",
            "ple.ngram_size",
            "ple.heads_per_ngram",
            "ple.conv_kernel",
            "ple.eos_token_id",
            "embedding_length_per_layer_input",
            "ple.layer_multipliers",
            "ple.head_offsets",
            "ple.head_vocab_sizes",
            "tokenizer.ggml.model",
            "tokenizer.ggml.tokens",
            "tokenizer.ggml.merges",
            "attention.head_count",
            "expert_feed_forward_length",
            "expert_shared_feed_forward_length",
        )
    ),
    Case("no head_count_kv", lambda d: d.drop("attention.head_count_kv"), ("model-tensor-shape",)),
    Case("hc count 1", lambda d: d.u32("hyper_connection.count", 1), ("model-hc-count",)),
    *(
        _zero(key)
        for key in (
            "attention.indexer.head_count",
            "attention.indexer.key_length",
            "attention.indexer.top_k",
            "full_attention_interval",
            "ssm.conv_kernel",
            "ssm.state_size",
            "ssm.group_count",
            "ssm.time_step_rank",
            "ssm.inner_size",
            "hyper_connection.low_rank",
            "ple.conv_kernel",
            "embedding_length_per_layer_input",
        )
    ),
    Case("n-gram 1", lambda d: d.u32("ple.ngram_size", 1), ("model-ple-range",)),
    Case("n-gram 9", lambda d: d.u32("ple.ngram_size", 9), ("model-ple-range",)),
    Case("PLE heads 0", lambda d: d.u32("ple.heads_per_ngram", 0), ("model-ple-range",)),
    Case("PLE heads 66", lambda d: d.u32("ple.heads_per_ngram", 33), ("model-ple-range",)),
    Case("PLE on full attention", _array("ple.layers", I32, [3]), ("model-ple-layer",)),
    Case("two PLE layers", _array("ple.layers", I32, [0, 1]), ("model-ple-layer",)),
    Case("PLE layer too high", _array("ple.layers", I32, [4]), ("model-ple-layer",)),
    _short("ple.layer_multipliers"),
    _short("ple.head_offsets"),
    _short("ple.head_vocab_sizes"),
    Case("multipliers i32", _array("ple.layer_multipliers", I32, [1, 2, 3]), ("model-key-type",)),
    Case(
        "PLE head of 0 rows",
        _array("ple.head_vocab_sizes", U64, [101, 0, 107, 109]),
        ("model-ple-head-range",),
    ),
    Case(
        "PLE head above 2^31",
        _array("ple.head_offsets", U64, [0, 101, 204, 2**31 - 5]),
        ("model-ple-head-range",),
    ),
    Case(
        "short PLE table",
        lambda d: d.reshape("per_layer_token_embd.weight", 64, 400),
        ("model-ple-table-rows",),
    ),
    Case("3 ratios", _array("attention.compress_ratios", I32, [0, 0, 4]), ("model-array-length",)),
    Case("3 sections", _array("rope.dimension_sections", I32, [6, 5, 5]), ("model-array-length",)),
    Case(
        "5 recurrent flags",
        lambda d: d.put("attention.recurrent_layers", ARRAY, (ValueType.BOOL, [True] * 5)),
        ("model-array-length",),
    ),
    Case("tensor missing", lambda d: d.drop_tensors("blk.3.attn_k.weight"), ("model-tensor-missing",)),
    Case("tensor extra", lambda d: d.add_tensor("blk.3.attn_norm.weight", 256), ("model-tensor-extra",)),
    Case("PLE tensors without keys", lambda d: d.drop("ple.layers"), ("model-ple-keys-missing",)),
    Case("shape", lambda d: d.reshape("blk.3.attn_k.weight", 256, 64), ("model-tensor-shape",)),
    Case("width as i32", lambda d: d.put("embedding_length", I32, 256), ("model-key-type",)),
    Case("neither expert count", _no_experts, ("model-key-missing",)),
    Case("rope base as u32", lambda d: d.u32("rope.freq_base", 10000), ("model-key-type",)),
    Case(
        "token types",
        lambda d: d.keys.update({"tokenizer.ggml.token_type": (ARRAY, (I32, [1, 1]))}),
        ("model-array-length",),
    ),
    Case("router scale", lambda d: d.add_tensor("blk.0.ffn_gate_inp.scale", 1), ("model-tensor-extra",)),
    Case(
        "two at once",
        lambda d: (d.drop("context_length"), d.u32("attention.indexer.top_k", 0)),
        ("model-key-missing", "model-value-zero"),
    ),
]
ABORTING = [
    Case("no expert_count", lambda d: d.drop("expert_count"), ("model-expert-count",)),
    Case("more used than there are", lambda d: d.u32("expert_used_count", 5), ("model-expert-count",)),
    Case("0 experts used", lambda d: d.u32("expert_used_count", 0), ("model-expert-count",)),
    Case("2000 experts", lambda d: d.u32("expert_count", 2000), ("model-expert-count",)),
    Case("0 blocks", lambda d: d.u32("block_count", 0), ("model-block-count",)),
    Case("more predicted than blocks", lambda d: d.u32("nextn_predict_layers", 5), ("model-nextn-count",)),
    Case("inner size", lambda d: d.u32("ssm.inner_size", 256), ("model-ssm-sizes",)),
    Case("rank no multiple of groups", _odd_groups, ("model-ssm-sizes",)),
    Case("key and value length", _short_values, ("model-head-dim",)),
    Case("ratio 65", _array("attention.compress_ratios", I32, [0, 0, 0, 65]), ("model-compress-ratio",)),
    Case("sections 0", _array("rope.dimension_sections", I32, [0] * 4), ("model-rope-sections",)),
    Case("n_rot above head", lambda d: d.u32("rope.dimension_count", 66), ("model-rope-dims",)),
    Case("odd n_rot", lambda d: d.u32("rope.dimension_count", 31), ("model-rope-dims",)),
    Case("ratio -1", _array("attention.compress_ratios", I32, [0, 0, 0, -1]), ("model-compress-ratio",)),
    Case("norm as F16", _retype("blk.0.hc_attn_norm.weight", "F16"), ("model-tensor-type",)),
    Case("ssm_a as F16", _retype("blk.0.ssm_a", "F16"), ("model-tensor-type",)),
    Case("experts as I32", _retype("blk.0.ffn_gate_exps.weight", "I32"), ("model-tensor-type",)),
    Case("one layer", _one_layer, ("model-no-full-attention",)),
    Case("PLE conv 1", _one_tap, ("model-ple-conv",)),
]
ACCEPTED = [
    Case("as it is", lambda d: None),
    Case("no ratios", lambda d: d.drop("attention.compress_ratios")),
    Case("scalar ratio", lambda d: d.u32("attention.compress_ratios", 4)),
    Case("ratios u32", _array("attention.compress_ratios", U32, [0, 0, 0, 4])),
    Case("all ratios 0", _array("attention.compress_ratios", I32, [0] * 4)),
    Case(
        "recurrent_layers bool",
        lambda d: d.put("attention.recurrent_layers", ARRAY, (ValueType.BOOL, [True] * 3 + [False])),
    ),
    Case("recurrent_layers i32", _array("attention.recurrent_layers", I32, [1, 1, 1, 0])),
    Case("sections of another sum", _array("rope.dimension_sections", I32, [8, 4, 0, 0])),
    Case("lengths from width and heads", _dense_heads),
    Case("no output", lambda d: d.drop_tensors("output.weight")),
    Case("gamma [E, hc]", lambda d: d.reshape("blk.0.hc_attn_norm.weight", 256, 4)),
    Case("interval absent", lambda d: d.drop("full_attention_interval")),
    Case("heads as array", _array("attention.head_count", I32, [4] * 4)),
    Case("fused gate and up", _fused),
    Case("expert scale", lambda d: d.add_tensor("blk.0.ffn_down_exps.scale", 4)),
    Case("ratios bool", _array("attention.compress_ratios", ValueType.BOOL, [False, False, False, True])),
    Case("router as F16", _retype("blk.0.ffn_gate_inp.weight", "F16")),
    Case("prediction announced only", _announced),
    Case("bias of q", lambda d: d.add_tensor("blk.3.attn_q.bias", 512)),
    Case("no chat template", lambda d: d.drop("tokenizer.chat_template")),
    Case("larger PLE table", lambda d: d.reshape("per_layer_token_embd.weight", 64, 640)),
]
