"""How a service starts, is watched, restarts and ends: the real supervisor over a fake server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from serve_home import FakeHome, Running, free_port, until

from flashnext.loopback import Reply, request

pytestmark = pytest.mark.timeout(90)


def reasons(running: Running) -> str:
    return "\n".join(f"{t['state']}: {t['reason']}" for t in running.state()["transitions"])


# --- ready, and every way to end -------------------------------------------------------------------


def test_ready_prints_one_line_with_the_url(home: FakeHome) -> None:
    running = home.serve()
    state = running.until_state("ready")
    assert len(state["children"]) == 3
    running.signal(signal.SIGINT)
    assert running.end() == 130
    assert running.out == f"http://127.0.0.1:{running.port}/v1\n"
    assert running.state()["state"] == "stopped"
    home.nothing_left()


def test_environment_and_flags_of_the_children(home: FakeHome) -> None:
    home.env |= {"LLAMA_ARG_CTX_SIZE": "1", "LLAMA_API_KEY": "x", "GGML_RPC_DEBUG": "1", "HF_TOKEN": "secret"}
    running = home.serve()
    running.until_state("ready")
    for role in ("server", "vgpu"):
        for launch in home.launches(role):
            env = launch["env"]
            assert not [k for k in env if k.startswith(("LLAMA_ARG", "GGML", "HF_", "LLAMA_API"))]
            assert not list(Path(env["XDG_CONFIG_HOME"]).iterdir())
    assert home.launches("server")[0]["env"]["LLAMA_ATTN_ROT_DISABLE"] == "1"


@pytest.mark.parametrize("moment", ["starting", "warming", "ready"])
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_stopped_at_any_moment_leaves_nothing(home: FakeHome, moment: str, number: int, code: int) -> None:
    home.behave({"starting": {"load_s": 60}, "warming": {"at_request": 2, "hang": True}, "ready": {}}[moment])
    running = home.serve(profile=home.profile(life={"check_limit_s": 60}))
    running.until_state(moment)
    running.signal(number)
    assert running.end() == code
    home.nothing_left()


def test_nohup_outlives_its_terminal(home: FakeHome) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does for what it starts
    try:
        running = home.serve()
    finally:
        signal.signal(signal.SIGHUP, before)
    running.until_state("ready")
    running.signal(signal.SIGHUP)
    running.signal(signal.SIGTERM)
    assert running.end() == 143, "by what came after it"
    home.nothing_left()


@pytest.mark.parametrize("moment", ["starting", "ready"])
def test_a_reader_that_leaves_does_not_end_the_service(home: FakeHome, moment: str) -> None:
    """`flashnext serve ... 2>&1 | head`: it serves, restarts and stops."""
    home.behave({"load_s": 2})
    running = home.serve("--verbose")
    running.until_state(moment)
    for stream in (running.process.stdout, running.process.stderr):
        assert stream is not None
        stream.close()
    children = running.until_state("ready")["children"]
    os.kill(next(c["pid"] for c in children if c["name"] == "server"), signal.SIGKILL)
    until(lambda: running.state()["restarts"] == 1, "a restart")
    running.until_state("ready")
    running.signal(signal.SIGTERM)
    assert running.process.wait(timeout=20) == 143
    assert running.state()["state"] == "stopped"
    home.nothing_left()


@pytest.mark.parametrize("moment", ["starting", "warming"])
def test_ctrl_c_before_ready_is_quick_even_with_a_stubborn_server(home: FakeHome, moment: str) -> None:
    wait = {"load_s": 60} if moment == "starting" else {"at_request": 1, "hang": True}
    home.behave({**wait, "ignore_term": True})
    running = home.serve(profile=home.profile(life={"stop_limit_s": 60, "check_limit_s": 60}))
    running.until_state(moment)
    begin = time.monotonic()
    running.signal(signal.SIGINT)
    assert running.end() == 130
    assert time.monotonic() - begin < 3.0, "a second for the server, and a busy machine"
    home.nothing_left()


@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0])
def test_ctrl_c_before_anything_is_up(home: FakeHome, delay_s: float) -> None:
    home.behave({"load_s": 60})
    running = home.serve()
    time.sleep(delay_s)
    running.signal(signal.SIGINT)
    code = running.end()
    assert code in (130, -signal.SIGINT), running.err
    home.nothing_left()


@pytest.mark.parametrize("moment", ["starting", "ready"])
def test_killed_supervisor_takes_its_children_along(home: FakeHome, moment: str) -> None:
    home.behave({"load_s": 60} if moment == "starting" else {})
    running = home.serve()
    running.until_state(moment)
    until(lambda: len(home.processes()) == 4, "supervisor and three children")
    running.signal(signal.SIGKILL)
    assert running.end() == -signal.SIGKILL
    home.nothing_left()
    status = home.run("status", "--json")
    (service,) = json.loads(status.stdout)
    assert (status.returncode, service["state"], service["alive"]) == (8, "killed", False)
    assert (
        f"  killed  {service['url']}  the supervisor was killed; it was {moment}" in home.run("status").stdout
    )


def test_a_stubborn_server_is_killed_on_schedule(home: FakeHome) -> None:
    home.behave({"ignore_term": True})
    running = home.serve()
    running.until_state("ready")
    begin = time.monotonic()
    running.signal(signal.SIGTERM)
    assert running.end() == 143
    assert 2.5 < time.monotonic() - begin < 8, "life.stop_limit_s is 3 here"
    home.nothing_left()


def test_a_second_ctrl_c_hurries(home: FakeHome) -> None:
    home.behave({"ignore_term": True})
    running = home.serve(profile=home.profile(life={"stop_limit_s": 60}))
    running.until_state("ready")
    running.signal(signal.SIGINT)
    running.until_state("stopping")
    begin = time.monotonic()
    time.sleep(0.2)
    running.signal(signal.SIGINT)
    assert running.end() == 130
    assert time.monotonic() - begin < 5
    home.nothing_left()


# --- refusals before anything is launched ----------------------------------------------------------


def test_port_in_use_names_the_holder(home: FakeHome) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        running = home.serve(port=holder.getsockname()[1])
        assert running.end() == 11
    assert "error[port-in-use]" in running.err
    assert f"held by pid {os.getpid()}" in running.err
    assert home.launches("vgpu") == []


def test_two_services_on_one_port(home: FakeHome) -> None:
    first = home.serve()
    first.until_state("ready")
    second = home.serve(port=first.port)
    assert second.end() == 11
    assert "error[already-serving]" in second.err and f"pid {first.process.pid}" in second.err
    assert len(home.launches("server")) == 1
    assert first.state()["state"] == "ready"


def test_lock_of_a_dead_process_is_ignored(home: FakeHome) -> None:
    first = home.serve()
    first.until_state("ready")
    first.signal(signal.SIGKILL)
    first.end()
    home.nothing_left()
    second = home.serve(port=first.port)
    second.until_state("ready")


def test_leftover_of_a_killed_supervisor_is_named(home: FakeHome) -> None:
    first = home.serve()
    state = first.until_state("ready")
    first.signal(signal.SIGKILL)
    first.end()
    home.nothing_left()
    stray = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        child = {"name": "server", "pid": stray.pid, "started": psutil.Process(stray.pid).create_time()}
        file = home.root / "state/flashnext/serve" / str(first.port) / "state.json"
        file.write_text(json.dumps({**state, "children": [child]}))
        second = home.serve(port=first.port)
        assert second.end() == 4
        assert "error[leftover-processes]" in second.err and f"pid {stray.pid}: server" in second.err
    finally:
        stray.kill()
        stray.wait()


def test_no_build(home: FakeHome) -> None:
    (home.root / "data/flashnext/builds/fakebuild/build.json").unlink()
    done = home.run("serve", "--profile", "demo", "--port", str(free_port()))
    assert done.returncode == 4
    assert "error[no-build]" in done.stderr and "hint: run `flashnext build`" in done.stderr


def test_build_of_another_series(home: FakeHome) -> None:
    home.install(series_hash="f" * 64)
    done = home.run("serve", "--profile", "demo", "--port", str(free_port()))
    assert done.returncode == 4
    assert "error[no-build]" in done.stderr and "series ffffffffffff" in done.stderr


@pytest.mark.parametrize(
    ("stamp", "words"),
    [
        ("", "carries no stamp"),
        ("flashnext: version 0.1.0, series abc123, features x", "built from series abc123"),
    ],
)
def test_binary_without_our_stamp(home: FakeHome, stamp: str, words: str) -> None:
    home.behave({"stamp": stamp})
    done = home.run("serve", "--profile", "demo", "--port", str(free_port()))
    assert done.returncode == 4
    assert "error[build-unfit]" in done.stderr and words in done.stderr
    assert home.launches("server") == []


def test_a_damaged_program_is_refused_and_never_run(home: FakeHome) -> None:
    program = home.root / "data/flashnext/builds/fakebuild/bin/llama-server"
    program.write_text(program.read_text().replace("exec", "EXEC"))  # of the same size
    done = home.run("serve", "--profile", "demo", "--port", str(free_port()))
    assert done.returncode == 4
    assert "error[build-unfit]" in done.stderr and "bin/llama-server: sha256" in done.stderr
    assert "ended with" not in done.stderr and home.launches("server") == []


def test_feature_that_the_build_lacks(home: FakeHome) -> None:
    home.install(features={"build-stamp": "0", "fn-vgpu": "0"})
    file = home.profile(expert_cache={"slots": 8})
    running = home.serve(profile=file)
    assert running.end() == 4
    assert "lacks the feature expert-cache" in running.err and "test.yaml:" in running.err


def test_renamed_flag_is_a_configuration_error(home: FakeHome) -> None:
    home.behave({"help_without": ["--no-repack"]})
    running = home.serve()
    assert running.end() == 3
    assert "error[profile-flags]" in running.err and "--no-repack" in running.err
    assert home.launches("vgpu") == []


def test_qualified_profile_without_its_devices(home: FakeHome) -> None:
    begin = time.monotonic()
    done = home.run("serve", "--profile", "2x3090", "--port", str(free_port()))
    assert time.monotonic() - begin < 10
    assert done.returncode == 4
    for words in (
        "[host-not-qualified] no CUDA device",
        "[no-build] no cuda build",
        "[model-files]",
        "00004-of-00004",
    ):
        assert words in done.stderr, done.stderr
    assert home.launches("server") == []


CARD_0 = "0, GPU-a, NVIDIA GeForce RTX 3090, 8.6, 24124, 550\\n"
CARD_1 = "1, GPU-b, NVIDIA GeForce RTX 3090, 8.6, 24124, 550\\n"
SMI = """#!/bin/sh
case "$*" in
*memory.used*) printf '%s' ;;
*) printf '%s' ;;
esac
"""


@pytest.mark.parametrize(
    ("cards", "used", "words"),
    [
        (
            CARD_0,
            "0, 300\\n",
            "2 devices required, 1 visible",
        ),
        (
            CARD_0 + CARD_1.replace("3090", "3060"),
            "0, 300\\n1, 300\\n",
            "device 1 (NVIDIA GeForce RTX 3060) is no RTX 3090",
        ),
        (
            CARD_0 + CARD_1,
            "0, 300\\n1, 2500\\n",
            "2500 MiB of device 1 (NVIDIA GeForce RTX 3090) are in use already, allowed are 1200",
        ),
    ],
)
def test_devices_that_are_not_the_profiles(home: FakeHome, cards: str, used: str, words: str) -> None:
    tools = home.root / "tools"
    tools.mkdir()
    smi = tools / "nvidia-smi"
    smi.write_text(SMI % (used, cards))
    smi.chmod(0o755)
    home.env["PATH"] = f"{tools}:{home.env['PATH']}"
    done = home.run("serve", "--profile", "2x3090", "--port", str(free_port()))
    assert done.returncode == 4
    assert words in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (r"blk\.\d+\.ffn_(gate|up|down)_expz\.weight", "matches no tensor of the model; the model has blk."),
        (r"blk\.[01]\.ffn_(gate|up|down)_exps", "expert tensors are covered by no rule, e.g. blk.2"),
    ],
)
def test_placement_rule_that_misses(home: FakeHome, pattern: str, words: str) -> None:
    file = home.profile()
    file.write_text(file.read_text().replace(r"blk\.\d+\.ffn_(gate|up|down)_exps\.weight", pattern))
    running = home.serve(profile=file)
    assert running.end() == 3
    assert "error[placement-unfit]" in running.err and words in running.err, running.err
    assert home.launches("vgpu") == []


def test_context_beyond_the_model_is_refused(home: FakeHome) -> None:
    running = home.serve(profile=home.profile(context={"size": 8192}))
    assert running.end() == 3
    assert "error[context-too-long]" in running.err and "8192 tokens, the model has 4096" in running.err


def test_a_cut_synthetic_model_is_written_again(home: FakeHome) -> None:
    model = home.root / "data/flashnext/models/flashnext-tiny.gguf"
    assert home.run("model", "synth", "tiny", "--out", str(model)).returncode == 0
    whole = model.read_bytes()
    for length in (len(whole) // 2, 100, 0):
        with model.open("r+b") as stream:
            stream.truncate(length)
        running = home.serve()
        running.until_state("ready")
        running.signal(signal.SIGTERM)
        assert running.end() == 143
        assert model.read_bytes() == whole


def test_model_that_llama_server_would_abort_on(home: FakeHome) -> None:
    model = home.root / "cut.gguf"
    assert home.run("model", "synth", "tiny", "--out", str(model)).returncode == 0
    with model.open("r+b") as stream:
        stream.truncate(model.stat().st_size // 2)
    running = home.serve("--model", str(model))
    assert running.end() == 4
    assert "error[model-problems]" in running.err and "cut.gguf" in running.err
    assert home.launches("vgpu") == []


def test_partial_download_is_named_and_nothing_is_fetched(home: FakeHome) -> None:
    folder = home.root / "models"
    folder.mkdir()
    (folder / "Qwen3.8-Flash-Next-UD-Q4_K_XL-00002-of-00004.gguf.incomplete").touch()
    model = folder / "Qwen3.8-Flash-Next-UD-Q4_K_XL-00001-of-00004.gguf"
    done = home.run("serve", "--profile", "2x3090", "--model", str(model), "--port", str(free_port()))
    assert done.returncode == 4
    assert "only a partial download is there (Qwen3.8-Flash-Next-UD-Q4_K_XL-00002" in done.stderr


def test_driver_that_comes_up_late_is_waited_for(home: FakeHome) -> None:
    tools = home.root / "tools"
    tools.mkdir()
    smi = tools / "nvidia-smi"
    count = home.root / "count"
    late = f"echo x >> {count}\n[ $(wc -l < {count}) -gt 3 ] || {{ echo no driver; exit 9; }}\n"
    smi.write_text((SMI % ("0, 300\\n1, 300\\n", CARD_0 + CARD_1)).replace("case", f"{late}case", 1))
    smi.chmod(0o755)
    home.env["PATH"] = f"{tools}:{home.env['PATH']}"
    done = home.run("serve", "--profile", "2x3090", "--port", str(free_port()))
    assert done.returncode == 4
    assert "no CUDA device" not in done.stderr and "[no-build]" in done.stderr


def test_hashes_on_request(home: FakeHome) -> None:
    folder = home.root / "data/flashnext/models"
    assert home.run("model", "synth", "tiny").returncode == 0
    size = (folder / "flashnext-tiny.gguf").stat().st_size
    file = home.profile()
    wrong = {"name": "flashnext-tiny.gguf", "size_bytes": size, "sha256": "0" * 64}
    data = yaml.safe_load(file.read_text())
    data["model"] = {"path": "flashnext-tiny.gguf", "files": [wrong]}
    file.write_text(yaml.safe_dump(data))
    running = home.serve("--sha256", profile=file)
    assert running.end() == 4
    assert "error[model-files]" in running.err and f"the profile's file has {'0' * 64}" in running.err
    home.serve(profile=file).until_state("ready")


def test_refusal_of_the_native_code_is_not_retried(home: FakeHome) -> None:
    reason = "150 slots need 9 bytes, 5 are free: 83 would fit"
    line = f'0.00.078.961 E fn:cache:refused {{"reason":"{reason}"}}'
    home.behave({"lines": [[0.1, line]], "load_s": 60, "exit_after_s": 0.3})
    running = home.serve()
    assert running.end() == 4
    assert f"error[host-not-qualified]: the expert cache cannot be had: {reason}" in running.err
    assert len(home.launches("server")) == 1


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A memory control group of 100 MiB, where this machine lets us have one."""
    group = Path(f"/sys/fs/cgroup/memory/flashnext-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(100 * 1024 * 1024))
    except OSError as error:
        pytest.skip(f"no memory control group (v1) can be made: {error}")
    yield group
    with contextlib.suppress(OSError):
        group.rmdir()


@pytest.mark.parametrize("moment", ["starting", "ready"])
def test_what_the_kernel_kills_for_memory_is_named_and_not_tried_again(
    home: FakeHome, small_group: Path, moment: str
) -> None:
    home.behave({"eat_mb": 400, "in_group": str(small_group), "load_s": 60 if moment == "starting" else 0})
    running = home.serve()
    assert running.end(30) == 8
    assert "was killed from outside" in running.err and "killed a process for want of memory" in running.err
    assert "hint: free host memory" in running.err
    assert len(home.launches()) == 1
    home.nothing_left()


# --- trouble before ready: one try -----------------------------------------------------------------


def test_model_that_fails_to_load(home: FakeHome) -> None:
    home.behave({"exit_now": "model", "exit_code": 1})
    running = home.serve()
    assert running.end() == 8
    assert "error[server-start-failed]: server gave up with code 1" in running.err
    assert "the model cannot be read" in running.err and "log: " in running.err
    assert len(home.launches("server")) == 1
    assert running.state()["state"] == "fatal"
    home.nothing_left()


def test_rejected_argument_is_a_profile_error(home: FakeHome) -> None:
    home.behave({"exit_now": "argument"})
    running = home.serve()
    assert running.end() == 3
    assert "error[profile-flags]" in running.err
    assert len(home.launches("server")) == 1


@pytest.mark.parametrize(
    ("number", "words"),
    [(6, "aborted itself"), (9, "was killed from outside"), (11, "crashed"), (15, "was asked to stop")],
)
def test_four_ways_to_die_have_four_texts(home: FakeHome, number: int, words: str) -> None:
    home.behave({"exit_after_s": 0.3, "load_s": 60, "signal": number})
    running = home.serve()
    assert running.end() == 8
    assert words in running.err
    home.nothing_left()


def test_degenerate_text_is_never_ready(home: FakeHome) -> None:
    home.behave({"text": "////////////"})
    running = home.serve()
    assert running.end() == 8
    assert "error[insane-text]: first check: degenerate text" in running.err
    assert "ready" not in [t["state"] for t in running.state()["transitions"]]
    assert running.out == ""


def test_death_at_the_second_request_is_never_ready(home: FakeHome) -> None:
    home.behave({"at_request": 2, "exit_code": 134})
    running = home.serve()
    assert running.end() == 8
    assert "ready" not in [t["state"] for t in running.state()["transitions"]]


def test_loading_without_progress_ends(home: FakeHome) -> None:
    home.behave({"load_s": 60})
    running = home.serve(profile=home.profile(life={"load_limit_s": 2}))
    assert running.end() == 8
    assert "loading showed no progress for 2 s" in running.err


def test_slow_loading_with_progress_survives(home: FakeHome) -> None:
    home.behave({"load_s": 5, "load_line_every_s": 0.5})
    running = home.serve(profile=home.profile(life={"load_limit_s": 2}))
    running.until_state("ready")


def test_ready_check_waits_behind_clients_of_a_server_that_moves(home: FakeHome) -> None:
    home.behave({"queue_s": 4})
    running = home.serve(profile=home.profile(life={"check_limit_s": 1}))
    running.until_state("ready")
    assert len(home.launches("server")) == 1


def test_ready_check_without_an_answer_or_movement_fails(home: FakeHome) -> None:
    home.behave({"hang_all_after": 2})
    running = home.serve(profile=home.profile(life={"check_limit_s": 1}))
    assert running.end() == 8
    assert "ready check: no answer to a completion" in running.err


def test_virtual_gpu_that_does_not_come_up(home: FakeHome) -> None:
    home.behave({"vgpu_silent": True})
    running = home.serve()
    assert running.end(40) == 8
    assert "vgpu0, vgpu1 did not announce a port" in running.err
    assert home.launches("server") == []
    home.nothing_left()


def with_transaction(home: FakeHome) -> Path:
    numbers = {"micro_batch": 2048, "min_tokens": 2048}
    return home.profile(expert_cache={"slots": 8}, mtp={"synthetic": True}, phase_prefill=numbers)


def test_a_transaction_is_rehearsed_before_ready(home: FakeHome) -> None:
    running = home.serve(profile=with_transaction(home))
    counters = running.until_state("ready")["counters"]
    assert (counters["marker phase:begin"], counters["marker phase:end"]) == (1, 1)
    assert home.launches()[0]["env"]["LLAMA_PHASE_PREFILL_REHEARSE"] == "1"


def test_the_chunk_of_lean_prefill_is_shown(home: FakeHome) -> None:
    tried = [
        {"chunk": 4096, "lent": False, "fits": False, "why": "VGPU0: full"},
        {"chunk": 2048, "fits": True},
    ]
    data = {"chunk": 2048, "requested": "auto", "lent": False, "tried": tried}
    home.behave({"lines": [[0.0, f"fn:lean:attached {json.dumps(data)}"]]})
    running = home.serve(profile=home.profile(expert_cache={"slots": 8}, lean_prefill={"chunk": "auto"}))
    state = running.until_state("ready")
    told = "chunk 2,048 (auto), staged in memory of its own; did not fit: 4,096 (VGPU0: full)"
    assert state["lean"] == told
    address = ("127.0.0.1", int(state["control"].rpartition(":")[2]))
    assert request(address, "/status").data["lean"] == told
    assert f"  lean prefill: {told}\n" in home.run("status").stdout
    text = request(address, "/metrics").text
    assert "\nflashnext_lean_chunk_tokens 2048\n" in text and 'kind="lean' not in text


def test_no_rehearsal_without_the_transaction(home: FakeHome) -> None:
    running = home.serve()
    assert "marker phase:begin" not in running.until_state("ready")["counters"]
    assert not [name for name in home.launches()[0]["env"] if "REHEARSE" in name]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "its first prompt began and ended no transaction"),
        (["fn:phase:begin {}"], "its first prompt began and ended no transaction"),
        (["fn:phase:end {}"], "begin and end markers of the transaction do not match"),
        (['fn:phase:failed {"check":"reserve"}'], "the memory transaction failed: reserve"),
    ],
)
def test_a_rehearsal_that_fails_is_never_ready(home: FakeHome, lines: list[str], words: str) -> None:
    home.behave({"rehearsal": lines})
    running = home.serve(profile=with_transaction(home))
    assert running.end(60) == 8
    assert "error[server-start-failed]" in running.err and words in running.err
    assert "ready" not in [t["state"] for t in running.state()["transitions"]]
    home.nothing_left()


