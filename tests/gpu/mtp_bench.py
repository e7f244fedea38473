"""Decode with and without an MTP head on a real GPU, fresh server processes, ABBA; JSON lines into one file.

    flashnext model synth bench --layers 12 --markov --mtp shared --out bench.gguf
    flashnext model synth bench --layers 12 --seed 1 --mtp shared --out other.gguf
    python tests/gpu/mtp_bench.py --bin BIN --model bench.gguf --markov HEAD --random HEAD2 --out mtp.jsonl

The markov head drafts right every time, the random one never: the two ends between which a real head lies.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

PROMPT = "The quick brown fox jumps over the lazy dog. " * 40
EXPERTS = "ffn_(gate|up|down)_exps=CUDA_Host"


def ask(url: str, body: dict[str, Any] | None = None, timeout_s: float = 120) -> str:
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return str(answer.read().decode())


def wait_ready(base: str, server: subprocess.Popen[bytes], limit_s: float = 120) -> float:
    """Seconds until /health answers 200."""
    start = time.monotonic()
    while time.monotonic() - start < limit_s:
        if server.poll() is not None:
            raise SystemExit(f"llama-server ended with {server.returncode}; see its log")
        try:
            ask(base + "/health", timeout_s=2)
            return time.monotonic() - start
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"llama-server was not ready within {limit_s:g} s")


def run_arm(args: argparse.Namespace, head: str | None, slots: int, port: int) -> dict[str, Any]:
    argv = [str(args.bin / "llama-server"), "-m", str(args.model), "--host", "127.0.0.1", "--port", str(port)]
    argv += ["-ngl", "99", "-c", "8192", "-b", "4096", "-ub", "512", "-fa", "on", "-np", "1", "--no-repack"]
    argv += ["-ot", EXPERTS, "--fit", "off", "-t", str(args.threads), "--metrics", "--cache-ram", "0"]
    if slots:
        argv += ["--moe-expert-cache", str(slots)]
    if head:
        argv += ["-md", str(getattr(args, head)), "--spec-type", "draft-mtp", "--spec-draft-n-max", "3"]
        argv += ["-ngld", "99"]
    base = f"http://127.0.0.1:{port}"
    with args.out.with_suffix(".log").open("ab") as log:
        server = subprocess.Popen(argv, stdout=log, stderr=log)
        try:
            ready_s = wait_ready(base, server)
            body = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
            answers = [ask(base + "/completion", {**body, "n_predict": n}) for n in (64, 256, 256)]
            series = ask(base + "/metrics").splitlines()
        finally:
            server.kill()
            server.wait()
    return {
        "head": head,
        "slots": slots,
        "ready_s": ready_s,
        "timings": [json.loads(answer)["timings"] for answer in answers],
        "metrics": [line for line in series if "fn_" in line and not line.startswith("#")],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("--bin", "--model", "--markov", "--random", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--threads", type=int, default=15)
    args = parser.parse_args()
    mirrored = [None, "markov", "random", "random", "markov", None]
    port = 18100
    for slots, order in ((150, mirrored), (0, [None, "markov", "random"])):
        for head in order:
            port += 1
            arm = run_arm(args, head, slots, port)
            with args.out.open("a") as out:
                out.write(json.dumps(arm) + "\n")
            speeds = [round(timing["predicted_per_second"], 1) for timing in arm["timings"]]
            print(head, slots, speeds, flush=True)


if __name__ == "__main__":
    main()
