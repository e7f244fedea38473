"""Every expert type, devices, slots and batch size against the stock graph, to the byte: the full cross.

Not collected by pytest, which runs a pairwise part of it. One line per case on stdout:

    FLASHNEXT_TEST_BIN=BIN python tests/native/expert_cache_full_cross.py > full-cross.jsonl
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from expert_cache_runs import model, run, virtual_gpus

TYPES = ("mix", "q4_k", "q5_k", "q5_1", "q8_0", "f16", "bf16")
KINDS = {"tiny": (1, 16, 32), "demo": (1, 16, 150, 512)}
DEVICES = (1, 2, 3)
SCHEDULE = ",".join(f"{n}x1" for n in range(1, 33))


def main() -> int:
    bin_dir = Path(os.environ["FLASHNEXT_TEST_BIN"])
    failed = 0
    for kind, slots in KINDS.items():
        for expert_type in TYPES:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                gguf = model(kind, folder, None if expert_type == "mix" else expert_type)
                for devices in DEVICES:
                    with virtual_gpus(bin_dir, folder, devices) as endpoints:
                        arms = ["slots=0", *(f"slots={n},merge=1" for n in slots)]
                        off, *on = run(bin_dir, gguf, endpoints, folder, SCHEDULE, arms, "--repeat", "60")
                    assert off.logits is not None
                    for n, arm in zip(slots, on, strict=True):
                        assert arm.logits is not None
                        c = arm.counters
                        equal = arm.logits.tobytes() == off.logits.tobytes() and c["misses"] == c["cpu_rows"]
                        failed += not equal
                        case = {"model": kind, "type": expert_type, "devices": devices, "slots": n}
                        counts = {key: c[key] for key in ("hits", "misses", "uploads", "cpu_rows")}
                        print(json.dumps({**case, **counts, "batches": "1..32", "equal": equal}), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
