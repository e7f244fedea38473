"""The real llama-server agrees with what the inspection says, and runs what the synthesis writes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from model_variants import ABORTING, ACCEPTED, REFUSED, Case, draft

from flashnext.model.synth import SynthRequest, SynthResult, synthesise
from flashnext.model.synth_data import Weights
from flashnext.model.synth_tokenizer import tokenizer

pytestmark = pytest.mark.native

# One case a kind of key is enough here; the unit tests have them all.
_SEEN: set[str] = set()


def _one_a_kind(cases: list[Case]) -> list[Case]:
    chosen = []
    for case in cases:
        kind = " ".join(case.ids)
        if kind not in _SEEN:
            chosen.append(case)
        _SEEN.add(kind)
    return chosen


class Server:
    """One llama-server on a free loopback port."""

    def __init__(self, folder: Path, model: Path, log: Path, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        argv = [
            str(folder / "llama-server"),
            "-m",
            str(model),
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
        ]
        argv += ["-t", "1", "-c", "1024", "-np", "1", "--fit", "off", *options]
        env = {"LD_LIBRARY_PATH": str(folder), "PATH": os.environ["PATH"], "GGML_NO_BACKTRACE": "1"}
        self.log = log
        with log.open("wb") as stream:
            self.child = subprocess.Popen(argv, env=env, stdout=stream, stderr=stream)

    def outcome(self) -> str:
        """`loads`, `refuses` (exit code) or `aborts` (signal)."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            code = self.child.poll()
            if code is not None:
                return "aborts" if code < 0 else "refuses"
            with contextlib.suppress(urllib.error.URLError, OSError), self._open("/health") as reply:
                if reply.status == 200:
                    return "loads"
            time.sleep(0.05)
        raise TimeoutError(self.log.read_text(errors="replace")[-2000:])

    def _open(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data)
        request.add_header("Content-Type", "application/json")
        return urllib.request.urlopen(request, timeout=60)

    def post(self, path: str, body: Any) -> Any:
        with self._open(path, body) as reply:
            return json.load(reply)

    def stop(self) -> None:
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGKILL)
        self.child.wait()


@contextlib.contextmanager
def serving(folder: Path, model: Path, log: Path, *options: str) -> Iterator[Server]:
    server = Server(folder, model, log, *options)
    try:
        yield server
    finally:
        server.stop()


def _outcome(native_build: Any, case: Case, tmp_path: Path) -> str:
    file = draft()
    case.change(file)
    model = file.write(tmp_path / "model.gguf")
    with serving(native_build.bin, model, tmp_path / "log") as server:
        return server.outcome()


@pytest.mark.parametrize("case", _one_a_kind(REFUSED), ids=str)
def test_refused_files_are_refused(case: Case, native_build: Any, tmp_path: Path) -> None:
    assert _outcome(native_build, case, tmp_path) == "refuses"


@pytest.mark.parametrize("case", ABORTING, ids=str)
def test_aborting_files_abort(case: Case, native_build: Any, tmp_path: Path) -> None:
    assert _outcome(native_build, case, tmp_path) == "aborts"


@pytest.mark.parametrize("case", ACCEPTED, ids=str)
def test_accepted_files_load(case: Case, native_build: Any, tmp_path: Path) -> None:
    assert _outcome(native_build, case, tmp_path) == "loads"


def _synth(out: Path, **options: Any) -> SynthResult:
    return synthesise(SynthRequest(out=out, **options), lambda _total: None, lambda _bytes: None)


def _greedy(native_build: Any, model: Path, tmp_path: Path, *options: str) -> str:
    body = {"prompt": "Hello, é 漢!", "n_predict": 48, "temperature": 0, "cache_prompt": False}
    with serving(native_build.bin, model, tmp_path / "log", *options) as server:
        assert server.outcome() == "loads"
        return str(server.post("/completion", body)["content"])


