"""Hyperparameters of a qwen4exp file, read as the pinned loader reads them, with all its objections."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flashnext.model.gguf_format import ValueType
from flashnext.model.header import Header
from flashnext.model.problems import Problem, problem
from flashnext.model.synth_shape import ARCH

_U32, _F32 = ValueType.U32, ValueType.F32
_INT32S = frozenset({ValueType.U32, ValueType.I32})
_LIST = _INT32S | {ValueType.BOOL}  # what the loader takes as an array with one entry a block
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Ple:
    """The n-gram hash embedding: its layer, head ranges and widths."""

    layer: int
    ngram: int
    heads: int
    conv: int
    dim: int
    rows: int


@dataclass(frozen=True)
class Hyper:
    """What the shapes of all tensors follow from. Layer lists have one entry a block, prediction included."""

    blocks: int
    nextn: int
    context: int
    embd: int
    vocab: int
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    head_dim: int
    index_heads: int
    index_dim: int
    top_k: int
    ratios: tuple[int, ...]
    recurrent: tuple[bool, ...]
    hc: int
    low_rank: int
    ssm_conv: int
    ssm_state: int
    ssm_groups: int
    ssm_rank: int
    experts: int
    experts_used: int
    expert_ff: int
    shared_ff: int
    ple: Ple | None

    @property
    def layers(self) -> int:
        """Trunk layers."""
        return self.blocks - self.nextn

    @property
    def wide(self) -> int:
        return self.hc * self.embd


class Keys:
    """Reads keys with the loader's own strictness and collects every objection."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.problems: list[Problem] = []

    @property
    def file(self) -> Path:
        return self.header.path

    def add(self, kind: str, message: str) -> None:
        self.problems.append(problem(kind, f"{self.file.name}: {message}", self.file))

    def u32(self, key: str, default: int | None = None, *, positive: bool = False) -> int:
        """A u32 key; without default it is required. 0 stands for a value that was objected to."""
        name = f"{ARCH}.{key}"
        value = self.header.metadata.get(name)
        if value is None:
            if default is None:
                self.add("model-key-missing", f"{name} is missing")
            return default or 0
        if value.type is not _U32:
            self.add("model-key-type", f"{name} has type {value.type.name}, expected U32")
            return 0
        if positive and value.data == 0:
            self.add("model-value-zero", f"{name} must be greater than zero")
        return int(value.data)

    def f32(self, key: str, *, required: bool = True) -> None:
        name = f"{ARCH}.{key}"
        value = self.header.metadata.get(name)
        if value is None and required:
            self.add("model-key-missing", f"{name} is missing")
        elif value is not None and value.type is not _F32:
            self.add("model-key-type", f"{name} has type {value.type.name}, expected F32")

    def per_block(self, key: str, blocks: int, default: int | None) -> list[int]:
        """A scalar u32 for all blocks, or an array with one entry a block."""
        name = f"{ARCH}.{key}"
        value = self.header.metadata.get(name)
        if value is None or value.type is not ValueType.ARRAY:
            return [self.u32(key, default)] * blocks
        if value.element not in _LIST:
            self.add("model-key-type", f"{name} has elements of the wrong type {_name(value.element)}")
            return [0] * blocks
        if value.count != blocks or value.data is None:
            self.add("model-array-length", f"{name} has {value.count} entries, expected {blocks}")
            return [0] * blocks
        return [int(n) for n in value.data]

    def array(self, key: str, element: ValueType, at_least: int) -> list[int]:
        """The first `at_least` entries of an array key with exactly this element type."""
        name = f"{ARCH}.{key}"
        value = self.header.metadata.get(name)
        if value is None or value.type is not ValueType.ARRAY:
            self.add("model-key-missing", f"{name} is missing, or no array")
            return []
        if value.element is not element:
            self.add(
                "model-key-type", f"{name} has elements of type {_name(value.element)}, not {element.name}"
            )
            return []
        if value.count < at_least or value.data is None:
            self.add("model-ple-arrays", f"{name} has {value.count} entries, at least {at_least} are needed")
            return []
        return [int(n) for n in value.data[:at_least]]


def _name(element: ValueType | None) -> str:
    return element.name if element is not None else "none"