# --- trouble after ready: restarts within the rules ------------------------------------------------


def test_restarts_grow_their_pause_and_end(home: FakeHome) -> None:
    home.behave({"exit_after_s": 1.0, "signal": 11})
    running = home.serve()
    assert running.end(60) == 8
    assert "error[server-died]" in running.err and "SIGSEGV" in running.err
    starts = [launch["time"] for launch in home.launches("server")]
    assert len(starts) == 4, "one start and life.restarts of them"
    pauses = [b - a for a, b in pairwise(starts)]
    assert pauses[0] < pauses[1] < pauses[2]
    state = running.state()
    assert state["state"] == "fatal" and state["restarts"] == 3 and state["last_lines"]
    home.nothing_left()


@pytest.mark.parametrize("victim", ["server", "vgpu0", "vgpu1"])
def test_killed_child_comes_back(home: FakeHome, victim: str) -> None:
    running = home.serve()
    before = running.until_state("ready")
    pid = next(c["pid"] for c in before["children"] if c["name"] == victim)
    os.kill(pid, signal.SIGKILL)
    running.until_state("backoff", "starting")
    after = running.until_state("ready")
    assert not {c["pid"] for c in before["children"]} & {c["pid"] for c in after["children"]}
    assert after["restarts"] == 1
    assert f"{victim} was killed from outside" in reasons(running)


