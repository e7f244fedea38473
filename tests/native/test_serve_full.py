"""The profile demo-full, served: expert cache, MTP head and transaction at the qualified numbers."""

from __future__ import annotations

import json
import random
import re
import shlex
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dashboards
import httpx
import pytest
from serve_home import Home, Running, until
from test_serve_demo import RealHome

from flashnext.builds import file_sha256
from flashnext.serve.metrics import parse

pytestmark = [pytest.mark.native, pytest.mark.timeout(180)]

LONG = 2400  # tokens; 2,048 new ones begin a transaction
TOPIC = [7, 11, 13, 17, 19, 23] * 20


class FullHome(RealHome):
    """Its server can be told to fail, once."""

    def fault_once(self, fault: str) -> None:
        """The first server that loads a model has this fault armed. `flashnext serve` itself passes no such
        variable on, so a script in the place of the program does it; the record is made to fit the script."""
        (folder,) = (self.root / "data/flashnext/builds").iterdir()
        build = folder.resolve()
        folder.unlink()
        shutil.copytree(build, folder, symlinks=True)
        program = folder / "bin/llama-server"
        armed = shlex.quote(str(self.root / "armed"))
        program.write_text(
            "#!/bin/sh\n"
            f'case "$1" in --model) if mkdir {armed} 2>/dev/null; then\n'
            f"    export LLAMA_PHASE_PREFILL_FAULT={fault}; fi;; esac\n"
            f'exec {shlex.quote(str(build / "bin/llama-server"))} "$@"\n'
        )
        record = json.loads((folder / "build.json").read_text())
        record["binaries"][program.name]["size_bytes"] = program.stat().st_size
        record["binaries"][program.name]["sha256"] = file_sha256(program)
        (folder / "build.json").write_text(json.dumps(record))


@pytest.fixture
def home(tmp_path: Path, native_build: Any) -> Iterator[FullHome]:
    made = FullHome(tmp_path, native_build.root)
    yield made
    made.close()


def ask(running: Running, prompt: list[int], n_predict: int = 16, timeout_s: float = 60.0) -> httpx.Response:
    body = {"prompt": prompt, "n_predict": n_predict, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"http://127.0.0.1:{running.port}/completion", json=body, timeout=timeout_s)


def metrics(running: Running) -> dict[str, float]:
    return parse(httpx.get(f"http://127.0.0.1:{running.port}/metrics", timeout=30).text)


def tokens(seed: int, count: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(256) for _ in range(count)]


def markers(home: Home, event: str) -> int:
    (log,) = (home.root / "state").rglob("serve-*.log")
    return len(re.findall(rf"fn:phase:{event} ", log.read_text()))


def test_everything_of_the_qualified_configuration(home: FullHome) -> None:
    running = home.serve(profile=Path("demo-full"))
    state = running.until_state("ready", timeout_s=90)
    assert Path(state["model"]).name == "flashnext-demo.gguf" and Path(state["model"]).is_file()
    assert Path(state["head"]).name == "mtp-flashnext-demo-shared-Q8_0.gguf" and Path(state["head"]).is_file()
    assert {"expert-cache", "mtp-qwen4exp", "phase-prefill"} <= set(state["features"])

    # before ready it was rehearsed once; the other ready checks and short prompts begin nothing
    assert (markers(home, "begin"), markers(home, "end")) == (1, 1)
    assert ask(running, tokens(1, 200)).status_code == 200
    assert (markers(home, "begin"), markers(home, "end")) == (1, 1)
    # a prompt above the limit has one begin and one end, an edit of its last tokens none
    answer = ask(running, tokens(2, LONG))
    assert answer.status_code == 200 and answer.json()["tokens_predicted"] == 16
    assert (markers(home, "begin"), markers(home, "end")) == (2, 2)
    assert ask(running, tokens(2, LONG)[:-10]).status_code == 200
    assert (markers(home, "begin"), markers(home, "end")) == (2, 2)

    before = metrics(running)
    for turn in range(3):
        assert ask(running, [*TOPIC, turn], 24).status_code == 200
        after = metrics(running)
        assert after["fn_expert_cache_hits_total"] > before["fn_expert_cache_hits_total"] > 0
        before = after
    assert after["fn_phase_begins_total"] == after["fn_phase_ends_total"] == 2
    drafted = after["llamacpp:spec_decode_num_draft_tokens_total"]
    assert after["llamacpp:spec_decode_num_accepted_tokens_total"] < drafted > 50, "a random head"
    assert ask(running, TOPIC, 220).status_code == 200
    until(lambda: running.state()["counters"].get("drafts", 0) >= 500, "500 drafts in the state")
    assert not [w for w in running.state()["warnings"] if "acceptance" in w], "random heads guess nothing"

    series_of_the_board(running)
    a_client_that_leaves(running)
    running.signal(signal.SIGTERM)
    assert running.end() == 143
    home.nothing_left()


