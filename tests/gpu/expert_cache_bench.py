"""The expert cache on a real GPU: five parts, each within nine minutes, JSON lines into one file.

    python tests/gpu/expert_cache_bench.py --bin BIN --model bench.gguf --part decode  --out cache.jsonl
    python tests/gpu/expert_cache_bench.py --bin BIN --model bench.gguf --part overlap --out cache.jsonl
    python tests/gpu/expert_cache_bench.py --bin BIN --model bench.gguf --part late    --out cache.jsonl
    python tests/gpu/expert_cache_bench.py --bin BIN --model bench.gguf --part load    --out cache.jsonl
    python tests/gpu/expert_cache_bench.py --bin BIN --model bench.gguf --part resident --out cache.jsonl

decode stock host experts against 48, 150 and 256 slots, forwards and backwards (ABBA) on one loaded model,
         one token and four (the shape of a verify batch)
resident all experts in device memory, the upper bound; apart, so that the card may be held down for the rest
overlap hits and misses together against one after the other
late     uploads that arrive late into poisoned slots: the same logits (a build with --tests)
load from the page cache and without it: pinned, pageable, the stock loader, against a plain parallel read;
         and a prompt from pinned and from pageable memory
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TRACE = Path(__file__).with_name("expert_cache_trace.py")
SLOTS = (0, 48, 150, 256)
BLOCK = 16 << 20


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.folder = Path(tempfile.mkdtemp(prefix="fn-expert-cache-"))
        self.trace = self.folder / "trace.bin"

    def make_trace(self) -> None:
        argv = [sys.executable, str(TRACE), "--layers", str(self.args.layers), "--out", str(self.trace)]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        self.record("trace", {"lru_hit_rates": done.stdout.split("\n")[:-1]})

    def record(self, what: str, data: dict[str, Any]) -> None:
        line = json.dumps({"part": self.args.part, "what": what, **data})
        print(line, flush=True)
        with self.args.out.open("a") as file:
            file.write(line + "\n")

    def drive(
        self, what: str, experts: str, schedule: str, arms: list[str], *options: str, **env: str
    ) -> list[dict[str, Any]]:
        argv = [str(self.args.bin / "fn-expert-cache-run"), "-m", str(self.args.model), "--experts", experts]
        argv += ["--threads", str(self.args.threads), "--schedule", schedule, "--ctx", "8192", *options]
        for arm in arms:
            argv += ["--arm", arm]
        done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, **env}, check=False)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        markers = [line for line in done.stderr.splitlines() if line.startswith("fn:")]
        for line in lines:
            self.record(what, {"experts": experts, "schedule": schedule, "options": options, **env, **line})
        self.record(what + "-end", {"returncode": done.returncode, "markers": markers[-12:]})
        if done.returncode != 0:
            self.record(what + "-failed", {"stderr": done.stderr[-2000:]})
        return lines

    def decode(self) -> None:
        self.make_trace()
        route = f"routing={self.trace}"
        for schedule in ("1x320", "4x160"):
            arms = [f"slots={n},warm=96,{route}" for n in (*SLOTS, *reversed(SLOTS))]
            self.drive("decode", self.args.pinned, schedule, arms, "--no-mmap")

    def resident(self) -> None:
        self.make_trace()
        arms = [f"slots=0,warm=96,routing={self.trace}"] * 2
        for schedule in ("1x320", "4x160"):
            self.drive("all-on-device", "device", schedule, arms, "--no-mmap")

    def overlap(self) -> None:
        self.make_trace()
        route = f"routing={self.trace}"
        both = [f"slots=150,warm=96,{route}", f"slots=150,warm=96,serial=1,{route}"]
        for schedule in ("1x320", "4x160"):
            self.drive("overlap", self.args.pinned, schedule, [*both, *reversed(both)], "--no-mmap")

    def late(self) -> None:
        """The same hits and misses, whatever the copies do: to the byte, and without a NaN."""
        self.make_trace()
        route = f"routing={self.trace}"
        files = [self.folder / name for name in ("plain.bin", "late.bin")]
        arms = [f"slots=48,{route},logits={files[0]}", f"slots=48,late=8,{route},logits={files[1]}"]
        self.drive("late", self.args.pinned, "1x64,4x16", arms, "--no-mmap")
        same = all(f.exists() for f in files) and files[0].read_bytes() == files[1].read_bytes()
        self.record("late-result", {"logits_equal": same})

    def load(self) -> None:
        """Cold is direct: no arm has the page cache. Ours, stock, ours again, for each placement."""
        arm = ["slots=0"]
        for direct in (False, True):
            mode = "--dio" if direct else "--no-mmap"
            what = "load-cold" if direct else "load-warm"
            self.plain_read(direct)
            for experts in (self.args.pinned, "CPU"):
                self.drive(what, experts, "1x1", arm, mode)
                self.drive(what, experts, "1x1", arm, mode, LLAMA_MMAP_PIN_HOST="0")
                self.drive(what, experts, "1x1", arm, mode)
            self.plain_read(direct)
        for experts in (self.args.pinned, "CPU", self.args.pinned, "CPU"):
            options = ("--no-mmap", "--prompt", "8192", "--ubatch", "2048", "--ctx", "16384")
            self.drive("prompt", experts, "1x1", arm, *options)

    def plain_read(self, direct: bool) -> None:
        """The yardstick: every byte once, on eight threads, into nothing."""
        fd = os.open(self.args.model, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        size = os.fstat(fd).st_size
        buffers = [mmap.mmap(-1, BLOCK) for _ in range(8)]  # page aligned, as direct reads want it

        def read(worker: int) -> None:
            for offset in range(worker * BLOCK, size, 8 * BLOCK):
                os.preadv(fd, [buffers[worker]], offset)

        start = time.perf_counter()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(read, range(8)))
        seconds = time.perf_counter() - start
        self.record("plain-read", {"direct": direct, "seconds": seconds, "size_bytes": size})
        os.close(fd)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bin", type=Path, required=True, help="folder with fn-expert-cache-run and its libraries"
    )
    parser.add_argument("--model", type=Path, required=True, help="the bench model, one file")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended")
    parser.add_argument("--part", choices=["decode", "resident", "overlap", "late", "load"], required=True)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--pinned", default="CUDA_Host", help="buffer type of page-locked memory")
    bench = Bench(parser.parse_args())
    getattr(bench, bench.args.part)()


if __name__ == "__main__":
    main()