def test_a_restart_waits_for_a_port_that_was_taken_meanwhile(home: FakeHome) -> None:
    running = home.serve()
    before = running.until_state("ready")
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        os.kill(next(c["pid"] for c in before["children"] if c["name"] == "server"), signal.SIGKILL)

        def taken() -> bool:
            with contextlib.suppress(OSError):
                thief.bind(("127.0.0.1", running.port))
                thief.listen()
                return True
            return False

        until(taken, "the port")
        until(lambda: f"held by pid {os.getpid()}" in running.state()["reason"], "the holder's name")
        assert running.state()["state"] == "backoff"
    assert running.until_state("ready")["restarts"] == 1
    assert len(home.launches()) == 2


def test_a_port_taken_at_the_last_moment_is_tried_again(home: FakeHome) -> None:
    taken = {"lines": [[0.1, "E start: couldn't bind HTTP server socket"]], "load_s": 60, "exit_after_s": 0.3}
    home.behave([{"exit_after_s": 2, "signal": 9}, taken, {}])
    running = home.serve()
    running.until_state("ready")
    running.until_state("backoff")
    until(lambda: len(home.launches()) == 3, "a third start")
    assert running.until_state("ready")["restarts"] == 2


def test_a_log_that_cannot_be_written_is_a_warning(home: FakeHome) -> None:
    """RLIMIT_FSIZE does to the supervisor's files what a full disk does; the service goes on."""
    lines = {"lines": [[n / 5, f"line {n}"] for n in range(100)]}
    home.behave([{**lines, "exit_after_s": 4}, lines])
    running = home.serve()
    url = running.until_state("ready")["control"]
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    own = psutil.Process(running.process.pid)
    hard = own.rlimit(psutil.RLIMIT_FSIZE)[1]
    own.rlimit(psutil.RLIMIT_FSIZE, (1, hard))

    def status() -> dict[str, Any]:
        return dict(request(address, "/status").data)

    def lost() -> bool:
        return any(w.startswith("the log cannot be written: ") for w in status()["warnings"])

    until(lambda: lost() and status()["state"] == "ready", "a warning")
    until(lambda: status()["restarts"] == 1 and status()["state"] == "ready", "a restart with a full disk")
    own.rlimit(psutil.RLIMIT_FSIZE, (hard, hard))
    log = home.root / "state/flashnext/logs" / f"serve-{running.port}.log"
    size = log.stat().st_size
    until(lambda: log.stat().st_size > size, "lines again")


