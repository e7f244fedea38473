"""The speed of the link: pinned host memory to each device, one by one and all at once.

``python -m flashnext.bench.link`` prints one JSON object. It is a process of its own, before the arms, so
that its context and its memory are gone when they start.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

from flashnext.bench.cuda import LIBRARY, CudaError, Driver
from flashnext.proc import environment, own_module, run

BLOCK_BYTES = 256 * 2**20
ROUNDS = 9


def measure(driver: Driver, *, block_bytes: int = BLOCK_BYTES, rounds: int = ROUNDS) -> dict[str, Any]:
    """Median speed of each device alone and of all together, in bytes per second. Raises CudaError."""
    lanes = []
    for device in range(driver.count):
        source = driver.pinned(device, block_bytes)
        lanes.append((device, driver.allocate(device, block_bytes), source, driver.stream(device)))
    alone = [_speed(driver, [lane], block_bytes, rounds) for lane in lanes]
    together = _speed(driver, lanes, block_bytes, rounds) if len(lanes) > 1 else alone[0]
    return {
        "block_bytes": block_bytes,
        "devices": [{"name": n, "alone_bytes_per_s": s} for n, s in zip(driver.names, alone, strict=True)],
        "together_bytes_per_s": together,
    }


def _speed(driver: Driver, lanes: Sequence[tuple[int, int, int, Any]], block: int, rounds: int) -> float:
    """Median over rounds; the first round, which wakes the link up, is thrown away."""
    speeds = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        for device, target, source, stream in lanes:
            driver.upload(device, target, source, block, stream)
        for device, _, _, stream in lanes:
            driver.wait(device, stream)
        speeds.append(len(lanes) * block / (time.perf_counter() - began))
    return statistics.median(speeds[1:])


def probe(*, library: str = LIBRARY, timeout_s: float = 120.0) -> dict[str, Any]:
    """Measure in a process of its own; ``{"failure": reason}`` where there is nothing to measure."""
    done = run(
        own_module("flashnext.bench.link", "--library", library),
        env=environment(also=("PYTHONPATH", "VIRTUAL_ENV")),
        timeout_s=timeout_s,
    )
    try:
        found = json.loads(done.out)
    except ValueError:
        lines = (done.err or done.out).strip().splitlines()
        return {"failure": lines[-1] if lines else f"ended with code {done.code}"}
    return dict(found)


def main() -> int:
    parser = argparse.ArgumentParser(prog="flashnext.bench.link", description=__doc__)
    parser.add_argument("--library", default=LIBRARY)
    options = parser.parse_args()
    try:
        driver = Driver(options.library)
        result = measure(driver) if driver.count else {"failure": "the driver lists no device"}
    except CudaError as error:
        result = {"failure": str(error)}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
