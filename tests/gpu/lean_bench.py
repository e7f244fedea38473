"""Lean prefill on a real GPU: an arm is a fresh process; forwards, then backwards (ABBA), within a budget.

    python tests/gpu/lean_bench.py --bin BIN --model bench.gguf --out lean.jsonl --budget-s 500
    python tests/gpu/lean_bench.py --bin BIN --model bench.gguf --out lean.jsonl --part exact
    python tests/gpu/lean_bench.py --bin BIN --model bench.gguf --out lean.jsonl --part decode
    python tests/gpu/lean_bench.py --bin BIN --model bench.gguf --out lean.jsonl --part timeline
    python tests/gpu/lean_bench.py --bin BIN --model bench.gguf --out lean.jsonl --part times
    python tests/gpu/lean_bench.py --bin BIN --model tiny.gguf --out memcheck.jsonl --part memcheck

    # one device against two: NAME@N is the arm NAME on the first N devices, without @N as --devices says
    python tests/gpu/lean_bench.py --bin BIN --model bench.gguf --out two.jsonl \\
        --arms stock-512@1,stock-512@2,lean-8192@1,lean-8192@2 --rounds 2

    # no GPU: virtual GPUs (fn-vgpu --port PORT), experts in plain host memory
    python tests/gpu/lean_bench.py --bin BIN --model demo.gguf --out dry.jsonl --rpc HOST:PORT,HOST:PORT \\
        --pinned CPU --threads 1 --slots 8 --ctx 4096 --arms lean-2048@1,lean-2048@2 --steps "1x4;1000"

speed    prompts from an empty context and at depth, short follow-ups and decode: the stock graph at 512 and
         8192, tiled alone, tiled with lean prefill, and all experts in device memory (what the kernels alone
         take); before them, the speed of plain page-locked uploads to each device and to all at once
exact    logits of stock and lean at the same micro-batch, also with late uploads into poisoned staging
         memory, and staged experts compared with host memory; --devices N: on the first N
decode   512 tokens, one at a time, behind a prompt of 8,192: tiled alone, lean prefill, and with lent slots
timeline one warm chunk, as JSON lines beside the output file (.timeline.jsonl); plot it with
         `flashnext bench timeline`
times    where a prompt of 8,192 tokens goes by kind of work (FN_PREFILL_TIMES=1), each arm with and without
         the switch, in one process; then logits with and without it
memcheck compute-sanitizer over prompts and decode of the tiny model: no slots, slots, lent slots

`--leave-gib N` holds the rest of every device's memory meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))  # the machine with the GPU has the checkout and no installed package

from flashnext.bench import hold, link  # noqa: E402

GIB = 1 << 30
CHUNK = 8192
PARTS = ("speed", "exact", "decode", "timeline", "times", "memcheck")
ON = ",FN_PREFILL_TIMES=1"
TIMED = ["stock-512", "tiled-8192", "lean-8192", "resident-8192"]

# name -> (where the experts are, the driver's arm)
ARMS = {
    "stock-512": ("host", "ub=512,FN_TILED_QSA=0"),
    "stock-8192": ("host", "ub=8192,FN_TILED_QSA=0"),
    "tiled-2048": ("host", "ub=2048"),
    "tiled-8192": ("host", "ub=8192"),
    "lean-2048": ("host", "lean=2048"),
    "lean-8192": ("host", "lean=8192"),
    "lean-16384": ("host", "lean=16384"),
    "lean-8192-stock-rows": ("host", "lean=8192,FN_GET_ROWS=0"),
    "lean-8192-ring3": ("host", "lean=8192,FN_LEAN_RING=3"),
    "lean-8192-lent": ("host", "lean=8192,FN_LEAN_LEND=1"),
    "lean-auto": ("host", "lean=auto"),
    "resident-2048": ("device", "ub=2048"),
    "resident-8192": ("device", "ub=8192"),
}

# of the part `exact`, each against the stock path at the same micro-batch
EXACT = {
    "lean": "lean=512",
    "late": "lean=512,FN_LEAN_LATE_MS=20,FN_LEAN_VERIFY=1",
    "ring3": "lean=512,FN_LEAN_RING=3,FN_LEAN_VERIFY=1",
}


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.start = time.monotonic()
        self.took: dict[str, float] = {}

    def record(self, what: str, data: dict[str, Any]) -> None:
        line = json.dumps({"part": self.args.part, "what": what, **data})
        print(line, flush=True)
        with self.args.out.open("a") as file:
            file.write(line + "\n")

    def uploads(self) -> None:
        """Plain copies from page-locked memory, to each device alone and to all at once."""
        found = link.probe()
        if "failure" in found:
            self.record("no-driver", {"why": found["failure"]})
            return
        alone = [round(device["alone_bytes_per_s"] / 1e9, 2) for device in found["devices"]]
        together = round(found["together_bytes_per_s"] / 1e9, 2)
        self.record("upload", {"gb_per_s": alone, "together_gb_per_s": together})

    def left_s(self) -> float:
        return float(self.args.budget_s) - (time.monotonic() - self.start)

    def drive(
        self,
        name: str,
        experts: str,
        arms: list[str],
        steps: str,
        *options: str,
        prefix: Sequence[str] = (),
        count: int | None = None,
    ) -> list[dict[str, Any]]:
        """``count``: how many devices; None: all that are seen."""
        where = self.args.pinned if experts == "host" else "device"
        argv = [
            *prefix,
            str(self.args.bin / "fn-lean-run"),
            "-m",
            str(self.args.model),
            "--experts",
            where,
            "--flash",
        ]
        argv += ["--no-mmap", "--threads", str(self.args.threads), "--ctx", str(self.args.ctx)]
        argv += ["--batch", str(self.args.batch), "--steps", steps, *options]
        words, env = self.devices(count)
        argv += words
        for arm in arms:
            argv += ["--arm", arm]
        began = time.monotonic()
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=max(self.left_s(), 5), check=False, env=env
            )
        except subprocess.TimeoutExpired:
            self.record("timeout", {"name": name})
            return []
        self.took[name] = time.monotonic() - began
        whole = [line for line in done.stdout.splitlines() if line.startswith("{") and line.endswith("}")]
        lines = [json.loads(line) for line in whole]  # a process that failed left half a line
        sanitizer = [line for line in done.stdout.splitlines() if line.startswith("=========")]
        give_times(lines, done.stderr)
        markers = [line for line in done.stderr.splitlines() if line.startswith("fn:lean:")]
        for line in lines:
            for step in line.get("steps", []):
                step["tokens_per_s"] = round(step["tokens"] / step["seconds"], 1)
            facts = {"process_s": round(self.took[name], 1), "markers": [*markers[:1], *markers[-2:]]}
            if sanitizer:
                facts["sanitizer"] = sanitizer[-1]
            self.record("arm", {"name": name, **line, **facts})
        if done.returncode != 0:
            self.record("failed", {"name": name, "code": done.returncode, "stderr": done.stderr[-2000:]})
        return lines

    def devices(self, count: int | None) -> tuple[list[str], dict[str, str]]:
        """Options and environment of a process on the first ``count`` devices."""
        env = dict(os.environ)
        split = self.args.split.split(",")[:count] if self.args.split else []
        words = ["--split", ",".join(split)] if len(split) > 1 else []
        if self.args.rpc:
            return [*words, "--rpc", ",".join(self.args.rpc.split(",")[:count])], env
        if count is not None:
            seen = env.get("CUDA_VISIBLE_DEVICES") or ",".join(str(n) for n in range(count))
            env["CUDA_VISIBLE_DEVICES"] = ",".join(seen.split(",")[:count])
        return words, env

    def speed(self) -> None:
        """Warm-up, then: 4k and 8k from empty, chunks at depth 32k and 64k, follow-ups, decode."""
        steps = ["1x96", "8192", "clear", "4096", "clear", "8192", "8192x3", "8192"]
        if self.args.ctx >= 10 * CHUNK:
            steps += ["8192x3", "8192"]
        steps += ["100", "200", "500", "2000", "1x64", "4x32"]
        if self.args.steps:
            steps = self.args.steps.split(";")
        names = self.args.arms.split(",") if self.args.arms else list(ARMS)
        once = self.args.once.split(",")
        again = [name for name in reversed(names) if name not in once]
        self.each([*names, *again] * self.args.rounds, steps)

    def decode(self) -> None:
        """The first tokens share the link with what is staged for the next prompt, or wait for a refill."""
        names = self.args.arms.split(",") if self.args.arms else ["tiled-8192", "lean-8192", "lean-8192-lent"]
        steps = ["1x96", "8192", "1x512", "8192", "1x512", "4x64"]
        self.each([*names, *reversed(names)] * 2, steps)

    def each(self, names: list[str], steps: list[str]) -> None:
        for name in names:
            if self.took.get(name, 20.0) > self.left_s():
                self.record("skipped", {"name": name, "left_s": round(self.left_s(), 1)})
                continue
            plain, _, count = name.partition("@")
            experts, arm = ARMS[plain]
            slots = f",slots={self.args.slots}" if experts == "host" else ""
            devices = int(count) if count else self.args.devices
            self.drive(name, experts, [arm + slots], ";".join(steps), count=devices)

    def exact(self) -> None:
        """Equal micro-batches; few tokens, since every row of logits is kept."""
        names = self.args.arms.split(",") if self.args.arms else list(EXACT)
        with tempfile.TemporaryDirectory(prefix="fn-lean-") as folder:
            files = {name: Path(folder) / f"{name}.bin" for name in ("stock", *names)}
            switches = {"stock": "ub=512", **EXACT}
            arms = [f"{switches[name]},slots=48,logits={file}" for name, file in files.items()]
            steps = self.args.steps or "600;1x8;300;1x4;200;40"
            self.drive("exact", "host", arms, steps, "--all-logits", count=self.args.devices)
            stock = files["stock"].read_bytes() if files["stock"].exists() else b""
            for name in names:
                lean = files[name].read_bytes() if files[name].exists() else b""
                self.record("exact", {"arm": EXACT[name], "bytes": len(stock), **compare(stock, lean)})

    def timeline(self) -> None:
        path = self.args.out.with_suffix(".timeline.jsonl")
        path.unlink(missing_ok=True)
        arm = f"lean=8192,FN_LEAN_REPORT=1,slots={self.args.slots},FN_LEAN_TIMELINE={path}"
        self.drive("timeline", "host", [arm], "1x96;8192;clear;8192;1x4")

    def memcheck(self) -> None:
        """A tiny ring and tiny slots: a kernel under the sanitizer is some hundred times slower."""
        sanitizer = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "99"]
        for arm in ("lean=64", "lean=64,slots=8", "lean=64,slots=16,FN_LEAN_LEND=1"):
            self.drive("memcheck", "host", [arm], "300;1x4;100;1x4", prefix=sanitizer)

    def times(self) -> None:
        """Every arm twice, without and with the switch: the second of two prompts of each counts."""
        names = self.args.arms.split(",") if self.args.arms else TIMED
        for place in ("host", "device"):
            slots = f",slots={self.args.slots}" if place == "host" else ""
            arms = [ARMS[n][1] + slots for n in names if ARMS[n][0] == place]
            if arms:
                both = [arm + switch for arm in arms for switch in ("", ON)]
                self.drive(f"times-{place}", place, both, "1x96;8192;1x4;clear;8192;1x4")
        with tempfile.TemporaryDirectory(prefix="fn-times-") as folder:
            for arm in ("ub=512,slots=48", "lean=512,slots=48"):
                off, on = Path(folder) / "off.bin", Path(folder) / "on.bin"
                arms = [f"{arm},logits={off}", f"{arm}{ON},logits={on}"]
                self.drive("times-exact", "host", arms, "1024;1x4;300", "--all-logits")
                found = [f.read_bytes() if f.exists() else b"" for f in (off, on)]
                self.record("exact", {"arm": arm + ON, "bytes": len(found[0]), **compare(*found)})


def give_times(lines: list[dict[str, Any]], text: str) -> None:
    """To each arm with the switch the marker of its last prompt: every such arm tells as many."""
    timed = [line for line in lines if ON in line.get("arm", "")]
    told = [json.loads(m.split(" ", 1)[1]) for m in text.splitlines() if m.startswith("fn:prefill:times ")]
    if timed and len(told) % len(timed) == 0 and told:
        each = len(told) // len(timed)
        for number, line in enumerate(timed):
            line["times"] = told[each * (number + 1) - 1]


def compare(a: bytes, b: bytes) -> dict[str, Any]:
    """Equal to the byte, or how far apart as float32; in plain Python, so only the first differing rows."""
    if not a or len(a) != len(b):
        return {"equal": False, "why": f"{len(a)} and {len(b)} bytes"}
    if a == b:
        return {"equal": True}
    pairs = zip(memoryview(a).cast("f"), memoryview(b).cast("f"), strict=True)
    return {"equal": False, "max_difference": max(abs(x - y) for x, y in pairs)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bin", type=Path, required=True, help="folder with fn-lean-run and its libraries")
    parser.add_argument("--model", type=Path, required=True, help="the bench model, one file")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended")
    parser.add_argument("--part", choices=PARTS, default="speed")
    parser.add_argument("--arms", help=f"comma separated: {','.join(ARMS)}; exact: {','.join(EXACT)}")
    parser.add_argument(
        "--devices", type=int, help="of the parts exact, speed, decode: the first so many; default: all"
    )
    parser.add_argument("--split", help="proportions of the devices' layers: 1,1; default: by free memory")
    parser.add_argument("--rpc", help="endpoints of virtual GPUs instead of CUDA devices")
    parser.add_argument("--rounds", type=int, default=1, help="of the part speed: how often there and back")
    parser.add_argument("--once", default="", help="of these, the arms that do not run a second time")
    parser.add_argument("--budget-s", type=float, default=500)
    parser.add_argument("--steps", help="of speed and exact, instead of their own: 8192x3;7001;1x4;clear")
    parser.add_argument("--batch", type=int, default=CHUNK, help="tokens of the largest step")
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument(
        "--slots", type=int, default=150, help="of the expert cache, in arms with host experts"
    )
    parser.add_argument("--ctx", type=int, default=81920 + 4096)
    parser.add_argument("--leave-gib", type=float, help="hold the rest of every device's memory")
    parser.add_argument("--pinned", default="CUDA_Host", help="buffer type of page-locked memory")
    bench = Bench(parser.parse_args())
    os.environ["PYTHONPATH"] = str(REPO) + os.pathsep + os.environ.get("PYTHONPATH", "")  # of link and hold
    with ExitStack() as stack:
        if not bench.args.rpc:
            bench.uploads()
        if bench.args.leave_gib is not None:
            held = stack.enter_context(hold.vram_limit(int(bench.args.leave_gib * GIB)))
            bench.record("held", {"devices": held})
        os.environ.setdefault("LLAMA_MMAP_PIN_HOST", "1")
        getattr(bench, bench.args.part)()


if __name__ == "__main__":
    main()