def test_device_lost_is_not_restarted(home: FakeHome) -> None:
    home.behave({"lines": [[2.0, "NVRM: GPU has fallen off the bus"]], "exit_after_s": 2.1})
    running = home.serve()
    running.until_state("ready")
    assert running.end() == 8
    assert "error[device-lost]" in running.err and "power supply" in running.err
    assert len(home.launches("server")) == 1


def test_cuda_error_with_a_hang_is_killed_and_restarted(home: FakeHome) -> None:
    stuck = {"lines": [[2.0, "CUDA error: out of memory"]], "ignore_term": True}
    home.behave([stuck, {}])
    running = home.serve()
    running.until_state("ready")
    running.until_state("backoff")
    running.until_state("ready")
    assert "device memory ran out, and the process did not end" in reasons(running)
    assert len(home.launches("server")) == 2


def test_busy_without_progress_is_restarted(home: FakeHome) -> None:
    home.behave([{"busy": True}, {}])
    running = home.serve(profile=home.profile(life={"no_progress_s": 3}))
    running.until_state("ready")
    running.until_state("backoff")
    running.until_state("ready")
    assert "no token and no prompt progress for 3 s" in reasons(running)


def test_insane_text_later_restarts_once_then_ends(home: FakeHome) -> None:
    home.behave({"text_after": [4, "////////////"]})
    running = home.serve(profile=home.profile(life={"text_check_s": 1}))
    assert running.end(60) == 8
    assert "error[insane-text]" in running.err
    assert len(home.launches("server")) == 2
    assert "degraded: degenerate text" in reasons(running)


