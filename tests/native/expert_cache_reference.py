"""The cache's rules once more, in plain Python, and the files of its test switches."""

from __future__ import annotations

import json
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = Sequence[int]


def write_trace(path: Path, rows: Sequence[Sequence[Row]]) -> Path:
    """Routing for FN_EXPERT_CACHE_ROUTING: rows[token][layer] = the experts of one token in one layer."""
    layers, used = len(rows[0]), len(rows[0][0])
    flat = [expert for token in rows for layer in token for expert in layer]
    head = struct.pack("<4s4i", b"FNRT", 1, layers, used, len(rows))
    path.write_bytes(head + struct.pack(f"<{len(flat)}i", *flat))
    return path


def read_dump(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    first, *rest = path.read_text().splitlines()
    return json.loads(first), [json.loads(line) for line in rest]


@dataclass
class LayerLru:
    """One layer: experts in slots from least to most recently used."""

    slots: int
    inserts: int
    resident: OrderedDict[int, int] = field(default_factory=OrderedDict)  # expert -> slot

    def step(self, ids: Sequence[int]) -> tuple[list[int], list[list[int]]]:
        """Lanes of a step in order -> slot of each (-1: miss), and uploads: [expert, slot, evicted]."""
        lanes: list[int] = []
        wanted: list[int] = []
        hit: set[int] = set()
        for expert in ids:
            lanes.append(self.resident.get(expert, -1))
            if expert in self.resident:
                self.resident.move_to_end(expert)
                hit.add(expert)
            elif expert not in wanted and len(wanted) < self.inserts:
                wanted.append(expert)
        uploads: list[list[int]] = []
        added: dict[int, int] = {}
        for expert in wanted:
            free = set(range(self.slots)) - set(self.resident.values()) - set(added.values())
            if free:
                slot, evicted = min(free), -1
            else:
                victim = next((e for e in self.resident if e not in hit), None)
                if victim is None:
                    break
                slot, evicted = self.resident.pop(victim), victim
            added[expert] = slot
            uploads.append([expert, slot, evicted])
        # readable from the next step on; nothing looks at them before it
        self.resident.update(added)
        return lanes, uploads
