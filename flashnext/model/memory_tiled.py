"""The workspace of the graph that the feature tiled-qsa builds, in terms found as in ``memory_workspace``.

In tiles of T tokens what pairs cells with tokens is small, and the micro-batch's own rows count. With n cells
of context and t tokens of micro-batch:

- 10 bytes per cell and tile token: two rows in f32, and the block scores that lie in front of them.
- 17 bytes per cell: five tables of one value a cell or a block.
- The pooled keys of all blocks, when more than one tile needs them.
- Per token: what experts hand back, the wide residual and its norm, one narrow row.
- Queries, gate, keys and values lie where experts hand back; what is left of that hole takes the pooled keys,
  then a row or the block scores, if they fit as a whole.

Measured by the allocator's dry run for the demo's shape and the real one (12, 24, 48 layers) on two virtual
GPUs, tiles of 128, context 8,192 to 261,888, micro-batch 512 and 2,048: 0.5% below to 2.3% above. The tiny
shape and micro-batches below 512 are up to 20% above and 11% below. Not compared on CUDA devices.
"""

from __future__ import annotations

from flashnext.model.hyper import Hyper

TILE = 128  # FN_TILED_QSA_TILE, as it is when nobody sets it; `flashnext serve` does not
CELL_TABLES = 17  # per cell: block, key; per block of cells the cells, four positions and the start
_F32 = 4
_SMALL = 44  # token, position and cache rows of one token


def device_bytes(
    hyper: Hyper,
    cells: int,
    tokens: int,
    *,
    tile: int,
    sparse_layers: int,
    first: bool,
    copied_bytes: int = 0,
) -> int:
    """The compute buffer of one device. ``copied_bytes``: the largest host weight that it copies."""
    tiles = -(-tokens // tile)
    even = -(-tokens // tiles)
    attention = _attention(hyper, cells if sparse_layers else 0, tokens, tiles=tiles, even=even, first=first)
    used = hyper.experts_used
    rows = max(used + 15, 23) + (hyper.hc if sparse_layers > 1 else 0) if first else used + 13
    low_rank = 0 if first else _F32 * hyper.low_rank
    tables = CELL_TABLES * cells if sparse_layers > 1 else 0
    feed_forward = tokens * (_F32 * hyper.embd * rows + low_rank + _SMALL) + tables + copied_bytes
    return max(attention, feed_forward)


def _attention(hyper: Hyper, cells: int, tokens: int, *, tiles: int, even: int, first: bool) -> int:
    row = _F32 * hyper.embd
    inner = _F32 * max(hyper.heads) * hyper.head_dim
    beside = 2 * _F32 * max(hyper.kv_heads) * hyper.head_dim + _F32 * hyper.index_heads * hyper.index_dim
    returned = row * hyper.experts_used
    # behind the first device the received residual keeps queries and gate from taking all of the hole
    hole = max(returned, 3 * inner) if first else max(returned, 4 * inner + row + beside)
    token = hole + 2 * _F32 * hyper.wide + row + _F32 * hyper.experts_used + _SMALL
    free = tokens * max(0, returned - 2 * inner - beside)
    pooled = _F32 * hyper.index_dim * cells // _ratio(hyper) if tiles > 1 else 0
    pairs = 8 * cells * even
    if pooled <= free:
        free -= pooled
    else:
        pairs += pooled
    if 4 * cells * even <= free:
        pairs -= 4 * cells * even  # one of the rows
    elif 2 * cells * even > free:
        pairs += 2 * cells * even  # the block scores
    elif not first:
        token -= row
    return tokens * token + CELL_TABLES * cells + pairs


def _ratio(hyper: Hyper) -> int:
    return max(max(hyper.ratios[: hyper.layers], default=0), 1)