def test_a_shard_set_generates_what_the_single_file_does(native_build: Any, tmp_path: Path) -> None:
    single = _synth(tmp_path, kind="tiny")
    shards = _synth(tmp_path, kind="tiny", shards=5)
    assert len(shards.files) == 5
    text = _greedy(native_build, single.model, tmp_path)
    assert len(text) >= 48
    assert text.isascii()
    assert text.replace("\n", "").isprintable()
    assert _greedy(native_build, shards.model, tmp_path) == text
    assert _greedy(native_build, single.model, tmp_path, "-ub", "8", "-b", "16") == text


def test_the_markov_trunk_follows_its_successors(native_build: Any, tmp_path: Path) -> None:
    text = _greedy(native_build, _synth(tmp_path, kind="tiny", markov=True).model, tmp_path)
    words = tokenizer()
    following = Weights(0, words, markov=True).successors()
    token = words.tokens.index("!")
    expected = ""
    for _ in range(48):
        token = following[token]
        expected += words.tokens[token]
    assert text == expected.replace("Ġ", " ").replace("Ċ", "\n")


def test_the_demo_takes_the_qualified_numbers(native_build: Any, tmp_path: Path) -> None:
    model = _synth(tmp_path, kind="demo").model
    with serving(
        native_build.bin, model, tmp_path / "log", "-c", "32768", "-b", "4096", "-ub", "512"
    ) as server:
        assert server.outcome() == "loads"
        text = (
            "The quick brown fox. " * 100
        )  # 2,000 tokens: past the sparse threshold, more than one micro-batch
        reply = server.post("/completion", {"prompt": text, "n_predict": 8, "temperature": 0})
        assert reply["tokens_evaluated"] > 1500
        assert reply["tokens_predicted"] == 8


def test_the_tokenizer_round_trips_any_text_and_tools_can_be_called(
    native_build: Any, tmp_path: Path
) -> None:
    model = _synth(tmp_path, kind="tiny").model
    words = tokenizer()
    texts = [
        "the weather in Rome",
        "tab\tnew\nline \r\n",
        "é ñ 漢字 🎉 \u200b",
        '{"a": [1, 2]} <b>&amp;',
        "  two  ",
    ]
    tool = {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
        },
    }
    with serving(native_build.bin, model, tmp_path / "log", "--jinja") as server:
        assert server.outcome() == "loads"
        for text in texts:
            tokens = server.post("/tokenize", {"content": text})["tokens"]
            assert server.post("/detokenize", {"tokens": tokens})["content"] == text
        chat: dict[str, Any] = {
            "messages": [{"role": "user", "content": "Weather?"}],
            "max_tokens": 200,
            "tools": [{"type": "function", "function": tool}],
            "tool_choice": "required",
            "parallel_tool_calls": False,  # the model is random: it may never stop calling
            "seed": 1,
            "logit_bias": {str(words.tool_call): 20, str(words.end_of_turn): 30},
        }
        choice = server.post("/v1/chat/completions", chat)["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        call = choice["message"]["tool_calls"][0]
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
        chat["messages"] += [
            choice["message"],
            {"role": "tool", "tool_call_id": call["id"], "content": "sunny"},
        ]
        prompt = server.post("/apply-template", chat)["prompt"]
        assert "<tool_response>\nsunny\n</tool_response>" in prompt


@pytest.mark.parametrize("damage", ["missing", "second", "empty", "cut", "joined"])
def test_broken_sets_are_refused_by_the_server_too(damage: str, native_build: Any, tmp_path: Path) -> None:
    paths = draft().write_shards(tmp_path, 3)
    model = paths[0]
    if damage == "missing":
        paths[1].unlink()
    elif damage == "second":
        model = paths[1]
    elif damage == "empty":
        paths[1].write_bytes(b"")
    elif damage == "cut":
        paths[2].write_bytes(paths[2].read_bytes()[:-100])
    else:
        model = tmp_path / "joined.gguf"
        model.write_bytes(b"".join(path.read_bytes() for path in paths))
    with serving(native_build.bin, model, tmp_path / "log") as server:
        assert server.outcome() == "refuses"