def test_failed_native_marker_restarts(home: FakeHome) -> None:
    home.behave([{"lines": [[1.5, 'fn:phase:failed {"check":"generation"}']], "exit_after_s": 1.6}, {}])
    running = home.serve()
    running.until_state("ready")
    running.until_state("backoff")
    running.until_state("ready")
    assert "the memory transaction failed: generation" in reasons(running)


def test_transaction_that_never_ends_is_restarted(home: FakeHome) -> None:
    home.behave([{"lines": [[1.5, 'fn:phase:begin {"tokens":8192}']]}, {}])
    running = home.serve()
    running.until_state("ready")
    running.until_state("backoff", timeout_s=30)
    running.until_state("ready")
    assert "idle, and the transaction of the last prompt never ended" in reasons(running)


def test_two_begins_without_an_end_are_restarted(home: FakeHome) -> None:
    home.behave([{"lines": [[1.5, "fn:phase:begin {}"], [1.6, "fn:phase:begin {}"]]}, {}])
    running = home.serve()
    running.until_state("ready")
    running.until_state("backoff")
    assert "begin and end markers of the transaction do not match" in reasons(running)


def test_low_acceptance_is_a_warning(home: FakeHome) -> None:
    line = (
        "slot print_timing: draft acceptance = 0.01000 (    2 accepted /   200 generated), mean len =  1.03"
    )
    home.behave({"lines": [[0.5, line], [0.6, line], [0.7, line]]})
    running = home.serve()
    running.until_state("ready")
    until(lambda: running.state()["warnings"], "a warning")
    assert running.state()["warnings"][0].startswith("acceptance is 1.0% over 600 drafts")
    assert "warning: acceptance is" in home.run("status").stdout
    assert running.state()["state"] == "ready"


