"""One MTP step of qwen4exp in numpy float64, written from the format's reference, not from the C++ graph.

Shapes: T tokens, E embedding width, S residual streams, W = S*E. Weights are [out, in].
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGUFReader
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Dump(NamedTuple):
    """What `test-fn-mtp step` wrote: the inputs it fed and the outputs it got."""

    tokens: NDArray[np.int32]  # [T]
    hidden: Array  # [T, W], as fed: row p is the target's residual at p-1
    residual: Array  # [T, W]
    logits: Array  # [T, V]


def read_dump(path: Path) -> Dump:
    raw = path.read_bytes()
    n, width, vocab = (int(x) for x in np.frombuffer(raw, np.int32, 3))
    tokens = np.frombuffer(raw, np.int32, n, 12)
    floats = np.frombuffer(raw, np.float32, offset=12 + 4 * n).astype(np.float64)
    hidden, residual, logits = np.split(floats, [n * width, 2 * n * width])
    return Dump(tokens, hidden.reshape(n, width), residual.reshape(n, width), logits.reshape(n, vocab))


class Head:
    """The F32 tensors and hyperparameters of a standalone head file."""

    def __init__(self, path: Path) -> None:
        self._file = GGUFReader(path)
        self.block = int(self.key("block_count")) - 1
        self.width = int(self.key("embedding_length"))
        self.streams = int(self.key("hyper_connection.count"))
        self.heads = int(self.key("attention.head_count"))
        self.kv_heads = int(self.key("attention.head_count_kv"))
        self.head_dim = int(self.key("attention.key_length"))
        self.n_rot = int(self.key("rope.dimension_count"))
        self.rope_base = float(self.key("rope.freq_base"))
        self.eps = float(self.key("attention.layer_norm_rms_epsilon"))
        self.used = int(self.key("expert_used_count"))
        self.ratio = int(self.key("attention.compress_ratios", -1))
        self.index_heads = int(self.key("attention.indexer.head_count"))
        self.index_dim = int(self.key("attention.indexer.key_length"))
        self.top_k = int(self.key("attention.indexer.top_k"))

    def key(self, name: str, index: int = 0) -> Any:
        field = self._file.fields[f"qwen4exp.{name}"]
        return field.parts[field.data[index]][0]

    def __getitem__(self, name: str) -> Array:
        """A tensor of the block by its short name, or one of the two vocabulary tensors."""
        full = name if name in ("token_embd", "output") else f"blk.{self.block}.{name}"
        tensor = next(t for t in self._file.tensors if t.name == f"{full}.weight")
        if tensor.data.dtype != np.float32:
            raise TypeError(f"{full} is not F32: quantised weights would hide errors")
        return np.asarray(tensor.data, np.float64)


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def rms(x: Array, eps: float) -> Array:
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps))


def rope(x: Array, positions: Array, n_rot: int, base: float) -> Array:
    """Rotate the first n_rot of the last axis, in pairs (i, i + n_rot/2). x: [T, heads, dim].

    On text all position sections are equal, so the interleaved multi-section rope is the plain one.
    """
    half = n_rot // 2
    angle = positions[:, None, None] * base ** (-2.0 * np.arange(half) / n_rot)
    a, b = x[..., :half], x[..., half:n_rot]
    out = x.copy()
    out[..., :half] = a * np.cos(angle) - b * np.sin(angle)
    out[..., half:n_rot] = a * np.sin(angle) + b * np.cos(angle)
    return out


def mix(head: Head, x: Array, prefix: str) -> tuple[Array, Array]:
    """Streams [T, S, E] to one vector [T, E]; also the normed streams [T, W], for the scatter weights."""
    tokens = x.shape[0]
    normed = rms(x, head.eps) * head[f"{prefix}_norm"].reshape(head.streams, head.width)
    flat = normed.reshape(tokens, -1)
    gate = silu(flat @ head[f"{prefix}_down"].T / head.streams) @ head[f"{prefix}_up"].T
    gated = normed * sigmoid(gate).reshape(normed.shape)
    return gated.mean(axis=1), flat


def combine(head: Head, x: Array, flat: Array, out: Array, prefix: str) -> Array:
    weights = 2.0 * sigmoid(flat @ head[f"{prefix}_inject"].T / head.streams)
    return np.asarray(x + out[:, None, :] * weights[:, :, None])


def selection(head: Head, cur: Array) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which tokens each token may attend to, [T, T], and for which rows that is well defined, [T].

    The selection is top_k + ratio - 1 cells: the incomplete tail, then the best blocks. When the tail is
    shorter than ratio - 1 the last block is cut, and which of its cells stay is a tie; so it is when the last
    score is 0.
    """
    tokens, r = cur.shape[0], head.ratio
    causal = np.tril(np.ones((tokens, tokens), bool))
    if r == 0:
        return causal, np.ones(tokens, bool)

    blocks = tokens // r
    starts = np.arange(blocks, dtype=np.float64) * r
    keys = (cur @ head["indexer.k_proj"].T)[: blocks * r].reshape(blocks, r, -1).mean(axis=1)
    keys = rms(keys, head.eps) * head["indexer.k_norm"]
    keys = rope(keys[:, None, :], starts, head.n_rot, head.rope_base)[:, 0]
    queries = (cur @ head["indexer.q_proj"].T).reshape(tokens, head.index_heads, head.index_dim)
    queries = rms(queries, head.eps) * head["indexer.q_norm"]
    queries = rope(queries, np.arange(tokens, dtype=np.float64), head.n_rot, head.rope_base)
    scores = np.maximum(np.einsum("thd,bd->thb", queries, keys), 0.0).sum(axis=1)

    keep = np.zeros_like(causal)
    certain = np.ones(tokens, bool)
    for q in range(tokens):
        full, tail = divmod(q + 1, r)
        budget = head.top_k + r - 1 - tail
        keep[q, full * r : q + 1] = True
        if full * r <= budget:
            keep[q, : full * r] = True
            continue
        order = np.argsort(-scores[q, :full], kind="stable")[: budget // r]
        certain[q] = budget % r == 0 and scores[q, order[-1]] > 0.0
        for block in order:
            keep[q, block * r : (block + 1) * r] = True
    return keep & causal, certain


def attention(head: Head, cur: Array, keep: NDArray[np.bool_]) -> Array:
    tokens, dim = cur.shape[0], head.head_dim
    positions = np.arange(tokens, dtype=np.float64)
    qg = (cur @ head["attn_q"].T).reshape(tokens, head.heads, 2, dim)
    q = rope(rms(qg[:, :, 0], head.eps) * head["attn_q_norm"], positions, head.n_rot, head.rope_base)
    k = (cur @ head["attn_k"].T).reshape(tokens, head.kv_heads, dim)
    k = rope(rms(k, head.eps) * head["attn_k_norm"], positions, head.n_rot, head.rope_base)
    v = (cur @ head["attn_v"].T).reshape(tokens, head.kv_heads, dim)
    out = np.empty((tokens, head.heads, dim))
    for h in range(head.heads):
        kv = h * head.kv_heads // head.heads
        logits = np.where(keep, q[:, h] @ k[:, kv].T / np.sqrt(dim), -np.inf)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        out[:, h] = (weights / weights.sum(axis=1, keepdims=True)) @ v[:, kv]
    return np.asarray((out * sigmoid(qg[:, :, 1])).reshape(tokens, -1) @ head["attn_output"].T)


def experts(head: Head, cur: Array) -> Array:
    router = cur @ head["ffn_gate_inp"].T
    probs = np.exp(router - router.max(axis=1, keepdims=True))
    probs /= probs.sum(axis=1, keepdims=True)
    gate, up, down = head["ffn_gate_exps"], head["ffn_up_exps"], head["ffn_down_exps"]
    out = np.empty_like(cur)
    for t, x in enumerate(cur):
        chosen = np.argsort(-probs[t], kind="stable")[: head.used]
        weights = probs[t, chosen] / probs[t, chosen].sum()
        parts = (down[e] @ (silu(gate[e] @ x) * (up[e] @ x)) for e in chosen)
        out[t] = sum(weight * part for weight, part in zip(weights, parts, strict=True))
    shared = silu(cur @ head["ffn_gate_shexp"].T) * (cur @ head["ffn_up_shexp"].T)
    shared = shared @ head["ffn_down_shexp"].T
    return np.asarray(out + shared * sigmoid(cur @ head["ffn_gate_inp_shexp"].reshape(-1))[:, None])


def step(
    head: Head, tokens: NDArray[np.int32], hidden: Array, whole_row: bool
) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Residual [T, W], logits [T, V], and the rows [T] for which sparse selection leaves no tie open."""
    n = tokens.shape[0]
    streams = (n, head.streams, head.width)
    embedded = rms(head["token_embd"][tokens], head.eps) * head["nextn.enorm"]
    normed = rms(hidden, head.eps).reshape(streams) if whole_row else rms(hidden.reshape(streams), head.eps)
    normed = normed * head["nextn.hnorm"].reshape(head.streams, head.width)
    both = np.concatenate([np.broadcast_to(embedded[:, None, :], streams), normed], axis=2)
    x = both @ head["nextn.eh_proj"].T

    cur, flat = mix(head, x, "hc_attn")
    keep, certain = selection(head, cur)
    x = combine(head, x, flat, attention(head, cur, keep), "hc_attn")
    cur, flat = mix(head, x, "hc_ffn")
    x = combine(head, x, flat, experts(head, cur), "hc_ffn")
    out, _ = mix(head, x, "nextn.hc_head")
    return x.reshape(n, -1), out @ head["output"].T, certain
