"""How long a command takes, on a machine that may be busy with something else."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence


def best_time(argv: Sequence[str], limit_s: float, *, runs: int = 10) -> tuple[float, str]:
    """The best of up to ``runs`` runs in seconds, and the last stdout; stops at the first below the limit.

    Wall time; where other processes hold the cores (load above their number), a run's own CPU time instead.
    """
    best, out = float("inf"), ""
    for _ in range(runs):
        begin, before = time.monotonic(), os.times()
        out = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
        wall, after = time.monotonic() - begin, os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        busy = os.getloadavg()[0] > len(os.sched_getaffinity(0))
        best = min(best, cpu if busy else wall)
        if best < limit_s:
            break
    return best, out
