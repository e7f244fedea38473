"""The memory transaction on a real GPU whose memory is held down; JSON lines into a file, a table at the end.

    flashnext model synth bench --layers 12 --mtp shared --out MODELS
    python tests/gpu/phase_bench.py --bin BIN --model bench.gguf --head HEAD --out phase.jsonl --budget 540
    flashnext model synth tiny --mtp embedded --out TINY
    python tests/gpu/phase_bench.py --bin BIN --model tiny.gguf --out memcheck.jsonl --part memcheck

    # no GPU: virtual GPUs (fn-vgpu), with --devices 2 two of them
    python tests/gpu/phase_bench.py --demo --bin BIN --model tiny.gguf --out dry.jsonl --ctx 4096 \\
        --slots 16 --min-tokens 256 --lengths 512,512,1500 --deep 3000 --decode 24 --threads 1

size         the candidate and, apart, micro-batch 2048 beside 150 slots, with the whole card: how low does
             free memory get? A limit between the two is held from then on by a process of its own; then
             micro-batch 2048 beside the slots has to fail
arms         control (micro-batch 512, no transaction), candidate (the transaction), large (micro-batch 2048,
             no slots), and the same backwards; a fresh process each: prompts, time to first token, 512 tokens
             of decode, the parts of the transitions, log-probabilities of a first token
transitions  one candidate process, 100 prompts, free memory of each device after each, and how many prompts,
             begins and ends it counted; with --env LLAMA_PHASE_PREFILL_VERIFY=1 the server compares outputs,
             KV, state and slots around each
tight        the candidate with ever less memory than it needs: it has to refuse the start, fail a prompt or
             end itself with 75, and never abort (needs the part size in the same run)
deep         control and candidate at --deep tokens
memcheck     compute-sanitizer over two prompts of the tiny model with the transaction

A part that does not fit into the budget any more is left out, and a line says so.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phase_arms import Arm, Clock, Numbers, OverBudgetError, Server, command, environment, free_port, words
from phase_device import REPO, CudaDevice, Device, Lowest, VirtualDevice
from phase_table import compare, table

from flashnext.bench import link

PARTS = ("size", "arms", "transitions", "tight", "deep")
MIB = 1 << 20


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.clock = Clock(args.budget)
        self.folder = Path(tempfile.mkdtemp(prefix="fn-phase-"))
        self.lines: list[dict[str, Any]] = []
        self.limit: int | None = args.limit
        self.need: int | None = None  # of the candidate
        self.firsts: list[tuple[str, dict[int, float]]] = []
        micro = 512 if not args.demo else args.demo_micro_batch
        self.n = Numbers(
            args.ctx, args.batch or 8 * micro, micro, 4 * micro, args.slots, 2, args.min_tokens,
            args.threads, 3, args.host_tensors, args.cache_ram, args.checkpoints,
        )  # fmt: skip
        self.control = Arm("control", phase=False, micro_batch=micro, slots=args.slots)
        self.candidate = Arm("candidate", phase=True, micro_batch=micro, slots=args.slots)
        self.large = Arm("large", phase=False, micro_batch=4 * micro, slots=0)
        self.both = Arm("both", phase=False, micro_batch=4 * micro, slots=args.slots)
        self.device: Device
        if args.demo:
            log = args.out.with_suffix(".vgpu.log")
            self.device = VirtualDevice(args.bin, args.devices, args.demo_memory, log)
        else:
            self.device = CudaDevice(args.devices)

    def record(self, what: str, **data: Any) -> None:
        line = {"what": what, "at_s": round(self.args.budget - self.clock.left(), 1), **data}
        self.lines.append(line)
        with self.args.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line)[:400], flush=True)

    def start(self, arm: Arm, prefix: list[str] | None = None, extra: dict[str, str] | None = None) -> Server:
        port = free_port()
        home = self.folder / "config"
        home.mkdir(exist_ok=True)
        env = environment(arm, self.n, {**self.args.env, **(extra or {})}, str(home))
        argv = command(
            arm, self.n, self.args.bin / "llama-server", self.args.model, self.args.head, self.device, port
        )
        return Server(argv, env, port, self.folder / f"{arm.name}-{port}.log", self.clock, prefix)

    def finish(self, server: Server, what: str, **data: Any) -> int | None:
        """Ask it to end; its log goes to the common one."""
        code = server.ask_to_end(20)
        if code is None:
            server.kill()
        with self.args.out.with_suffix(".log").open("ab") as log, server.log.open("rb") as own:
            log.write(f"\n===== {server.log.name}\n".encode())
            shutil.copyfileobj(own, log)
        self.record(what + "-end", returncode=code, **data)
        return code

    def in_process(
        self, what: str, arm: Arm, work: Callable[[Server, Lowest], None], ready_s: float = 120
    ) -> bool:
        """A fresh process for ``work``. False when it did not come up or broke; the reason is recorded."""
        self.settle()
        before = self.device.free()
        ok = False
        server = self.start(arm)
        with Lowest(self.device) as lowest:
            why = ""
            try:
                came = server.wait_ready(self.clock.limit(ready_s))
                if came is None:
                    why = "not ready"
                else:
                    self.record(
                        what + "-ready",
                        arm=arm.name,
                        ready_s=came,
                        free_before=before,
                        free_ready=self.device.free(),
                    )
                    work(server, lowest)
                    ok = True
            except OverBudgetError:
                why = "budget"
            except Exception as error:  # an arm that breaks is a result, and the next one still runs
                why = f"{type(error).__name__}: {error}"
            data: dict[str, Any] = {"arm": arm.name, "free_before": before, "free_lowest": lowest.read()}
            if not ok:
                ended = server.child.poll()
                data |= {"failed": why, "ended_before": ended, "tail": server.text[-1500:]}
            self.finish(server, what, **data)
        if not ok and why == "budget":
            raise OverBudgetError
        return ok

    def settle(self) -> None:
        """Free memory is what it was before the last process: the driver needs a moment after its end."""
        last: list[int] = []
        for _ in range(50):
            now = self.device.free()
            if now == last:
                return
            last = now
            time.sleep(0.2)

    # parts

    def size(self) -> None:
        longest = max(self.args.lengths)
        if not self.args.demo:
            self.record("link", **link.probe())
        found: dict[str, int] = {}

        def prompt_and_decode(server: Server, lowest: Lowest) -> None:
            one = server.complete(words(1, longest, server.n_vocab()), 64)
            self.record("size-prompt", **one, markers=server.markers())

        for arm in (self.candidate, self.both):
            self.settle()
            free = self.device.free()
            if not self.in_process("size", arm, prompt_and_decode):
                self.record("size-failed", arm=arm.name)
                return
            lowest = self.lines[-1]["free_lowest"]
            found[arm.name] = max(was - low for was, low in zip(free, lowest, strict=True))  # of one device
        self.need = found["candidate"]
        gap = found["both"] - found["candidate"]
        margin = min(512 * MIB, gap // 2)
        if self.limit is None:
            self.limit = found["candidate"] + max(margin, 0)
        self.record("size", need_bytes=found, gap_bytes=gap, limit_bytes=self.limit)
        with self.device.limited(self.limit) as held:
            self.record("held", held=held, left_bytes=self.device.free())
            fits = self.in_process("both-held", self.both, prompt_and_decode, ready_s=60)
            self.record("both-fits", fits=fits, expected=False)

    def one_arm(self, arm: Arm, lengths: list[int], n_decode: int, logprobs: bool) -> None:
        def ask(server: Server, lowest: Lowest) -> None:
            n_vocab = server.n_vocab()
            one = server.complete(words(2, self.n.batch, n_vocab), 64)
            self.record("warm-up", arm=arm.name, **one, markers=server.markers())
            for index, length in enumerate(lengths):
                lowest.reset()
                one = server.complete(words(100 + index, length, n_vocab), n_decode)
                self.record(
                    "prompt", arm=arm.name, **one, free_lowest=lowest.read(), free_after=self.device.free(),
                    markers=server.markers(),
                )  # fmt: skip
            if logprobs:
                self.firsts.append((arm.name, server.logprobs(words(777, min(lengths), n_vocab), n_vocab)))
            self.record("metrics", arm=arm.name, values=server.metrics(), rss_bytes=server.rss_bytes())

        self.in_process("arm", arm, ask)

    def arms(self) -> None:
        order = [self.control, self.candidate, self.large]
        with self.device.limited(self.limit) as held:
            self.record("held", held=held, left_bytes=self.device.free())
            for arm in (*order, *reversed(order)):
                self.one_arm(arm, self.args.lengths, self.args.decode, logprobs=True)
        for line in compare(self.firsts):
            self.record("first-token", **line)

    def deep(self) -> None:
        with self.device.limited(self.limit):
            for arm in (self.candidate, self.control, self.control, self.candidate)[: self.args.deep_arms]:
                self.one_arm(arm, [self.args.deep], self.args.decode, logprobs=False)

    def transitions(self) -> None:
        rng = random.Random(9)

        def ask(server: Server, lowest: Lowest) -> None:
            n_vocab = server.n_vocab()
            done = 0
            for index in range(self.args.transitions):
                if self.clock.left() < 15:
                    break  # what was counted is still told
                count = max(self.n.min_tokens, 1) + rng.randrange(self.n.prompt_micro_batch)
                lowest.reset()
                one = server.complete(words(1000 + index, count, n_vocab), 8)
                parts = {m["event"]: m for m in server.markers() if m["event"] in ("begin", "end")}
                self.record(
                    "transition", index=index, n_prompt=count, first_token_s=one["first_token_s"],
                    free_after=self.device.free(), free_lowest=lowest.read(), rss_bytes=server.rss_bytes(),
                    begin=parts.get("begin"), end=parts.get("end"),
                )  # fmt: skip
                done += 1
            values = server.metrics()
            counted = {name: values.get(f"fn_phase_{name}_total") for name in ("begins", "ends")}
            self.record("transitions-metrics", prompts=done, **counted, values=values)

        with self.device.limited(self.limit) as held:
            self.record("held", held=held, left_bytes=self.device.free())
            self.in_process("transitions", self.candidate, ask)

    def tight(self) -> None:
        if self.need is None:
            self.record("tight-left-out", reason="the part size did not run")
            return
        for less_mib in self.args.tight:
            with self.device.limited(self.need - int(less_mib * MIB)):
                self.settle()
                server = self.start(self.candidate)
                data: dict[str, Any] = {
                    "less_mib": less_mib,
                    "ready": server.wait_ready(self.clock.limit(60)),
                }
                if data["ready"] is not None:
                    # the long one may fail; then the short one, which needs as little as decode, must not
                    prompts = [words(5, max(self.args.lengths), 256), words(6, 64, 256)]
                    data["answers"] = [server.outcome(prompt, 16) for prompt in prompts]
                    server.wait_end(4)  # after a failed transition it ends itself; otherwise it lives on
                    data["events"] = [m for m in server.markers() if m["event"] in ("pool", "failed")]
                ended = server.child.poll()
                self.finish(server, "tight", **data, ended_by_itself=ended, aborted=ended == -6)

    def memcheck(self) -> None:
        """The tiny model, small numbers: a kernel under the sanitizer is some hundred times slower."""
        self.n = self.n._replace(
            context=2048, batch=512, micro_batch=64, prompt_micro_batch=256, slots=8, min_tokens=0, threads=2
        )
        arm = Arm("memcheck", phase=True, micro_batch=64, slots=8)
        prefix = [*self.args.sanitizer.split(), "--tool", "memcheck", "--error-exitcode", "99"]
        if not shutil.which(prefix[0]):
            self.record("memcheck-left-out", reason=f"{prefix[0]} is not here")
            return
        server = self.start(arm, prefix, {"LLAMA_PHASE_PREFILL_VERIFY": "1"})
        data: dict[str, Any] = {}
        try:
            data["ready_s"] = server.wait_ready(self.clock.limit(500))
            for seed, count in ((1, 300), (2, 555)):
                one = server.complete(words(seed, count, min(server.n_vocab(), 256)), 8)
                self.record("memcheck-prompt", **one, markers=server.markers())
        except Exception as error:  # what the sanitizer says matters more
            data["failed"] = f"{type(error).__name__}: {error}"
        data["code"] = server.ask_to_end(max(self.clock.left(), 20))
        server.kill()
        text = server.text
        data["summary"] = [x for x in text.splitlines() if x.startswith("=========")][-12:]
        data["clean"] = data["code"] == 0 and any("ERROR SUMMARY: 0 errors" in x for x in data["summary"])
        self.record("memcheck", **data, tail="" if data["clean"] else text[-3000:])
        self.args.out.with_suffix(".memcheck.log").write_text(text)

    def run(self, parts: list[str]) -> None:
        for part in parts:
            try:
                getattr(self, part)()
            except OverBudgetError:
                self.record("budget-over", part=part, left_out=parts[parts.index(part) + 1 :])
                break
        if self.firsts and not any(x["what"] == "first-token" for x in self.lines):
            for line in compare(self.firsts):
                self.record("first-token", **line)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bin", type=Path, required=True, help="folder with llama-server and its libraries")
    parser.add_argument(
        "--model", type=Path, required=True, help="the bench model; the tiny one for memcheck and --demo"
    )
    parser.add_argument("--head", type=Path, help="draft head; left out: the model has one embedded")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended")
    parser.add_argument(
        "--part", action="append", choices=[*PARTS, "memcheck"], help="default: all but memcheck"
    )
    parser.add_argument("--budget", type=float, default=540, help="seconds in all")
    parser.add_argument(
        "--limit", type=int, help="bytes to leave free on each device; default: what the part size finds"
    )
    parser.add_argument("--ctx", type=int, default=81920)
    parser.add_argument("--batch", type=int, help="default 4096")
    parser.add_argument("--slots", type=int, default=150)
    parser.add_argument(
        "--devices", type=int, default=1, help="so many, with equal parts; the output counts as a layer"
    )
    parser.add_argument("--min-tokens", type=int, default=2048)
    parser.add_argument(
        "--lengths", type=lambda t: [int(x) for x in t.split(",")], default=[8192, 8192, 32768]
    )
    parser.add_argument("--deep", type=int, default=65536)
    parser.add_argument("--deep-arms", type=int, default=2, help="of candidate, control, control, candidate")
    parser.add_argument("--decode", type=int, default=512)
    parser.add_argument("--transitions", type=int, default=100)
    parser.add_argument(
        "--tight", type=lambda t: [float(x) for x in t.split(",")], default=[16, 64, 256, 1024]
    )
    parser.add_argument("--threads", type=int, default=15)
    parser.add_argument("--cache-ram", type=int, default=4096, help="MiB, as in the profiles")
    parser.add_argument("--checkpoints", type=int, default=32, help="0: all arms cut prompts alike")
    parser.add_argument("--host-tensors", default="ffn_(gate|up|down)_exps")
    parser.add_argument(
        "--env", action="append", default=[], help="NAME=VALUE for every arm, e.g. FN_TILED_QSA=0"
    )
    parser.add_argument("--sanitizer", default="compute-sanitizer")
    parser.add_argument("--demo", action="store_true", help="virtual GPUs instead of CUDA")
    parser.add_argument("--demo-micro-batch", type=int, default=64)
    parser.add_argument("--demo-memory", type=int, default=2 << 30)
    args = parser.parse_args()
    args.env = dict(pair.split("=", 1) for pair in args.env)
    return args


def main() -> None:
    os.environ["PYTHONPATH"] = str(REPO)  # of the process that holds memory
    args = parse()
    bench = Bench(args)
    bench.record("start", argv=sys.argv[1:], numbers=bench.n._asdict(), environment=args.env)
    try:
        bench.run(args.part or list(PARTS))
    finally:
        bench.device.close()
        shutil.rmtree(bench.folder, ignore_errors=True)
        text = table(bench.lines)
        print(text, flush=True)
        args.out.with_suffix(".txt").write_text(text + "\n")


if __name__ == "__main__":
    main()
