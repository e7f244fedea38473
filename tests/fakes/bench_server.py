"""A llama-server with known speeds and a known rate of mistakes, for tests of the bench. It never sleeps.

Started as ``bench_server.py CONFIG PORT``, or as ``bench_server.py CONFIG [llama-server's flags]``: there
prompts make transitions as its LLAMA_PHASE_PREFILL variables say. CONFIG is JSON; all keys are optional:
prefill_tps, decode_tps   speeds that its timings report
noise                     standard deviation of a process's speed, relative (drawn per launch)
drift                     relative change of speed per launch of any arm that shares ``state``
state                     folder where launches are counted
error_rate                share of the quality questions answered wrongly
shift                     added to every third log probability
min_tokens                prompts of so many new tokens print begin and end markers
lose_end                  true: the end marker is never printed
line                      a log line printed with the first completion
die_at                    the process ends at this completion, counted over its own life
no_times                  true: FN_PREFILL_TIMES means nothing to it
acceptance                share of 100 drafted tokens that it says were accepted
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import sys
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from flashnext.bench.questions import make_screen

CONFIG: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
ARGV = sys.argv[2:]
PORT = int(ARGV[ARGV.index("--port") + 1] if "--port" in ARGV else ARGV[0])
if "LLAMA_PHASE_PREFILL_UBATCH" in os.environ:
    CONFIG.setdefault("min_tokens", int(os.environ.get("LLAMA_PHASE_PREFILL_MIN_TOKENS", "0")))
SANE = "It was a quiet morning, and the harbour smelled of tar and oranges."


def count_launch() -> int:
    """How many servers that share ``state`` were launched before this one."""
    if "state" not in CONFIG:
        return 0
    file = Path(CONFIG["state"]) / "launches"
    with file.open("a") as stream:
        stream.write(f"{Path(sys.argv[1]).stem} {os.getpid()}\n")
    return len(file.read_text().splitlines()) - 1


LAUNCH = count_launch()
RNG = random.Random(f"{sys.argv[1]} {LAUNCH}")
FACTOR = math.exp(RNG.gauss(0, CONFIG.get("noise", 0.0)) + CONFIG.get("drift", 0.0) * LAUNCH)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    completions = 0
    last: list[int]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def events(self, *values: Any) -> None:
        body = "".join(f"data: {json.dumps(v)}\n\n" for v in values).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.answer([] if self.path == "/slots" else {"status": "ok"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self.answer({"tokens": tokenize(body["content"])})
            return
        if not body.get("stream"):  # a supervisor's question whether all is well, of one prompt or several
            if os.environ.pop("LLAMA_PHASE_PREFILL_REHEARSE", "") == "1":
                say("fn:phase:begin {}")
                say("fn:phase:end {}")
            sane = {"content": SANE, "tokens": [], "timings": timings(4, 24)}
            self.answer([sane for _ in body["prompt"]] if isinstance(body["prompt"], list) else sane)
            return
        Handler.completions += 1
        if Handler.completions == CONFIG.get("die_at"):
            os._exit(3)
        if Handler.completions == 1 and "line" in CONFIG:
            say(CONFIG["line"])
        if self.path == "/completion":
            self.complete(body)
        else:
            self.chat(body)

    def complete(self, body: dict[str, Any]) -> None:
        count = len(body["prompt"])
        transition(count)
        tell_times(count)
        text = f"text {zlib.crc32(json.dumps(body['prompt']).encode())}"
        event: dict[str, Any] = {"content": text, "tokens": [1]}
        if body.get("n_probs"):
            shift = CONFIG.get("shift", 0.0)
            top = [
                {"id": i, "logprob": -0.1 * i + shift * (i % 3 == 1)}
                for i in range(min(body["n_probs"], 30_000))
            ]
            event["completion_probabilities"] = [{"id": 0, "logprob": 0.0, "top_logprobs": top}]
        self.events(event, {"content": "", "stop": True, "timings": timings(count, body["n_predict"])})

    def chat(self, body: dict[str, Any]) -> None:
        messages = body["messages"]
        first = messages[0]["content"]
        count = len(tokenize(first)) if len(messages) == 1 else 20
        transition(count)
        screen = make_screen(int(re.search(r"\(number (\d+)\)", first)[1]))  # type: ignore[index]
        question = next(q for q in screen.questions if messages[-1]["content"].endswith(q.text))
        wrong = RNG.random() < CONFIG.get("error_rate", 0.0)
        text = "I do not know" if wrong else question.answer
        choice = {"delta": {"content": text}}
        self.events({"choices": [choice]}, {"choices": [], "timings": timings(count, 8)})


def tokenize(text: str) -> list[int]:
    return [zlib.crc32(text[i : i + 4].encode()) % 30_000 for i in range(0, len(text), 4)]


def timings(prompt: int, generated: int) -> dict[str, Any]:
    prefill = CONFIG.get("prefill_tps", 1000.0) * FACTOR
    decode = CONFIG.get("decode_tps", 100.0) * FACTOR
    drafted = (
        {"draft_n": 100, "draft_n_accepted": int(100 * CONFIG["acceptance"])}
        if "acceptance" in CONFIG
        else {}
    )
    return {
        "cache_n": 0,
        "prompt_n": prompt,
        "prompt_ms": prompt / prefill * 1000,
        "predicted_n": generated,
        "predicted_ms": generated / decode * 1000,
        **drafted,
    }


def transition(count: int) -> None:
    if "min_tokens" in CONFIG and count >= CONFIG["min_tokens"]:
        say('fn:phase:begin {"release_ms": 12.5, "reserve_ms": 7.5}')
        if not CONFIG.get("lose_end"):
            say('fn:phase:end {"ms": 10.0, "restore_ms": 6.0}')


def tell_times(count: int) -> None:
    if os.environ.get("FN_PREFILL_TIMES") == "1" and not CONFIG.get("no_times"):
        us = timings(count, 1)["prompt_ms"] * 1000
        kinds = {"experts": int(0.6 * us), "attention": int(0.3 * us), "upload": 0}
        say(f"fn:prefill:times {json.dumps({'tokens': count, 'micro_batches': 2, 'kinds_us': kinds})}")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


say(f"listening on {PORT}")
ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
