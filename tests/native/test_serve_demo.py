"""`flashnext serve` with the real binaries: up, answering, and gone without a trace, however it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from serve_home import Home, Running, until

pytestmark = [pytest.mark.native, pytest.mark.timeout(180)]


class RealHome(Home):
    """A home whose only build is the shared one of the test run."""

    def __init__(self, root: Path, build: Path) -> None:
        super().__init__(root)
        if not (build / "build.json").is_file():
            pytest.fail(f"{build} is no installed build: these tests serve what `flashnext build` installed")
        builds = root / "data/flashnext/builds"
        builds.mkdir(parents=True)
        (builds / build.name).symlink_to(build)


@pytest.fixture
def home(tmp_path: Path, native_build: Any) -> Iterator[RealHome]:
    made = RealHome(tmp_path, native_build.root)
    yield made
    made.close()


def post(running: Running, path: str, body: dict[str, Any], timeout_s: float = 60.0) -> httpx.Response:
    return httpx.post(f"http://127.0.0.1:{running.port}{path}", json=body, timeout=timeout_s)


def all_gone(home: Home, running: Running, pids: list[int]) -> None:
    until(lambda: not [p for p in pids if psutil.pid_exists(p)], f"end of {pids}", 5.0)
    home.nothing_left()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", running.port))


def test_demo_end_to_end(home: RealHome) -> None:
    running = home.serve(profile=Path("demo"))
    state = running.until_state("ready", timeout_s=90)
    assert [c["name"] for c in state["children"]] == ["server", "vgpu0", "vgpu1"]
    assert Path(state["model"]).name == "flashnext-demo.gguf"

    props = httpx.get(f"http://127.0.0.1:{running.port}/props").json()
    assert props["flashnext"]["series_hash"]
    assert set(props["flashnext"]["features"]) == set(state["features"])

    for device in state["devices"]:
        assert 10_000_000 < device["allocated_bytes"] < device["memory_bytes"], "both devices hold layers"
    assert len(state["devices"]) == 2

    answer = post(running, "/completion", {"prompt": "one", "n_predict": 8, "ignore_eos": True})
    assert answer.status_code == 200 and answer.json()["tokens_predicted"] == 8

    listening = {
        c.laddr.ip
        for pid in running.pids()
        for c in psutil.Process(pid).net_connections("inet")
        if c.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}, "loopback only"
    threads = state["argv"][state["argv"].index("--threads") + 1]
    assert int(threads) * 3 <= max(3, len(psutil.Process().cpu_affinity() or []))

    pids = running.pids()
    running.signal(signal.SIGINT)
    assert running.end() == 130
    assert running.out == f"http://127.0.0.1:{running.port}/v1\n"
    all_gone(home, running, pids)


def test_second_start_reuses_the_model(home: RealHome) -> None:
    model = home.root / "data/flashnext/models/flashnext-tiny.gguf"
    first = home.serve()
    first.until_state("ready", timeout_s=90)
    stamp = model.stat().st_mtime_ns
    first.signal(signal.SIGTERM)
    assert first.end() == 143
    begin = time.monotonic()
    second = home.serve()
    second.until_state("ready", timeout_s=90)
    assert time.monotonic() - begin < 20
    assert model.stat().st_mtime_ns == stamp


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("moment", ["starting", "ready"])
def test_every_ending_leaves_nothing(home: RealHome, number: int, moment: str) -> None:
    running = home.serve()
    running.until_state(moment, "ready", timeout_s=90)
    until(lambda: running.pids(), "children")
    pids = running.pids()
    running.signal(number)
    expected = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}
    assert running.end() == expected[signal.Signals(number)]
    all_gone(home, running, pids)


def test_stop_with_a_client_in_mid_answer(home: RealHome) -> None:
    running = home.serve()
    running.until_state("ready", timeout_s=90)
    body = {"prompt": "go", "n_predict": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"http://127.0.0.1:{running.port}/completion", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        begin = time.monotonic()
        running.signal(signal.SIGTERM)
        assert running.end(30) == 143
        assert time.monotonic() - begin < 10
        with pytest.raises(httpx.HTTPError):
            for _ in lines:
                pass
            raise httpx.ReadError("the stream ended early, without an error")
    home.nothing_left()


def test_port_in_use_is_refused_before_any_launch(home: RealHome) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        begin = time.monotonic()
        running = home.serve(port=holder.getsockname()[1])
        assert running.end() == 11
        assert time.monotonic() - begin < 10
    assert f"held by pid {os.getpid()}" in running.err
    assert not (home.root / "data/flashnext/models").exists()


def test_model_that_does_not_fit_its_devices_is_refused(home: RealHome) -> None:
    file = home.profile(
        model={"synthetic": "demo"}, devices={"memory_mib": 64}, context={"size": 65_536, "kv_type": "f32"}
    )
    running = home.serve(profile=file)
    assert running.end(90) == 4
    assert "error[memory-unfit]" in running.err and "VGPU0:" in running.err and "short by" in running.err
    home.nothing_left()


@pytest.mark.parametrize("victim", ["server", "vgpu1"])
def test_killed_child_is_replaced(home: RealHome, victim: str) -> None:
    running = home.serve()
    before = running.until_state("ready", timeout_s=90)
    cold_s = before["counters"]["start_to_ready_s"]
    begin = time.monotonic()
    os.kill(next(c["pid"] for c in before["children"] if c["name"] == victim), signal.SIGKILL)
    running.until_state("backoff", "starting")
    after = running.until_state("ready", timeout_s=90)
    assert time.monotonic() - begin < cold_s + 5 + 2, "measured cold start, 5 s, and polls of a busy machine"
    assert not {c["pid"] for c in before["children"]} & {c["pid"] for c in after["children"]}
    assert post(running, "/completion", {"prompt": "again", "n_predict": 4}).status_code == 200


def test_environment_and_config_files_do_not_reach_the_server(home: RealHome) -> None:
    config = home.root / "config/llama.cpp"
    config.mkdir(parents=True)
    (config / "config.ini").write_text("ctx-size = 256\n")
    home.env |= {"LLAMA_ARG_CTX_SIZE": "512", "LLAMA_ARG_N_PARALLEL": "4", "LLAMA_API_KEY": "sesame"}
    running = home.serve()
    running.until_state("ready", timeout_s=90)
    props = httpx.get(f"http://127.0.0.1:{running.port}/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert props["total_slots"] == 1


def test_a_key_is_demanded_and_our_own_probes_have_it(home: RealHome) -> None:
    keys = home.root / "keys"
    keys.write_text("sesame-4711-open\n")
    keys.chmod(0o600)
    running = home.serve(profile=home.profile(server={"api_key_file": str(keys)}))
    running.until_state("ready", timeout_s=90)
    assert post(running, "/completion", {"prompt": "x", "n_predict": 2}).status_code == 401
    url = f"http://127.0.0.1:{running.port}"
    assert httpx.get(f"{url}/slots").status_code == httpx.get(f"{url}/metrics").status_code == 401
    mine = {"Authorization": "Bearer sesame-4711-open"}
    assert httpx.get(f"{url}/slots", headers=mine).status_code == 200
    until(lambda: "llamacpp:prompt_tokens_total" in running.state()["metrics"], "metrics with the key")
    (log,) = (home.root / "state").rglob("serve-*.log")
    assert "sesame" not in log.read_text() + running.state()["reason"]


def test_print_command_can_be_repeated_by_hand(home: RealHome) -> None:
    done = home.run("serve", "--profile", "demo", "--print-command", "--json")
    server = next(p for p in json.loads(done.stdout) if p["name"] == "server")
    assert server["argv"][0].endswith("/bin/llama-server") and Path(server["argv"][0]).exists()
    assert "LLAMA_ATTN_ROT_DISABLE" in server["env"]