def test_acceptance_that_falls_with_depth_is_shown_and_no_alarm(home: FakeHome) -> None:
    line = "slot print_timing: draft acceptance = 0.20000 (  40 accepted /   200 generated), mean len =  1.60"
    home.behave({"lines": [[0.5 + n / 10, line] for n in range(3)]})
    running = home.serve()
    running.until_state("ready")
    until(lambda: running.state()["counters"].get("drafts") == 600, "600 drafts")
    assert running.state()["counters"]["acceptance"] == 0.2 and running.state()["warnings"] == []


def test_parse_failures_are_counted_and_nothing_else(home: FakeHome) -> None:
    line = "The model output does not match the expected format"
    home.behave({"lines": [[1.0 + n / 10, line] for n in range(5)]})
    running = home.serve()
    running.until_state("ready")
    until(lambda: running.state().get("counters", {}).get("parse-failure") == 5, "five counted")
    assert running.state()["state"] == "ready" and len(home.launches("server")) == 1


def test_flood_of_output_stays_within_the_cap(home: FakeHome) -> None:
    home.behave({"spam_mb": 200})
    running = home.serve()
    running.until_state("ready")
    log = home.root / "state/flashnext/logs" / f"serve-{running.port}.log"

    def tail() -> bytes:
        with contextlib.suppress(FileNotFoundError), log.open("rb") as stream:  # it moves at the cap
            stream.seek(max(0, log.stat().st_size - 400))
            return stream.read()
        return b""

    until(lambda: b"the last line of the spam" in tail(), "the flood's end", 60)
    assert sum(f.stat().st_size for f in log.parent.iterdir()) <= 33 * 1024 * 1024
    running.signal(signal.SIGTERM)
    assert running.end() == 143


