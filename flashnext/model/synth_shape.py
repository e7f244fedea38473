"""The shapes of the synthetic qwen4exp models: hyperparameters, metadata, the list of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from flashnext.model.gguf_format import TYPE_BY_NAME, TensorType, ValueType

ARCH = "qwen4exp"
# The real model's hash constants; the loader demands 64-bit integers.
PLE_MULTIPLIERS = (23703573157769, 20109073645365, 8052911324071)

Metadata = dict[str, tuple[ValueType, Any]]
Part = Literal["trunk", "shared", "standalone", "embedded"]


@dataclass(frozen=True)
class Shape:
    """Hyperparameters of one model; names follow the GGUF keys. Widths are in elements."""

    name: str
    layers: int
    context: int
    embd: int
    hc: int
    low_rank: int
    heads: int
    kv_heads: int
    head_dim: int
    n_rot: int
    rope_sections: tuple[int, int, int, int]
    index_heads: int
    index_dim: int
    top_k: int
    ratio: int
    ssm_state: int
    ssm_groups: int
    ssm_rank: int
    ssm_conv: int
    experts: int
    experts_used: int
    expert_ff: int
    shared_ff: int
    ple_heads_per_ngram: int
    ple_sizes: tuple[int, ...]
    ple_ngram: int = 3
    ple_conv: int = 4
    vocab: int | None = None  # None: the tokenizer's own size; larger: padded with unused tokens

    @property
    def wide(self) -> int:
        return self.hc * self.embd

    @property
    def interval(self) -> int:
        """Every interval-th layer has full attention: 4, or fewer in a model of fewer layers."""
        return min(4, self.layers)

    @property
    def ple_layer(self) -> int:
        return 1 if self.interval > 2 else 0

    @property
    def ple_rows(self) -> int:
        """Rows of the table: all head ranges, padded to 128 as the converter does."""
        return -(-sum(self.ple_sizes) // 128) * 128

    @property
    def ple_dim(self) -> int:
        return self.embd // len(self.ple_sizes)

    def is_full(self, layer: int) -> bool:
        return (layer + 1) % self.interval == 0


_REAL_SIZES = (3, 23, 33, 47, 59, 63, 69, 77, 81, 93, 107, 147, 153, 159, 161, 171)

TINY = Shape(
    name="tiny",
    layers=8,
    context=4096,
    embd=256,
    hc=4,
    low_rank=32,
    heads=4,
    kv_heads=2,
    head_dim=64,
    n_rot=32,
    rope_sections=(6, 5, 5, 0),
    index_heads=2,
    index_dim=64,
    top_k=16,
    ratio=4,
    ssm_state=32,
    ssm_groups=2,
    ssm_rank=4,
    ssm_conv=4,
    experts=32,
    experts_used=4,
    expert_ff=64,
    shared_ff=64,
    ple_heads_per_ngram=2,
    ple_sizes=(101, 103, 107, 109),
)
# Wide enough in tokens, experts and context for every qualified number, narrow in everything else.
DEMO = replace(
    TINY,
    name="demo",
    context=262144,
    top_k=256,
    experts=512,
    experts_used=10,
    expert_ff=32,
    shared_ff=32,
)
# The real layer, with a small n-gram table (the real one has 20,000,003 and more rows a head: 28.8 GB).
BENCH = Shape(
    name="bench",
    layers=12,
    context=262144,
    embd=2560,
    hc=4,
    low_rank=320,
    heads=24,
    kv_heads=2,
    head_dim=256,
    n_rot=64,
    rope_sections=(11, 11, 10, 0),
    index_heads=4,
    index_dim=128,
    top_k=2048,
    ratio=4,
    ssm_state=128,
    ssm_groups=16,
    ssm_rank=48,
    ssm_conv=4,
    experts=512,
    experts_used=10,
    expert_ff=640,
    shared_ff=640,
    ple_heads_per_ngram=8,
    ple_sizes=tuple(20_000 + n for n in _REAL_SIZES),
    vocab=248_320,
)
SHAPES = {shape.name: shape for shape in (TINY, DEMO, BENCH)}


class Plan(NamedTuple):
    """One tensor to write: name, shape in ggml order (row length first), type."""

    name: str
    shape: tuple[int, ...]
    type: TensorType

    @property
    def rows(self) -> int:
        rows = 1
        for n in self.shape[1:]:
            rows *= n
        return rows

    @property
    def size_bytes(self) -> int:
        return self.type.row_bytes(self.shape[0]) * self.rows


def metadata(shape: Shape, part: Part, head_ratio: int, eos: int) -> Metadata:
    """The `general.*` and `qwen4exp.*` keys of a trunk, a head file or an embedded file."""
    has_head = part != "trunk"
    blocks = shape.layers + has_head
    ratios = [shape.ratio if shape.is_full(i) else 0 for i in range(shape.layers)]
    keys: Metadata = {
        "general.architecture": (ValueType.STRING, ARCH),
        "general.type": (ValueType.STRING, "model"),
        "general.name": (ValueType.STRING, f"flashnext synthetic {shape.name}"),
        "general.file_type": (ValueType.U32, 15 if part in ("trunk", "embedded") else 7),
    }

    def put(key: str, kind: ValueType, value: Any) -> None:
        keys[f"{ARCH}.{key}"] = (kind, value)

    u32 = ValueType.U32
    for key, number in (
        ("block_count", blocks),
        ("context_length", shape.context),
        ("embedding_length", shape.embd),
        ("attention.head_count", shape.heads),
        ("attention.head_count_kv", shape.kv_heads),
        ("attention.key_length", shape.head_dim),
        ("attention.value_length", shape.head_dim),
        ("attention.indexer.head_count", shape.index_heads),
        ("attention.indexer.key_length", shape.index_dim),
        ("attention.indexer.top_k", shape.top_k),
        ("full_attention_interval", shape.interval),
        ("rope.dimension_count", shape.n_rot),
        ("expert_count", shape.experts),
        ("expert_used_count", shape.experts_used),
        ("expert_feed_forward_length", shape.expert_ff),
        ("expert_shared_feed_forward_length", shape.shared_ff),
        ("ssm.conv_kernel", shape.ssm_conv),
        ("ssm.state_size", shape.ssm_state),
        ("ssm.group_count", shape.ssm_groups),
        ("ssm.time_step_rank", shape.ssm_rank),
        ("ssm.inner_size", shape.ssm_state * shape.ssm_rank),
        ("hyper_connection.count", shape.hc),
        ("hyper_connection.low_rank", shape.low_rank),
    ):
        put(key, u32, number)
    put("attention.layer_norm_rms_epsilon", ValueType.F32, 1e-6)
    put("rope.freq_base", ValueType.F32, 1e7)
    put("rope.dimension_sections", ValueType.ARRAY, (ValueType.I32, list(shape.rope_sections)))
    put(
        "attention.compress_ratios",
        ValueType.ARRAY,
        (ValueType.I32, ratios + [head_ratio] * has_head),
    )
    if has_head:
        put("nextn_predict_layers", u32, 1)
    if part == "shared":
        keys["nextn_shared_target_tensors"] = (ValueType.BOOL, True)
    if part in ("trunk", "embedded"):  # a head file with ple.* would demand the table
        sizes = shape.ple_sizes
        put("ple.layers", ValueType.ARRAY, (ValueType.I32, [shape.ple_layer]))
        put("ple.ngram_size", u32, shape.ple_ngram)
        put("ple.heads_per_ngram", u32, shape.ple_heads_per_ngram)
        put("ple.conv_kernel", u32, shape.ple_conv)
        put("ple.eos_token_id", u32, eos)
        put("embedding_length_per_layer_input", u32, shape.ple_dim)
        u64 = ValueType.U64
        put("ple.layer_multipliers", ValueType.ARRAY, (u64, list(PLE_MULTIPLIERS[: shape.ple_ngram])))
        put("ple.head_vocab_sizes", ValueType.ARRAY, (u64, list(sizes)))
        put("ple.head_offsets", ValueType.ARRAY, (u64, [sum(sizes[:i]) for i in range(len(sizes))]))
    return keys


class Types(NamedTuple):
    """Which type each class of tensor gets; None for the expert type means the mix of the real files."""

    expert: str | None = None
    head: str = "Q8_0"


def _fit(row: int, *names: str) -> TensorType:
    """The first type whose blocks fill a row of this length; quantisers fall back in the same way."""
    return next(TYPE_BY_NAME[name] for name in (*names, "F16") if row % TYPE_BY_NAME[name].block == 0)


def trunk_tensors(shape: Shape, vocab: int, types: Types) -> Iterator[Plan]:
    """All tensors of the trunk in file order: globals first, then layer by layer."""
    q8, f32 = "Q8_0", "F32"
    wide, embd = shape.wide, shape.embd
    yield _plan("token_embd.weight", (embd, vocab), q8)
    yield _plan("output.weight", (embd, vocab), q8)
    yield _plan("output_hc_norm.weight", (wide,), f32)
    yield _plan("output_hc_down.weight", (wide, shape.low_rank), q8)
    yield _plan("output_hc_up.weight", (shape.low_rank, wide), q8)
    yield _plan("per_layer_token_embd.weight", (shape.ple_dim, shape.ple_rows), "IQ4_NL")
    for layer in range(shape.layers):
        yield from _layer(shape, layer, types)


def _plan(name: str, dims: tuple[int, ...], *types: str) -> Plan:
    return Plan(name, dims, _fit(dims[0], *types))


def _hyper(shape: Shape, blk: str, inject: str, quant: dict[str, tuple[str, ...]]) -> Iterator[Plan]:
    for site in ("attn", "ffn"):
        yield _plan(f"{blk}hc_{site}_norm.weight", (shape.wide,), "F32")
        yield _plan(f"{blk}hc_{site}_down.weight", (shape.wide, shape.low_rank), *quant[f"{site}_down"])
        yield _plan(f"{blk}hc_{site}_up.weight", (shape.low_rank, shape.wide), *quant["up"])
        yield _plan(f"{blk}hc_{site}_inject.weight", (shape.wide, shape.hc), inject)


def _attention(shape: Shape, blk: str, matrix: tuple[str, ...], value: tuple[str, ...]) -> Iterator[Plan]:
    index = "F32" if matrix == ("F32",) else "BF16"
    inner, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield _plan(f"{blk}attn_q.weight", (shape.embd, 2 * inner), *matrix)
    yield _plan(f"{blk}attn_k.weight", (shape.embd, kv), *matrix)
    yield _plan(f"{blk}attn_v.weight", (shape.embd, kv), *value)
    yield _plan(f"{blk}attn_output.weight", (inner, shape.embd), *matrix)
    yield _plan(f"{blk}attn_q_norm.weight", (shape.head_dim,), "F32")
    yield _plan(f"{blk}attn_k_norm.weight", (shape.head_dim,), "F32")
    yield _plan(f"{blk}indexer.q_proj.weight", (shape.embd, shape.index_heads * shape.index_dim), index)
    yield _plan(f"{blk}indexer.k_proj.weight", (shape.embd, shape.index_dim), index)
    yield _plan(f"{blk}indexer.q_norm.weight", (shape.index_dim,), "F32")
    yield _plan(f"{blk}indexer.k_norm.weight", (shape.index_dim,), "F32")


def _delta_net(shape: Shape, blk: str) -> Iterator[Plan]:
    value = shape.ssm_state * shape.ssm_rank
    mixed = 2 * shape.ssm_state * shape.ssm_groups + value
    yield _plan(f"{blk}attn_qkv.weight", (shape.embd, mixed), "Q8_0")
    yield _plan(f"{blk}attn_gate.weight", (shape.embd, value), "Q8_0")
    yield _plan(f"{blk}ssm_conv1d.weight", (shape.ssm_conv, mixed), "F32")
    yield _plan(f"{blk}ssm_dt.bias", (shape.ssm_rank,), "F32")
    yield _plan(f"{blk}ssm_a", (shape.ssm_rank,), "F32")
    yield _plan(f"{blk}ssm_alpha.weight", (shape.embd, shape.ssm_rank), "F32")
    yield _plan(f"{blk}ssm_beta.weight", (shape.embd, shape.ssm_rank), "F32")
    yield _plan(f"{blk}ssm_norm.weight", (shape.ssm_state,), "F32")
    yield _plan(f"{blk}ssm_out.weight", (value, shape.embd), "Q8_0")


def _experts(
    shape: Shape, blk: str, gate_up: tuple[str, ...], down: tuple[str, ...], shared: tuple[str, ...]
) -> Iterator[Plan]:
    embd, ff, count = shape.embd, shape.expert_ff, shape.experts
    yield _plan(f"{blk}ffn_gate_inp.weight", (embd, count), "F32")
    yield _plan(f"{blk}ffn_gate_exps.weight", (embd, ff, count), *gate_up)
    yield _plan(f"{blk}ffn_up_exps.weight", (embd, ff, count), *gate_up)
    yield _plan(f"{blk}ffn_down_exps.weight", (ff, embd, count), *down)
    yield _plan(f"{blk}ffn_gate_inp_shexp.weight", (embd,), "F32")
    yield _plan(f"{blk}ffn_gate_shexp.weight", (embd, shape.shared_ff), *shared)
    yield _plan(f"{blk}ffn_up_shexp.weight", (embd, shape.shared_ff), *shared)
    yield _plan(f"{blk}ffn_down_shexp.weight", (shape.shared_ff, embd), *shared)


def _layer(shape: Shape, layer: int, types: Types) -> Iterator[Plan]:
    blk = f"blk.{layer}."
    q8 = ("Q8_0",)
    yield from _hyper(shape, blk, "F32", {"attn_down": q8, "ffn_down": q8, "up": q8})
    if shape.is_full(layer):
        yield from _attention(shape, blk, q8, q8)
    else:
        yield from _delta_net(shape, blk)
    if layer == shape.ple_layer:
        yield _plan(f"{blk}ple_key.weight", (shape.embd, shape.wide), *q8)
        yield _plan(f"{blk}ple_value.weight", (shape.embd, shape.embd), *q8)
        for norm in ("key", "query", "conv"):
            yield _plan(f"{blk}ple_norm_{norm}.weight", (shape.wide,), "F32")
        yield _plan(f"{blk}ple_conv1d.weight", (shape.ple_conv, shape.wide), "F32")
    if types.expert is None:  # the mix of the real files
        gate_up: tuple[str, ...] = ("Q5_K",) if layer == 2 else ("Q4_K",)
        down: tuple[str, ...] = q8 if layer in (2, 4, 30, 46, 47) else ("Q5_1",)
    else:
        gate_up = down = (types.expert, *_FALLBACK.get(types.expert, ()))
    yield from _experts(shape, blk, gate_up, down, q8)


# What a stock quantiser takes where a row is no multiple of 256.
_FALLBACK = {"Q4_K": ("Q5_0",), "Q5_K": ("Q5_1",), "Q6_K": ("Q8_0",)}


def head_tensors(shape: Shape, vocab: int, types: Types, *, own_vocab: bool) -> Iterator[Plan]:
    """The 32 tensors of the prediction block; with own_vocab also the head's `token_embd` and `output`."""
    kind = types.head
    main: tuple[str, ...] = (kind, *_FALLBACK.get(kind, ()))
    up, fine, down = main, main, main
    if kind == "Q4_K":  # the stock Q4_K_M mix
        up, fine, down = ("Q5_0",), ("Q6_K", "Q8_0"), ("Q6_K", "Q8_0")
    if own_vocab:
        yield _plan("token_embd.weight", (shape.embd, vocab), *main)
        yield _plan("output.weight", (shape.embd, vocab), *fine)
    blk = f"blk.{shape.layers}."
    yield from _hyper(
        shape,
        blk,
        "F32" if kind == "Q4_K" else kind,
        {"attn_down": main, "ffn_down": fine, "up": up},
    )
    yield from _attention(shape, blk, main, fine)
    yield from _experts(shape, blk, main, down, main)
    yield _plan(f"{blk}nextn.eh_proj.weight", (2 * shape.embd, shape.embd), *main)
    yield _plan(f"{blk}nextn.enorm.weight", (shape.embd,), "F32")
    yield _plan(f"{blk}nextn.hnorm.weight", (shape.wide,), "F32")
    yield _plan(f"{blk}nextn.hc_head_norm.weight", (shape.wide,), "F32")
    yield _plan(f"{blk}nextn.hc_head_down.weight", (shape.wide, shape.low_rank), *main)
    yield _plan(f"{blk}nextn.hc_head_up.weight", (shape.low_rank, shape.wide), *up)