def read_hyper(header: Header) -> tuple[Hyper | None, list[Problem]]:
    """Hyperparameters and problems. Hyper is None where the keys do not allow to say which tensors belong."""
    keys = Keys(header)
    blocks, nextn = _blocks(keys)
    vocab = _tokenizer(keys)
    if any(p.id in ("model-block-count", "model-nextn-count") for p in keys.problems) or not blocks:
        return None, keys.problems
    ple_wanted = f"{ARCH}.ple.layers" in header.metadata
    head_dim, n_rot = _attention_dims(keys)
    context, embd = keys.u32("context_length"), keys.u32("embedding_length")
    keys.f32("attention.layer_norm_rms_epsilon")
    keys.f32("rope.freq_base", required=False)
    index_heads = keys.u32("attention.indexer.head_count", positive=True)
    index_dim = keys.u32("attention.indexer.key_length", positive=True)
    top_k = keys.u32("attention.indexer.top_k", positive=True)
    _rope(keys, n_rot, head_dim, index_dim)
    recurrent = _recurrent(keys, blocks, nextn)
    experts, used, expert_ff = _experts(keys, blocks)
    conv, state, groups, rank = _ssm(keys)
    heads = keys.per_block("attention.head_count", blocks, None)
    hyper = Hyper(
        blocks=blocks,
        nextn=nextn,
        context=context,
        embd=embd,
        vocab=vocab,
        heads=tuple(heads),
        kv_heads=tuple(keys.per_block("attention.head_count_kv", blocks, heads[0])),
        head_dim=head_dim,
        index_heads=index_heads,
        index_dim=index_dim,
        top_k=top_k,
        ratios=tuple(_ratios(keys, blocks)),
        recurrent=recurrent,
        hc=_hyper_connections(keys),
        low_rank=keys.u32("hyper_connection.low_rank", positive=True),
        ssm_conv=conv,
        ssm_state=state,
        ssm_groups=groups,
        ssm_rank=rank,
        experts=experts,
        experts_used=used,
        expert_ff=expert_ff,
        shared_ff=keys.u32("expert_shared_feed_forward_length"),
        ple=_ple(keys, recurrent) if ple_wanted else None,
    )
    return (None if keys.problems else hyper), keys.problems


def _blocks(keys: Keys) -> tuple[int, int]:
    blocks = keys.u32("block_count")
    nextn = keys.u32("nextn_predict_layers", 0)
    if f"{ARCH}.block_count" in keys.header.metadata and not 1 <= blocks <= 512:
        keys.add("model-block-count", f"block_count is {blocks}, must be 1 to 512")
    elif nextn > blocks:
        keys.add("model-nextn-count", f"nextn_predict_layers is {nextn}, block_count {blocks}")
    return blocks, nextn


def _tokenizer(keys: Keys) -> int:
    for key in ("model", "tokens", "merges"):
        if f"tokenizer.ggml.{key}" not in keys.header.metadata:
            keys.add("model-key-missing", f"tokenizer.ggml.{key} is missing")
    tokens = keys.header.metadata.get("tokenizer.ggml.tokens")
    count = tokens.count if tokens is not None and tokens.type is ValueType.ARRAY else 0
    types = keys.header.metadata.get("tokenizer.ggml.token_type")
    if count and types is not None and types.count != count:
        keys.add("model-array-length", f"tokenizer.ggml.token_type has {types.count} entries, not {count}")
    return count


def _attention_dims(keys: Keys) -> tuple[int, int]:
    several = keys.header.items(f"{ARCH}.attention.head_count") or [0]
    heads = keys.header.integer(f"{ARCH}.attention.head_count") or several[0] or 1
    fallback = (keys.header.integer(f"{ARCH}.embedding_length") or 0) // heads
    key, value = keys.u32("attention.key_length", fallback), keys.u32("attention.value_length", fallback)
    if key != value:
        keys.add("model-head-dim", f"key_length is {key}, value_length {value}")
    return key, keys.u32("rope.dimension_count", key)


def _rope(keys: Keys, n_rot: int, head_dim: int, index_dim: int) -> None:
    name = f"{ARCH}.rope.dimension_sections"
    if name not in keys.header.metadata:
        keys.add("model-key-missing", f"{name} is missing")
    else:
        before = len(keys.problems)
        sections = keys.per_block("rope.dimension_sections", 4, None)
        if len(keys.problems) == before and not any(sections):
            keys.add("model-rope-sections", "all four rope.dimension_sections are 0")
    limit = min(head_dim, index_dim)
    if limit and (not 0 < n_rot <= limit or n_rot % 2):
        keys.add("model-rope-dims", f"rope.dimension_count is {n_rot}; even and at most {limit} is needed")