# --- status, stop, logs, print-command -------------------------------------------------------------


def test_status_stop_and_logs(home: FakeHome) -> None:
    assert home.run("status").returncode == 8
    assert home.run("stop").returncode == 2
    running = home.serve()
    running.until_state("ready")
    status = home.run("status", "--json")
    assert status.returncode == 0
    (service,) = json.loads(status.stdout)
    assert service["alive"] and service["state"] == "ready" and service["port"] == running.port
    assert "ready" in home.run("status").stdout
    assert "vgpu0| fn:vgpu:listening" in home.run("logs").stdout
    stopped = home.run("stop", "--json")
    assert (stopped.returncode, json.loads(stopped.stdout)["port"]) == (0, running.port)
    assert running.end() == 143
    assert "stopped by SIGTERM" in home.run("status").stdout
    home.nothing_left()


def test_stop_asks_which(home: FakeHome) -> None:
    first, second = home.serve(), home.serve()
    first.until_state("ready")
    second.until_state("ready")
    unclear = home.run("stop")
    assert unclear.returncode == 2 and "name one" in unclear.stderr
    assert home.run("stop", "--port", str(second.port)).returncode == 0
    assert second.end() == 143
    assert first.state()["state"] == "ready"


def test_print_command_launches_nothing(home: FakeHome) -> None:
    done = home.run("serve", "--profile", "demo", "--print-command", "--json")
    assert done.returncode == 0, done.stderr
    names = [p["name"] for p in json.loads(done.stdout)]
    assert names == ["vgpu0", "vgpu1", "server"]
    text = home.run("serve", "--profile", "demo", "--print-command").stdout
    assert "env -i " in text and "'blk" in text, "shell-quoted"
    assert home.launches("server") == [] and not (home.root / "data/flashnext/models").exists()


def test_print_command_with_a_free_port(home: FakeHome) -> None:
    done = home.run("serve", "--profile", "demo", "--port", "0", "--print-command", "--json")
    argv = json.loads(done.stdout)[2]["argv"]
    assert int(argv[argv.index("--port") + 1]) not in (0, 8080)


def test_records_of_ended_services_are_few(home: FakeHome) -> None:
    running = home.serve()
    state = running.until_state("ready")
    live = running.port
    serve, logs = home.root / "state/flashnext/serve", home.root / "state/flashnext/logs"
    gone = {"pid": 2**22 - 1, "started": 1.0, "name": "flashnext"}
    for port in range(1, 30):
        (serve / str(port)).mkdir()
        old = {
            **state,
            "port": port,
            "supervisor": gone,
            "children": [],
            "started": f"2020-01-{port:02}T00:00:00Z",
        }
        (serve / str(port) / "state.json").write_text(json.dumps(old))
        (logs / f"serve-{port}.log").touch()
        (logs / f"serve-{port}.log.1").touch()
    second = home.serve()
    second.until_state("ready")
    kept = {int(entry.name) for entry in serve.iterdir()}
    assert kept == {*range(10, 30), live, second.port}, "the last 20, and what lives"
    assert {int(f.name.split("-")[1].split(".")[0]) for f in logs.iterdir()} == kept


def test_single_requests_are_told_unless_quiet(home: FakeHome) -> None:
    line = "1.0 I slot print_timing: id  0 | task 1 | prompt eval time =  10.00 ms /  7 tokens"
    home.behave({"lines": [[1.5, line]]})
    loud, quiet = home.serve(), home.serve("--quiet")
    for running in (loud, quiet):
        running.until_state("ready")
        log = home.root / "state/flashnext/logs" / f"serve-{running.port}.log"
        until(lambda log=log: "prompt eval time" in log.read_text(), "the line in the log")
        running.signal(signal.SIGTERM)
        running.end()
    assert "  prompt eval time = 10.00 ms / 7 tokens" in loud.err
    assert "eval time" not in quiet.err and "ready: " in quiet.err


def test_errors_as_json(home: FakeHome) -> None:
    done = home.run("serve", "--profile", "nope", "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["error"] == "profile-not-found"


def test_what_the_service_manager_hears(home: FakeHome) -> None:
    home.behave([{"load_s": 2, "load_line_every_s": 0.2, "exit_after_s": 4}, {}])
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(home.root / "notify"))
        manager.settimeout(20)
        home.env |= {"NOTIFY_SOCKET": str(home.root / "notify"), "WATCHDOG_USEC": "400000"}
        running = home.serve()
        heard: list[str] = []

        def hear(word: str) -> None:
            while not any(word in line for line in heard[mark:]):
                heard.extend(manager.recv(4096).decode().splitlines())

        mark = 0
        hear("STATUS=starting")
        hear("EXTEND_TIMEOUT_USEC=60000000")
        hear("STATUS=warming")
        assert "READY=1" not in heard, "ready only after the check"
        hear("READY=1")
        mark = len(heard)
        hear("STATUS=backoff")
        hear("READY=1")
        hear("WATCHDOG=1")
        running.signal(signal.SIGTERM)
        hear("STOPPING=1")
        assert running.end() == 143
    for launch in home.launches("server"):
        assert "NOTIFY_SOCKET" not in launch["env"], "a child cannot speak for us"