def series_of_the_board(running: Running) -> None:
    """What board and alert rules ask of llama-server comes through the control port, labels and all."""
    text = httpx.get(running.state()["control"] + "/metrics", timeout=10).text
    there = set(re.findall(r"^([a-z][\w:]+)[{ ]", text, re.MULTILINE))
    used = {name for name in dashboards.names() if name.startswith(("fn_", "llamacpp:"))}
    assert len(used) > 12 and used - there == set()
    assert re.search(r'^fn_expert_cache_hits_total\{device="RPC1"\} \d', text, re.MULTILINE)


def a_client_that_leaves(running: Running) -> None:
    """Is noticed although the supervisor asks about the slots all the time."""
    made = "llamacpp:tokens_predicted_total"
    before = metrics(running)[made]
    with pytest.raises(httpx.ReadTimeout):
        ask(running, TOPIC, 4000, timeout_s=4.0)
    left = time.monotonic()
    until(lambda: running.state()["counters"].get("busy") == 0, "an idle server", 15)
    print(f"idle {time.monotonic() - left:.1f} s after the client left")
    assert metrics(running)[made] - before < 3000


def test_lean_prefill_instead_of_the_transaction(home: FullHome) -> None:
    running = home.serve(profile=Path("demo-lean"))
    state = running.until_state("ready", timeout_s=90)
    assert {"lean-prefill", "expert-cache", "mtp-qwen4exp"} <= set(state["features"])
    assert (state["counters"]["lean_chunk"], state["counters"]["lean_lent"]) == (4096, 0)
    assert state["lean"].startswith("chunk 4,096 (")
    before = metrics(running)
    answer = ask(running, tokens(2, LONG))
    assert answer.status_code == 200 and answer.json()["tokens_predicted"] == 16
    after = metrics(running)
    assert after["fn_lean_tokens_total"] - before["fn_lean_tokens_total"] > LONG - 32
    assert after["fn_lean_reserves_total"] == 0
    assert (markers(home, "begin"), markers(home, "end")) == (0, 0)
    running.signal(signal.SIGTERM)
    assert running.end() == 143
    home.nothing_left()


def test_failed_transition_is_an_error_and_a_restart(home: FullHome) -> None:
    home.fault_once("begin:2")  # after the rehearsal
    running = home.serve(profile=Path("demo-full"))
    running.until_state("ready", timeout_s=90)
    answer = ask(running, tokens(3, LONG))
    assert answer.status_code == 503
    assert answer.json()["error"]["message"].startswith("fn-phase-failed: quiesce: ")
    state = running.until_state("backoff", "starting")
    reason = next(t["reason"] for t in state["transitions"] if t["state"] == "backoff")
    assert "(exit code 75); the memory transaction failed: quiesce" in reason
    state = running.until_state("ready", timeout_s=60)
    assert state["restarts"] == 1
    assert ask(running, tokens(3, LONG)).status_code == 200
    # two rehearsals, the one that failed, and the same prompt again
    assert (markers(home, "begin"), markers(home, "end"), markers(home, "failed")) == (3, 3, 1)
    running.signal(signal.SIGTERM)
    assert running.end() == 143
    home.nothing_left()


def test_failed_rehearsal_is_never_ready(home: FullHome) -> None:
    home.fault_once("begin:1")
    running = home.serve(profile=Path("demo-full"))
    assert running.end(90) == 8
    assert "error[server-start-failed]" in running.err
    assert "ready check: a completion was answered with 503" in running.err
    assert "fn-phase-failed: quiesce" in running.err
    assert "ready" not in [t["state"] for t in running.state()["transitions"]]
    home.nothing_left()


def test_refusal_is_not_retried(home: FullHome) -> None:
    home.fault_once("explode:1")
    running = home.serve(profile=Path("demo-full"))
    assert running.end(90) == 4
    assert 'LLAMA_PHASE_PREFILL_FAULT is "explode:1", expected' in running.err
    assert running.state()["restarts"] == 0
    home.nothing_left()
