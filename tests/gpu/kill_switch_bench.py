"""Every kill switch off against a build without features, and a prompt from pinned against mapped experts.

    python tests/gpu/kill_switch_bench.py --vanilla VANILLA_BIN --bin BIN --model bench.gguf --out off.jsonl

Arms forwards and backwards (ABBA), each run a fresh llama-server over the same model:

vanilla  the pinned tree alone, experts in host memory
off      our build with every switch at vanilla
pinned   our build, experts in page-locked memory
mapped   our build, experts in the mapped file: pageable memory

Each reads one prompt (micro-batch 2,048) and writes tokens at temperature 0, after a shorter one. Exit 1 if
`off` wrote other tokens than `vanilla`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtp_bench import ask, wait_ready

PROMPT_TOKENS = 8192
WRITTEN_TOKENS = 128
EXPERTS = "ffn_(gate|up|down)_exps"


@dataclass(frozen=True)
class Arm:
    name: str
    experts: str
    load_mode: str
    env: dict[str, str] = field(default_factory=dict)


VANILLA = Arm("vanilla", "CPU", "none")
SWITCHES = {
    "LLAMA_MMAP_PIN_HOST": "0",
    "FN_TOPK": "0",
    "FN_TILED_QSA": "0",
    "FN_GET_ROWS": "0",
    "FN_DRAFT_ROWS": "0",
    "FN_INLINE_CHECKPOINTS": "0",
}
OFF = Arm("off", "CPU", "none", SWITCHES)
PINNED = Arm("pinned", "CUDA_Host", "none")
MAPPED = Arm("mapped", "CPU", "mmap", {"LLAMA_MMAP_PIN_HOST": "0"})
ARMS = (VANILLA, OFF, PINNED, MAPPED)


def run_arm(args: argparse.Namespace, arm: Arm, port: int) -> dict[str, Any]:
    folder = args.vanilla if arm is VANILLA else args.bin
    argv = [str(folder / "llama-server"), "-m", str(args.model), "--host", "127.0.0.1", "--port", str(port)]
    argv += ["-ngl", "99", "-c", "16384", "-b", "4096", "-ub", "2048", "-fa", "on", "-np", "1", "--no-repack"]
    experts = arm.experts if arm is not PINNED else args.pinned
    argv += ["-ot", f"{EXPERTS}={experts}", "--load-mode", arm.load_mode, "--fit", "off"]
    argv += ["-t", str(args.threads), "--cache-ram", "0", "--no-warmup"]
    base = f"http://127.0.0.1:{port}"
    answers = []
    with args.out.with_suffix(".log").open("ab") as log:
        server = subprocess.Popen(argv, stdout=log, stderr=log, env={**os.environ, **arm.env})
        try:
            ready_s = wait_ready(base, server)
            vocabulary = json.loads(ask(base + "/v1/models"))["data"][0]["meta"]["n_vocab"]
            for seed, part in ((1, 8), (2, 1)):  # the first one warms up
                some = random.Random(seed)
                prompt = [some.randrange(vocabulary // 2) for _ in range(args.prompt // part)]
                body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
                body |= {"n_predict": args.written // part, "return_tokens": True}
                answers.append(json.loads(ask(base + "/completion", body)))
        finally:
            server.kill()
            server.wait()
    return {
        "arm": arm.name,
        "argv": argv[3:],
        "env": arm.env,
        "ready_s": ready_s,
        "timings": [answer["timings"] for answer in answers],
        "tokens": answers[-1]["tokens"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("--vanilla", "--bin", "--model", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--threads", type=int, default=15)
    parser.add_argument("--prompt", type=int, default=PROMPT_TOKENS, help="tokens of the prompt")
    parser.add_argument("--written", type=int, default=WRITTEN_TOKENS, help="tokens to write")
    parser.add_argument("--pinned", default="CUDA_Host", help="buffer type of page-locked memory")
    parser.add_argument("--port", type=int, default=18200)
    parser.add_argument("--arms", default=",".join(arm.name for arm in ARMS), help="comma separated")
    parser.add_argument("--rounds", type=int, default=1, help="times forwards and backwards")
    args = parser.parse_args()

    by_name = {arm.name: arm for arm in ARMS}
    if unknown := set(args.arms.split(",")) - set(by_name):
        parser.error(f"no arm is called {', '.join(sorted(unknown))}; there are {', '.join(by_name)}")
    arms = [by_name[name] for name in args.arms.split(",")]
    written: dict[str, list[list[int]]] = {arm.name: [] for arm in ARMS}
    for i, arm in enumerate([*arms, *reversed(arms)] * args.rounds):
        run = run_arm(args, arm, args.port + i)
        with args.out.open("a") as out:
            out.write(json.dumps(run) + "\n")
        written[arm.name].append(run["tokens"])
        read, write = (
            [round(timing[key], 1) for timing in run["timings"][1:]]
            for key in ("prompt_per_second", "predicted_per_second")
        )
        print(f"{arm.name:8} ready {run['ready_s']:5.1f} s, read {read} t/s, write {write} t/s", flush=True)

    if not {"vanilla", "off"} <= {arm.name for arm in arms}:
        return
    same = all(tokens == written["vanilla"][0] for tokens in written["vanilla"] + written["off"])
    print(json.dumps({"off_writes_what_vanilla_writes": same, "tokens": len(written["vanilla"][0])}))
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