def test_control_port(home: FakeHome) -> None:
    home.behave([{"exit_after_s": 5, "load_s": 1}, {"load_s": 3}])
    running = home.serve()
    url = until(lambda: running.state().get("control"), "a control port")
    address = ("127.0.0.1", int(url.rpartition(":")[2]))

    def get(path: str) -> Reply:
        return request(address, path)

    loading = get("/readyz")
    assert loading.status == 503 and loading.data["message"] and "progress" in loading.data
    running.until_state("ready")
    assert get("/readyz").status == 200 and get("/healthz").text == "ok\n"
    assert get("/status").data["port"] == running.port
    assert 'flashnext_state{state="ready"} 1' in get("/metrics").text
    assert "fn:vgpu:listening" in get("/logs?n=50").text
    assert get("/logs?n=1").text.count("\n") == 1
    page = get("/").text
    assert "<title>flashnext</title>" in page and "http" not in page.replace("http-equiv", ""), (
        "no other host"
    )
    assert get("/nowhere").status == 404
    running.until_state("backoff", "starting")
    assert get("/readyz").status == 503 and get("/healthz").status == 200
    running.until_state("ready")
    assert "flashnext_restarts_total 1" in get("/metrics").text
    with socket.create_connection(address) as evil:
        evil.sendall(b"GET /status HTTP/1.1\r\nHost: evil.example:80\r\n\r\n")
        assert b" 403 " in evil.recv(100)
    running.signal(signal.SIGTERM)
    assert running.end() == 143


def test_clients_of_the_control_port_that_leave(home: FakeHome) -> None:
    """An answer that nobody takes any more must not end the supervisor (by SIGPIPE), nor fill its output."""
    running = home.serve()
    url = str(running.until_state("ready")["control"])
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    for _ in range(50):
        with socket.create_connection(address) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n")
    assert request(address, "/readyz").status == 200
    running.signal(signal.SIGTERM)
    assert running.end() == 143
    assert "Traceback" not in running.err


def test_a_fixed_control_port(home: FakeHome) -> None:
    port = free_port()
    file = home.profile(server={"control_port": port})
    running = home.serve(profile=file)
    assert running.until_state("ready")["control"] == f"http://127.0.0.1:{port}"
    second = home.serve(profile=file)
    assert second.end() == 11
    assert "error[port-in-use]" in second.err and f"127.0.0.1:{port} cannot be bound" in second.err


def cuda_home(home: FakeHome, used: str) -> None:
    """Two RTX 3090 as nvidia-smi tells of them; ``used``: shell words that print MiB in use on the first."""
    tools = home.root / "tools"
    tools.mkdir()
    smi = tools / "nvidia-smi"
    rows = f"0, $({used})\\n1, 300\\n"
    smi.write_text((SMI % (rows, CARD_0 + CARD_1)).replace("printf '", 'printf "').replace("' ;;", '" ;;'))
    smi.chmod(0o755)
    home.env["PATH"] = f"{tools}:{home.env['PATH']}"
    home.install(backend="cuda", archs=("86",))


CUDA = {"kind": "cuda", "memory_mib": None, "name": "RTX 3090"}


def test_a_restart_waits_for_cards_that_are_still_full(home: FakeHome) -> None:
    full = home.root / "full"
    cuda_home(home, f"[ -e {full} ] && echo 20000 || echo 300")
    home.behave([{"exit_after_s": 2, "signal": 11}, {}])
    running = home.serve(profile=home.profile(devices={**CUDA, "used_mib_max": 1200}))
    running.until_state("ready")
    full.touch()  # what a dying process has not given back yet
    running.until_state("backoff")
    until(lambda: running.state()["reason"].startswith("waiting: "), "it waits, and says for what")
    assert "20000 MiB of device 0 (NVIDIA GeForce RTX 3090) are in use already" in running.state()["reason"]
    assert len(home.launches()) == 1
    full.unlink()
    assert running.until_state("ready")["restarts"] == 1


def test_memory_of_cuda_devices_is_shown_and_little_room_is_a_warning(home: FakeHome) -> None:
    cuda_home(home, f"[ -e {home.folder}/launches-server.jsonl ] && echo 24024 || echo 300")
    running = home.serve(profile=home.profile(devices=CUDA))
    state = running.until_state("ready")
    assert [(d["name"], d["allocated_bytes"] // 2**20) for d in state["devices"]] == [
        ("NVIDIA GeForce RTX 3090 (0)", 24024),
        ("NVIDIA GeForce RTX 3090 (1)", 300),
    ]
    (warning,) = [w for w in state["warnings"] if "free" in w]
    assert warning.startswith("NVIDIA GeForce RTX 3090 (0): only 100 MiB free, 256 MiB should stay")
    assert home.launches("vgpu") == []
