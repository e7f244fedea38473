"""A synthetic routing trace with the locality that was published for the real model.

Random weights route nearly at random, so a synthetic model by itself says nothing about a cache. The trace
draws, for each lane, a depth in the layer's stack of recently used experts: 67 % within the last 64
distinct experts and 81 % within the last 128. An LRU of N slots without limits then hits where the depth is
below N.

    python tests/gpu/expert_cache_trace.py --layers 12 --experts 512 --used 10 --rows 1024 --out trace.bin

"""

from __future__ import annotations

import argparse
import random
import struct
from pathlib import Path

# share of draws with a depth below the bound; the last bound is the number of experts
LOCALITY = ((64, 0.67), (128, 0.81))


def draw_depth(rng: random.Random, experts: int) -> int:
    """A depth in 0..experts-1. Within a band shallow depths are likelier, as in every measured stack."""
    u = rng.random()
    low, below = 0, 0.0
    for high, share in (*LOCALITY, (experts, 1.0)):
        if u < share:
            x = (u - below) / (share - below)
            return min(experts - 1, low + int((high - low) * x**1.5))
        low, below = high, share
    return experts - 1


def layer_trace(rng: random.Random, experts: int, used: int, rows: int) -> list[list[int]]:
    stack = list(range(experts))  # most recently used first
    rng.shuffle(stack)
    trace = []
    for _ in range(rows):
        row: list[int] = []
        while len(row) < used:
            expert = stack[draw_depth(rng, experts)]
            if expert not in row:
                row.append(expert)
        for expert in row:
            stack.remove(expert)
            stack.insert(0, expert)
        trace.append(row)
    return trace


def lru_hit_rate(trace: list[list[int]], slots: int, skip: int) -> float:
    """Hits of an LRU that admits every miss, counted after the first rows."""
    stack: list[int] = []
    hits = lanes = 0
    for i, row in enumerate(trace):
        for expert in row:
            if i >= skip:
                lanes += 1
                hits += expert in stack[:slots]
        for expert in row:
            if expert in stack:
                stack.remove(expert)
            stack.insert(0, expert)
    return hits / lanes


def write(path: Path, layers: list[list[list[int]]]) -> None:
    """The format of FN_EXPERT_CACHE_ROUTING: [row][layer][lane], little-endian int32."""
    rows, used = len(layers[0]), len(layers[0][0])
    flat = [expert for r in range(rows) for layer in layers for expert in layer[r]]
    head = struct.pack("<4s4i", b"FNRT", 1, len(layers), used, rows)
    path.write_bytes(head + struct.pack(f"<{len(flat)}i", *flat))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--experts", type=int, default=512)
    parser.add_argument("--used", type=int, default=10)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    layers = [
        layer_trace(random.Random(args.seed * 1000 + il), args.experts, args.used, args.rows)
        for il in range(args.layers)
    ]
    for slots in (48, 64, 128, 150, 256):
        print(f"LRU-{slots}: {lru_hit_rate(layers[0], slots, args.rows // 4):.3f}")
    write(args.out, layers)


if __name__ == "__main__":
    main()