def _recurrent(keys: Keys, blocks: int, nextn: int) -> tuple[bool, ...]:
    before = len(keys.problems)
    trunk = blocks - nextn
    if f"{ARCH}.attention.recurrent_layers" in keys.header.metadata:
        layers = [bool(n) for n in keys.per_block("attention.recurrent_layers", blocks, 0)]
    else:
        interval = keys.u32("full_attention_interval", 4, positive=True)
        layers = [i < trunk and (i + 1) % (interval or 4) != 0 for i in range(blocks)]
    if len(keys.problems) > before:  # nothing is known then: the usual layout keeps later checks quiet
        return tuple(i < trunk and (i + 1) % 4 != 0 for i in range(blocks))
    if trunk and all(layers[:trunk]):
        keys.add("model-no-full-attention", f"none of {trunk} layers has full attention")
    return tuple(layers)


def _experts(keys: Keys, blocks: int) -> tuple[int, int, int]:
    experts = keys.u32("expert_count", 0)
    used = max(keys.per_block("expert_used_count", blocks, 0))
    if not experts and not used:
        keys.add("model-key-missing", f"{ARCH}.expert_count and {ARCH}.expert_used_count are missing")
    elif not 1 <= experts <= 1024 or not 1 <= used <= experts:
        keys.add("model-expert-count", f"{experts} experts, {used} of them used")
    widths = keys.per_block("expert_feed_forward_length", blocks, None)
    return experts, used, widths[0]


def _ssm(keys: Keys) -> tuple[int, int, int, int]:
    conv, state, groups, rank, inner = (
        keys.u32(f"ssm.{key}", positive=True)
        for key in ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")
    )
    if state and groups and rank and inner:
        if inner != state * rank:
            keys.add(
                "model-ssm-sizes", f"ssm.inner_size is {inner}, state_size * time_step_rank is {state * rank}"
            )
        if rank % groups:
            keys.add("model-ssm-sizes", f"ssm.time_step_rank {rank} is no multiple of group_count {groups}")
    return conv, state, groups, rank


def _hyper_connections(keys: Keys) -> int:
    count = keys.u32("hyper_connection.count")
    if f"{ARCH}.hyper_connection.count" in keys.header.metadata and count <= 1:
        keys.add("model-hc-count", f"hyper_connection.count is {count}, must be greater than one")
    return count


def _ratios(keys: Keys, blocks: int) -> list[int]:
    ratios = keys.per_block("attention.compress_ratios", blocks, 0)
    if any(not 0 <= ratio <= 64 for ratio in ratios):
        keys.add("model-compress-ratio", f"compress_ratios holds {max(ratios, key=abs)}")
    return ratios


def _ple(keys: Keys, recurrent: tuple[bool, ...]) -> Ple | None:
    before = len(keys.problems)
    value = keys.header.metadata[f"{ARCH}.ple.layers"]
    if value.type is not ValueType.ARRAY or value.element not in _INT32S or value.data is None:
        keys.add("model-key-type", f"{ARCH}.ple.layers is no array of 32-bit integers")
        return None
    if not value.data:
        return None
    layer = value.data[0]
    if len(value.data) > 1:
        keys.add("model-ple-layer", f"{len(value.data)} PLE layers, only one is supported")
    elif not 0 <= layer < len(recurrent):
        keys.add("model-ple-layer", f"PLE layer {layer} is out of range")
    elif not recurrent[layer]:
        keys.add("model-ple-layer", f"PLE layer {layer} is not a linear attention layer")
    ngram, per_ngram = keys.u32("ple.ngram_size"), keys.u32("ple.heads_per_ngram")
    conv = keys.u32("ple.conv_kernel", positive=True)
    dim = keys.u32("embedding_length_per_layer_input", positive=True)
    keys.u32("ple.eos_token_id")
    if conv == 1:
        keys.add("model-ple-conv", "ple.conv_kernel is 1")
    heads = (ngram - 1) * per_ngram
    if len(keys.problems) == before and not (2 <= ngram <= 8 and 1 <= heads <= 64):
        keys.add("model-ple-range", f"n-gram size {ngram} with {per_ngram} heads each is out of range")
    if len(keys.problems) > before:
        return None
    keys.array("ple.layer_multipliers", ValueType.U64, ngram)
    offsets = keys.array("ple.head_offsets", ValueType.U64, heads)
    sizes = keys.array("ple.head_vocab_sizes", ValueType.U64, heads)
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=False)]
    if any(end > _INT32_MAX for end in ends) or 0 in sizes:
        keys.add("model-ple-head-range", "a PLE head is empty or ends above 2^31 - 1")
    return Ple(layer, ngram, heads, conv, dim, max(ends, default=0))
