"""A llama-server whose behaviour a test steers, for failures that no real one shows on demand.

Started as ``llama_server.py ROLE FOLDER [the real flags...]`` by a small script that poses as the binary.
ROLE is ``server`` or ``vgpu``. FOLDER/fake.json holds one behaviour, or a list of them: one per launch, the
last for all further ones. FOLDER/launches-ROLE.jsonl gets argv, environment, pid and time of each launch.

Keys of a behaviour, all optional:
  load_s, load_line_every_s      how long /health says 503, and a log line meanwhile
  eat_mb, in_group               so much memory half a second after the start, in this memory control group
  lines [[after_s, text]]        log lines
  exit_now, exit_after_s         end at once ("argument": as for a bad flag), or later
  exit_code, signal              how it ends
  at_request, hang               end (or hang) when the n-th completion arrives
  hang_all_after                 that completion and all after it get no answer
  ignore_term, busy, spam_mb     no end by TERM; slots that never move; so much log
  text, text_after [n, text]     what completions say, and what they say after the n-th
  queue_s                        completions wait so long while the slots move, as behind other clients
  rehearsal [line]               log lines of the first prompt, where a rehearsal was asked for
  error_500                      every completion fails with this message
  stamp, help_without            --version's stamp line; flags that --help does not know
  vgpu_silent                    a virtual GPU that announces no port
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROLE, FOLDER, ARGV = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
SANE = "It was a quiet morning, and the harbour smelled of tar and oranges."
HELP = Path(__file__).with_name("llama_server_help.txt")


# A test may let the supervisor's own files fail; this program's log of launches is the test's.
_HARD = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (_HARD, _HARD))


def behaviour() -> dict[str, Any]:
    log = FOLDER / f"launches-{ROLE}.jsonl"
    count = len(log.read_text().splitlines()) if log.exists() else 0
    entry = {"argv": ARGV, "env": dict(os.environ), "pid": os.getpid(), "time": time.time()}
    with log.open("a") as stream:
        stream.write(json.dumps(entry) + "\n")
    plan = json.loads((FOLDER / "fake.json").read_text())
    return plan[min(count, len(plan) - 1)] if isinstance(plan, list) else plan


def out(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def die(do: dict[str, Any]) -> None:
    if "signal" in do:
        os.kill(os.getpid(), do["signal"])
        time.sleep(1)
    os._exit(do.get("exit_code", 1))


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], do: dict[str, Any]) -> None:
        super().__init__(address, Handler)
        self.do = do
        self.ready_at = time.monotonic() + do.get("load_s", 0)
        self.completions = 0


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def allowed(self) -> bool:
        """As the real one: with a key file everything but /health asks for a key."""
        if "--api-key-file" not in ARGV or self.path == "/health":
            return True
        keys = Path(ARGV[ARGV.index("--api-key-file") + 1]).read_text().split("\n")
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if given in [key for key in keys if key and not key.startswith("#")]:
            return True
        self.answer(401, {"error": {"message": "Invalid API Key"}})
        return False

    def do_GET(self) -> None:
        if not self.allowed():
            return
        do = self.server.do
        loaded = time.monotonic() >= self.server.ready_at
        if self.path == "/health":
            self.answer(200 if loaded else 503, {"status": "ok" if loaded else "loading"})
        elif self.path == "/slots":
            busy = bool(do.get("busy"))
            moving = "queue_s" in do
            read = int(time.monotonic() * 100) if moving else 7
            slot = {
                "id": 0,
                "id_task": 1,
                "is_processing": busy or moving,
                "n_prompt_tokens_processed": read,
            }
            self.answer(200, [slot])
        else:
            self.answer(404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        if not self.allowed():
            return
        do = self.server.do
        if "queue_s" in do and time.monotonic() < self.server.ready_at + do["queue_s"]:
            time.sleep(do["queue_s"])
        prompt = body.get("prompt")
        many = isinstance(prompt, list) and not isinstance(prompt[0], int)
        texts = [self.complete(do) for _ in prompt] if many else [self.complete(do)]
        if "error_500" in do:
            self.answer(500, {"error": {"message": do["error_500"]}})
            return
        answers = [{"content": text, "timings": {"predicted_per_second": 42.0}} for text in texts]
        self.answer(200, answers if len(answers) > 1 else answers[0])

    def complete(self, do: dict[str, Any]) -> str:
        """The n-th completion of this launch, or what becomes of it."""
        self.server.completions += 1
        count = self.server.completions
        if count == 1 and os.environ.get("LLAMA_PHASE_PREFILL_REHEARSE") == "1":
            for line in do.get("rehearsal", ["fn:phase:begin {}", "fn:phase:end {}"]):
                out(line)
        if count == do.get("at_request"):
            if do.get("hang"):
                time.sleep(3600)
            die(do)
        if "hang_all_after" in do and count >= do["hang_all_after"]:
            time.sleep(3600)
        if "text_after" in do and count > do["text_after"][0]:
            return str(do["text_after"][1])
        return str(do.get("text", SANE))


def serve_model() -> None:
    if "--version" in ARGV:
        do = json.loads((FOLDER / "fake.json").read_text())
        do = do[0] if isinstance(do, list) else do
        out("version: 0.0.0-fake")
        stamp = do.get("stamp", (FOLDER / "stamp.txt").read_text())
        if stamp:
            print(stamp, file=sys.stderr)
        return
    if "--help" in ARGV:
        do = json.loads((FOLDER / "fake.json").read_text())
        do = do[0] if isinstance(do, list) else do
        text = HELP.read_text()
        for flag in do.get("help_without", []):
            text = text.replace(flag, "--renamed")
        out(text)
        return
    do = behaviour()
    if do.get("ignore_term"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if do.get("exit_now"):
        out(
            "error: invalid argument: --something"
            if do["exit_now"] == "argument"
            else "the model cannot be read"
        )
        die(do)
    for after, text in do.get("lines", []):
        threading.Timer(after, out, (text,)).start()
    if "exit_after_s" in do:
        threading.Timer(do["exit_after_s"], die, (do,)).start()
    if "load_line_every_s" in do:
        threading.Thread(target=tick, args=(do,), daemon=True).start()
    if "eat_mb" in do:
        threading.Timer(0.5, eat, (do,)).start()
    if "spam_mb" in do:
        threading.Thread(target=spam, args=(do["spam_mb"],), daemon=True).start()
    port = int(ARGV[ARGV.index("--port") + 1])
    Server(("127.0.0.1", port), do).serve_forever()


def tick(do: dict[str, Any]) -> None:
    end = time.monotonic() + do.get("load_s", 0)
    while time.monotonic() < end:
        out("loading ...")
        time.sleep(do["load_line_every_s"])


def eat(do: dict[str, Any]) -> None:
    (Path(do["in_group"]) / "cgroup.procs").write_text(str(os.getpid()))
    bytearray(do["eat_mb"] * 1024 * 1024)


def spam(megabytes: int) -> None:
    block = ("x" * 127 + "\n") * 8192
    for _ in range(megabytes):
        sys.stdout.write(block)
    sys.stdout.write("the last line of the spam\n")
    sys.stdout.flush()


def serve_vgpu() -> None:
    do = behaviour()
    port = 50000 + os.getpid() % 1000
    if not do.get("vgpu_silent"):
        out("fn:vgpu:listening " + json.dumps({"host": "127.0.0.1", "port": port}))
    threading.Event().wait()


if ROLE == "server":
    serve_model()
else:
    serve_vgpu()
