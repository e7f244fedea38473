"""What llama-server reserves for computing, from hyperparameters: its "compute buffer size" lines.

The pinned graph allocator is not replayed here. Its result follows a few terms, found by loading models of
three shapes (tiny, demo and the real layer) at contexts from 1,024 to 261,888 and micro-batches from 128 to
2,048, and explained by the tensors of the graph. With n cells of context and t tokens of micro-batch:

- Sparse attention is the widest moment: 11 bytes per cell and token on a device with one sparse layer (mask
  in f16, block bias, scores and mask in f32), 13 with more of them, because the mask of the next layer does
  not find a hole unless the expert outputs of a token leave one.
- 12 bytes per cell for the block tables.
- Per token: what experts hand back, the wide residual and its norm, one narrow row, and the template of zeros
  that the graph keeps for every sparse layer.

The stock graph is described, and the one with tiles of tokens (feature tiled-qsa) where lean prefill needs
it: at context 261,888 and micro-batches 512, 2,048, 8,192 and 16,384 that is 18%, 28%, 1% and 0.3% above what
the real layer shape reserved with its experts on the device.

From 65,536 cells on the result was exact to 0.1% on all three shapes, on the first device and on one behind
it (which also holds the residual that it received). With fewer cells it is an upper bound: at most 15% above
on the first device, 18% on one behind it. At micro-batches under 512 it can be 4% low.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashnext.model.hyper import Hyper

_F32 = 4
_CELL_TABLES = 12  # three int32 per cell: its block, the block's cells, the block's four positions
_SMALL_DEVICE = 44  # token, position and cache rows of one token
_SMALL_HOST = 45
_TILE = 128


@dataclass(frozen=True)
class Batch:
    """``cells`` of context (padded to 256) and ``tokens`` of micro-batch."""

    cells: int
    tokens: int


def device_bytes(
    hyper: Hyper, batch: Batch, *, sparse_layers: int, first: bool, copied_bytes: int = 0
) -> int:
    """The compute buffer of one device. ``copied_bytes``: the largest host weight that it copies."""
    return max(
        _attention(hyper, batch, sparse_layers=sparse_layers, first=first),
        _feed_forward(hyper, batch, sparse_layers=sparse_layers, copied_bytes=copied_bytes),
    )


def tiled_device_bytes(hyper: Hyper, batch: Batch, *, first: bool) -> int:
    """The same with sparse attention in tiles of tokens and experts in staging memory."""
    inner = max(hyper.heads) * hyper.head_dim
    hole = max(_F32 * hyper.embd * hyper.experts_used, 3 * _F32 * inner)
    token = hole + 3 * _F32 * hyper.wide + _F32 * hyper.embd + _SMALL_DEVICE
    tables = _CELL_TABLES * batch.cells
    attention = min(batch.tokens, _TILE) * 13 * batch.cells + batch.tokens * token
    experts = batch.tokens * (_F32 * hyper.embd * (hyper.experts_used + 18) + _SMALL_DEVICE)
    return max(attention, experts) + (tables if first else 0)


def _width(hyper: Hyper, batch: Batch) -> int:
    """Cells that a sparse layer attends to: whole blocks and the open tail."""
    ratio = max(hyper.ratios[: hyper.layers], default=0)
    return min(batch.cells, hyper.top_k + max(ratio, 1) - 1)


def _attention(hyper: Hyper, batch: Batch, *, sparse_layers: int, first: bool) -> int:
    width = _width(hyper, batch)
    inner = max(hyper.heads) * hyper.head_dim
    returned = _F32 * hyper.embd * hyper.experts_used
    # queries with their gate, the normed queries, and the selection in two copies live where experts were
    hole = max(returned, 3 * _F32 * inner + 2 * _F32 * width)
    residual = _F32 * hyper.wide * (2 if first else 3)
    zeros = _F32 * width * sparse_layers
    token = hole + residual + _F32 * hyper.embd + zeros + _F32 * hyper.experts_used + _SMALL_DEVICE
    masks = 3 if sparse_layers == 0 else 11 if sparse_layers == 1 or 8 * batch.cells <= hole else 13
    tables = _CELL_TABLES * batch.cells if first else 0
    return batch.tokens * (masks * batch.cells + token) + tables


def _feed_forward(hyper: Hyper, batch: Batch, *, sparse_layers: int, copied_bytes: int) -> int:
    """The other wide moment: expert outputs beside old and new residual; wins where context is short."""
    rows = max(hyper.experts_used + 15, 23)
    token = _F32 * hyper.embd * rows + _F32 * _width(hyper, batch) * sparse_layers + _SMALL_DEVICE
    masks = 3 * batch.cells if copied_bytes else 0
    return batch.tokens * (token + masks) + _CELL_TABLES * batch.cells + copied_bytes


def draft_bytes(hyper: Hyper, batch: Batch) -> tuple[int, int]:
    """(device, host) compute buffers of a draft context: one dense layer, its experts on the device.

    The lines of a draft context to 0.1% at 8,192 to 65,536 cells, demo and real layer: experts are the widest
    moment of the one, attention of the other.
    """
    experts = hyper.embd * (hyper.experts_used + 7)
    attention = 2 * hyper.wide + hyper.embd + 4 * max(hyper.heads) * hyper.head_dim
    token = _F32 * max(experts, attention) + _SMALL_DEVICE
    mask = 2 * batch.cells
    return batch.tokens * (mask + token), batch.tokens * (mask + 5 * _F32 * hyper.embd + _SMALL_HOST)


def host_bytes(hyper: Hyper, batch: Batch) -> int:
    """The compute buffer of the CPU: masks for upload, and the experts' products."""
    used, embd = hyper.experts_used, hyper.embd
    products = embd * used + 3 * hyper.expert_ff * used + (3 * embd if used > 7 else 0)
    ple_heads = hyper.ple.heads if hyper.ple is not None else 0
    token = _F32 * (max(7 * embd, products) + hyper.experts + ple_heads) + _SMALL_HOST
    return batch.tokens * (3 * batch.cells + token) + _CELL_TABLES * batch.cells
