"""Holds device memory for the length of a run, so that a large card stands for a small one.

``python -m flashnext.bench.hold --limit BYTES`` leaves exactly that many bytes free on every device, by plain
allocations; prints one JSON line with what it holds; then waits for the signal that ends it.
The driver gives the memory back when the process ends, however it ends, and the process dies with its parent.
"""

from __future__ import annotations

import argparse
import json
import re
import select
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flashnext.bench.cuda import LIBRARY, CudaError, Driver
from flashnext.errors import UsageError, VramHoldFailedError
from flashnext.proc import environment, own_module, start, stop

_UNITS = {"": 1, "MIB": 2**20, "GIB": 2**30, "MB": 10**6, "GB": 10**9}
_CHUNK_BYTES = 2**30
_ANSWER_S = 120.0
_SMALL_BYTES = 2 * 2**20  # device memory is given out in pages of this size


def parse_size(text: str) -> int:
    """``24GiB``, ``23.5 GiB``, ``24GB`` or plain bytes as bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise UsageError(f"{text!r} is not a size", hint="write it like 24GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def hold(driver: Driver, limit_bytes: int) -> list[dict[str, Any]]:
    """Take memory on every device until ``limit_bytes`` are free. Raises CudaError."""
    held = []
    for device in range(driver.count):
        free, total = driver.memory(device)
        if free < limit_bytes:
            raise CudaError(f"device {device} has {free} bytes free, fewer than the limit of {limit_bytes}")
        taken = _take(driver, device, limit_bytes)
        left, _ = driver.memory(device)
        held.append(
            {
                "device": device,
                "name": driver.names[device],
                "total_bytes": total,
                "held_bytes": taken,
                "left_bytes": left,
            }
        )
    return held


def _take(driver: Driver, device: int, limit_bytes: int) -> int:
    """Allocate in blocks, then in small ones, until what is free is within one small block of the limit."""
    taken = 0
    for block in (_CHUNK_BYTES, 64 * 2**20, _SMALL_BYTES):
        while driver.memory(device)[0] - limit_bytes >= block:
            driver.allocate(device, block)
            taken += block
    return taken


@contextmanager
def vram_limit(limit_bytes: int | None, *, library: str = LIBRARY) -> Iterator[list[dict[str, Any]]]:
    """Hold the rest of every device while the block runs; yields what is held. None holds nothing.

    Raises VramHoldFailedError where a device has less than the limit free, or there is no driver.
    """
    if limit_bytes is None:
        yield []
        return
    words = own_module("flashnext.bench.hold", "--limit", str(limit_bytes), "--library", library)
    child = start(words, env=environment(also=("PYTHONPATH", "VIRTUAL_ENV")), stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        # a driver that hangs must not hang the run: the line comes whole, or the wait is over
        ready = select.select([child.stdout], [], [], _ANSWER_S)[0]
        line = child.stdout.readline() if ready else f"no answer within {_ANSWER_S:g} s"
        answer = _parse(line)
        if "held" not in answer:
            rest = child.stdout.read() if child.poll() is not None else ""
            lines = (line + rest).strip().splitlines()
            raise VramHoldFailedError(
                "the rest of the devices' memory cannot be held",
                context=[str(answer["error"])] if "error" in answer else lines[-4:],
            )
        yield list(answer["held"])
    finally:
        stop(child)


def _parse(line: str) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def main() -> int:
    parser = argparse.ArgumentParser(prog="flashnext.bench.hold", description=__doc__)
    parser.add_argument("--limit", type=int, required=True, help="bytes to leave free on every device")
    parser.add_argument("--library", default=LIBRARY)
    options = parser.parse_args()
    try:
        held = hold(Driver(options.library), options.limit)
    except CudaError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    print(json.dumps({"held": held}), flush=True)
    wait_for_ever()
    return 0


def wait_for_ever() -> None:
    """Until a signal ends the process: its parent's end, or its parent's TERM."""
    import signal

    while True:
        signal.pause()


if __name__ == "__main__":
    raise SystemExit(main())
