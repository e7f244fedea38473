"""The numbers in a synthetic tensor: random, valid for their type, the same for the same seed and name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

import gguf
import numpy as np
import numpy.typing as npt

from flashnext.model.gguf_format import TYPE_BY_NAME, TensorType
from flashnext.model.synth_shape import Plan
from flashnext.model.synth_tokenizer import Tokenizer

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

# A larger tensor is slices of one random pool at random starts: disk speed, not the generator's.
POOL_BYTES = 32 << 20
# Every embedding has one constant block, so that the output rows can favour printable tokens by it.
_CONST = 32
_CONST_VALUE = 1.0
_EMBED_STD = 0.25
_OUTPUT_GAIN = 3.0
# Rows of the output that are drawn one by one: all tokens that mean something.
_KNOWN = 512
_BIAS_NEVER, _BIAS_END = -0.3, -0.06  # per constant column: other bytes and specials; end of turn

_MARKOV_ZERO = re.compile(r"\.(attn_output|ssm_out|ffn_down_exps|ffn_down_shexp|ple_value)\.weight$")
_GAMMA = re.compile(r"norm(_key|_query|_conv)?\.weight$")


class Weights:
    """Draws the tensors of one model.

    `markov` makes the fixture whose next token depends on the last token alone, in trunk and head: all block
    outputs zero, and a head that repeats the trunk's own step (`eh_proj` = [I | 0], its mixer = the trunk's).
    Each token's output row is the sum of its predecessors' embeddings, so the answer wins by a wide margin
    that no rounding overturns: greedy text follows `successors()`.
    """

    def __init__(self, seed: int, vocabulary: Tokenizer, *, markov: bool = False) -> None:
        self.seed = seed
        self.vocabulary = vocabulary
        self.markov = markov

    def chunks(self, plan: Plan) -> Iterator[Bytes]:
        """The tensor's bytes in order; in all exactly `plan.size_bytes`."""
        source = self._source(plan.name)
        rng = self._rng(source)
        row = plan.type.row_bytes(plan.shape[0])
        first = min(plan.rows, max(1, POOL_BYTES // row))
        if source == "output.weight":
            known = min(plan.rows, _KNOWN)
            yield encode(self._output_rows(rng, 0, known, plan.shape[0]), plan.type)
            rest = plan.rows - known
            if rest:
                pool = encode(self._output_rows(rng, known, min(rest, 4096), plan.shape[0]), plan.type)
                yield from _repeat(rng, pool.reshape(-1, row), rest, len(pool) // row)
            return
        if source == "token_embd.weight":
            first = min(first, 4096)
        if source.endswith(".nextn.eh_proj.weight"):
            first = plan.rows  # an identity has no rows to repeat
        pool = self._pool(rng, plan, source, first).reshape(first, row)
        yield pool
        slab = plan.shape[1] if len(plan.shape) == 3 else max(1, first // 2)
        yield from _repeat(rng, pool, plan.rows - first, min(slab, first))

    def _source(self, name: str) -> str:
        """The name that a tensor's numbers come from: its own, or the trunk's for the markov head's mixer."""
        if self.markov and ".nextn.hc_head_" in name:
            return "output_hc_" + name.rsplit("hc_head_", 1)[1]
        return name

    def successors(self) -> dict[int, int]:
        """The markov fixture's next token of each token: one cycle through all printable ones."""
        cycle = sorted(self.vocabulary.printable)
        self._rng("successors").shuffle(cycle)
        following = dict(zip(cycle, cycle[1:] + cycle[:1], strict=True))
        for token in range(min(len(self.vocabulary.tokens), _KNOWN)):
            following.setdefault(token, cycle[token % len(cycle)])
        return following

    def _rng(self, name: str) -> np.random.Generator:
        digest = hashlib.sha256(name.encode()).digest()
        return np.random.Generator(np.random.PCG64([self.seed, int.from_bytes(digest[:8], "little")]))

    def _embeddings(self, rows: int, width: int) -> Floats:
        """The first rows of the embedding; a longer draw begins with the same ones."""
        rng = self._rng("token_embd.weight")
        values = rng.standard_normal((rows, width), dtype=np.float32) * np.float32(_EMBED_STD)
        values[:, :_CONST] = _CONST_VALUE
        return values

    def _pool(self, rng: np.random.Generator, plan: Plan, source: str, rows: int) -> Bytes:
        width = plan.shape[0]
        if self.markov and _MARKOV_ZERO.search(source):
            return np.zeros(rows * plan.type.row_bytes(width), dtype=np.uint8)
        if self.markov and source.endswith("nextn.eh_proj.weight"):
            return encode(np.eye(rows, width, dtype=np.float32), plan.type)
        if self.markov and source.endswith("nextn.enorm.weight"):
            return encode(np.ones((rows, width), dtype=np.float32), plan.type)
        if source == "token_embd.weight":
            return encode(self._embeddings(rows, width), plan.type)
        if _GAMMA.search(source):
            return encode(1 + 0.1 * rng.standard_normal((rows, width), dtype=np.float32), plan.type)
        if source.endswith("ssm_a"):  # -exp(A_log): negative, of order one
            return encode(-np.exp(rng.uniform(-1, 1.5, (rows, width)).astype(np.float32)), plan.type)
        if source != plan.name:  # the trunk's numbers as the trunk rounds them, in the head's own type
            drawn = random_blocks(rng, TYPE_BY_NAME["Q8_0"], rows * width, 1 / width**0.5)
            values = gguf.quants.dequantize(drawn.reshape(rows, -1), gguf.GGMLQuantizationType.Q8_0)
            return encode(values, plan.type)
        return random_blocks(rng, plan.type, rows * width, 1 / width**0.5)

    def _output_rows(self, rng: np.random.Generator, start: int, count: int, width: int) -> Floats:
        std = np.float32(_OUTPUT_GAIN / width**0.5)
        values = rng.standard_normal((count, width), dtype=np.float32) * std
        if self.markov:
            values[:] = 0
            if start == 0:
                embeddings = self._embeddings(_KNOWN, width)
                for token, following in self.successors().items():
                    values[following] += embeddings[token]
        for row in range(count):
            token = start + row
            if token == self.vocabulary.end_of_turn:
                values[row, :_CONST] = _BIAS_END
            else:
                values[row, :_CONST] = 0 if token in self.vocabulary.printable else _BIAS_NEVER
        return values


def _repeat(rng: np.random.Generator, pool: Bytes, rows: int, slab: int) -> Iterator[Bytes]:
    """`rows` more rows as slices of the pool, each from its own random start: no two slabs are equal."""
    while rows > 0:
        take = min(slab, rows)
        start = int(rng.integers(0, len(pool) - take + 1))
        yield pool[start : start + take]
        rows -= take


def encode(values: Floats, kind: TensorType) -> Bytes:
    """Round given numbers to a type. The `gguf` package has no quantiser for the K types: those raise."""
    rows = np.ascontiguousarray(values, dtype=np.float32)
    if kind.name == "F32":
        return rows.view(np.uint8).reshape(-1)
    if kind.name in ("Q4_K", "Q6_K"):
        return _encode_k(rows, kind)
    quantised = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[kind.name])
    return np.ascontiguousarray(quantised).view(np.uint8).reshape(-1)


def random_blocks(rng: np.random.Generator, kind: TensorType, elements: int, std: float) -> Bytes:
    """Random codes under fixed, valid scales: zero mean and about the given standard deviation."""
    if kind.name == "F32":
        return (rng.standard_normal(elements, dtype=np.float32) * np.float32(std)).view(np.uint8)
    if kind.name in ("F16", "BF16"):
        return encode(rng.standard_normal((1, elements), dtype=np.float32) * np.float32(std), kind)
    count = elements // kind.block
    blocks = np.frombuffer(rng.bytes(count * kind.block_bytes), dtype=np.uint8)
    blocks = blocks.reshape(count, kind.block_bytes).copy()
    for start, stop, value in _fixed_fields(kind.name, std):
        blocks[:, start:stop] = value
    if kind.name == "Q8_0":  # -128 is no code of the quantiser
        codes = blocks[:, 2:]
        codes[codes == 0x80] = 0
    return blocks.reshape(-1)


def _half(value: float) -> Bytes:
    return np.array([value], dtype="<f2").view(np.uint8)


def _pack_scales(scale: int, minimum: int) -> Bytes:
    """The 12 bytes of eight equal 6-bit (scale, minimum) pairs of Q4_K and Q5_K."""
    low = [(scale & 63) | (scale >> 4 << 6)] * 4 + [(minimum & 63) | (minimum >> 4 << 6)] * 4
    return np.array([*low, *[(scale & 15) | (minimum & 15) << 4] * 4], dtype=np.uint8)


_Fields = list[tuple[int, int, Bytes]]


def _fixed_fields(name: str, std: float) -> _Fields:
    """(start, stop, bytes) of a block's scale fields. Codes are uniform, so their deviation is known."""
    if name == "Q8_0":
        return [(0, 2, _half(std / 73.6))]
    if name == "Q4_0":
        return [(0, 2, _half(std / 4.61))]
    if name == "Q5_0":
        return [(0, 2, _half(std / 9.23))]
    if name == "Q5_1":  # value = d*q + m, q in 0..31
        d = std / 9.23
        return [(0, 2, _half(d)), (2, 4, _half(-15.5 * d))]
    if name == "IQ4_NL":
        return [(0, 2, _half(std / 69.0))]
    if name == "Q4_K":  # value = d*32*q - dmin*30 with dmin = 8 d: centred on q = 7.5
        d = std / (32 * 4.61)
        return [(0, 2, _half(d)), (2, 4, _half(8 * d)), (4, 16, _pack_scales(32, 30))]
    if name == "Q5_K":  # value = d*32*q - dmin*31 with dmin = 16 d: centred on q = 15.5
        d = std / (32 * 9.23)
        return [(0, 2, _half(d)), (2, 4, _half(16 * d)), (4, 16, _pack_scales(32, 31))]
    if name == "Q6_K":
        scales = np.full(16, 16, dtype=np.uint8)
        return [(192, 208, scales), (208, 210, _half(std / (16 * 18.47)))]
    raise ValueError(f"no random blocks for type {name}")


def _encode_k(rows: Floats, kind: TensorType) -> Bytes:
    """A plain rounding to Q4_K or Q6_K with one scale per 256 values: enough for heads of a test model."""
    blocks = rows.reshape(-1, 256)
    top = np.maximum(np.abs(blocks).max(axis=1, keepdims=True), 1e-3)
    if kind.name == "Q6_K":
        d = (top / (31 * 16)).astype("<f2")
        codes = np.clip(np.rint(blocks / (d.astype(np.float32) * 16)) + 32, 0, 63).astype(np.uint8)
        halves = codes.reshape(-1, 2, 4, 32)  # two runs of 128: four groups of 32 share their bytes
        low = np.concatenate(
            [
                (halves[:, :, 0:2] & 15) | (halves[:, :, 2:4] & 15) << 4,
            ],
            axis=2,
        ).reshape(-1, 128)
        high = sum((halves[:, :, i] >> 4) << (2 * i) for i in range(4)).reshape(-1, 64)
        scales = np.full((len(blocks), 16), 16, dtype=np.uint8)
        return np.concatenate([low, high.astype(np.uint8), scales, d.view(np.uint8)], axis=1).reshape(-1)
    d = (top / (7 * 32)).astype("<f2")  # value = d*32*q - 8*d*32: code 8 is an exact zero
    codes = np.clip(np.rint(blocks / (d.astype(np.float32) * 32) + 8), 0, 15).astype(np.uint8)
    pairs = codes.reshape(-1, 4, 2, 32)
    packed = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    scales = np.tile(_pack_scales(32, 32), (len(blocks), 1))
    minimum = (8 * d.astype(np.float32)).astype("<f2")
    return np.concatenate([d.view(np.uint8), minimum.view(np.uint8), scales, packed], axis=1).reshape(-1)
