"""The virtual GPU as a program, and under a real llama-server."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from native_servers import LlamaServer, VirtualGpu, free_port

from flashnext import proc

pytestmark = pytest.mark.native

StartGpu = Callable[..., VirtualGpu]
StartServer = Callable[..., LlamaServer]

PROMPT = "Hello there, how are you?"


def books_apart_from_traffic(gpu: VirtualGpu) -> dict[str, Any]:
    books = gpu.books()
    keys = ("allocated_bytes", "peak_bytes", "free_bytes", "buffers", "allocations", "frees", "refusals")
    return {key: books[key] for key in keys}


def suppressed(request: Callable[[], Any]) -> None:
    """A request whose server is about to go."""
    with contextlib.suppress(httpx.HTTPError):
        request()


def alive(pid: int) -> bool:
    """A process that is there and not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0]
    except FileNotFoundError:
        return False
    return state != "Z"


# the program


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.1", "::", "::1", "example.org", "128.0.0.1", ""])
def test_other_than_loopback_is_refused(native_build: Any, host: str) -> None:
    done = proc.run([native_build.bin / "fn-vgpu", "--host", host], timeout_s=10)
    assert done.code == 2
    assert "no authentication" in done.err
    assert done.out == ""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_listens_on_loopback_alone(vgpu: StartGpu, host: str) -> None:
    gpu = vgpu("--host", host)
    address = "127.0.0.1" if host == "localhost" else host
    other = "127.0.0.2" if address == "127.0.0.1" else "127.0.0.1"
    for port in (gpu.port, gpu.markers("listening")[0]["control_port"]):
        socket.create_connection((address, port), timeout=5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, port), timeout=5)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--memory", "12MB"], "KiB, MiB or GiB"),
        (["--fault", "explode:1"], "upload-corrupt:N"),
        (["--threads", "0"], "from 1 to 512"),
        (["--port"], "a value is missing"),
        (["--membory", "1GiB"], "no such option: --membory"),
    ],
)
def test_wrong_options_are_named(native_build: Any, options: list[str], reason: str) -> None:
    done = proc.run([native_build.bin / "fn-vgpu", *options], timeout_s=10)
    assert done.code == 2
    assert options[0] in done.err
    assert reason in done.err


def test_help_names_the_limits(native_build: Any) -> None:
    done = proc.run([native_build.bin / "fn-vgpu", "--help"])
    assert done.ok
    for limit in ("no authentication", "one client at a time", "not counted", "IPv4 only"):
        assert limit in done.out


def test_a_port_in_use_is_said(vgpu: StartGpu, native_build: Any) -> None:
    gpu = vgpu()
    for option in ("--port", "--control-port"):
        done = proc.run([native_build.bin / "fn-vgpu", option, str(gpu.port)], timeout_s=10)
        assert done.code == 1
        assert f"127.0.0.1:{gpu.port}" in done.err
        assert "fn:vgpu:listening" not in done.out


def test_the_asked_port_is_the_port(vgpu: StartGpu) -> None:
    port = free_port()
    gpu = vgpu("--port", str(port), "--name", "left", "--memory", "48MiB")
    assert gpu.port == port
    marker = gpu.markers("listening")[0]
    assert (marker["name"], marker["memory_bytes"], marker["pid"]) == ("left", 48 << 20, gpu.child.pid)


def test_control_lines(vgpu: StartGpu) -> None:
    gpu = vgpu("--memory", "32MiB")
    books = gpu.books()
    assert (books["memory_bytes"], books["free_bytes"], books["allocated_bytes"]) == (32 << 20, 32 << 20, 0)
    assert gpu.control("memory 16MiB")["free_bytes"] == 16 << 20
    for wrong in ("", "fault", "fault alloc:0", "memory", "memory 0", "memory -1", "x" * 5000):
        assert "error" in gpu.control(wrong)
    assert gpu.books()["memory_bytes"] == 16 << 20


def test_a_silent_control_client_does_not_block_the_stop(vgpu: StartGpu) -> None:
    gpu = vgpu()
    with socket.create_connection(("127.0.0.1", gpu.control_port)):
        gpu.child.send_signal(signal.SIGTERM)
        assert gpu.ended(timeout_s=5) == 0


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(vgpu: StartGpu, sig: signal.Signals) -> None:
    gpu = vgpu()
    gpu.child.send_signal(sig)
    assert gpu.ended(timeout_s=5) == 0
    assert gpu.markers("stopped")[0]["buffers"] == 0


PARENT = """
import subprocess, sys, time
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_dies_with_a_killed_parent(native_build: Any, stopped: bool) -> None:
    control_port = free_port()
    argv = [native_build.bin / "fn-vgpu", "--control-port", str(control_port)]
    parent = proc.start([sys.executable, "-c", PARENT, *argv])
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    try:
        listening = proc.wait_until(
            lambda: socket.socket().connect_ex(("127.0.0.1", control_port)) == 0, timeout_s=10
        )
        assert listening
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
        assert proc.wait_until(lambda: not alive(pid), timeout_s=5)
    finally:
        proc.stop(parent)


def test_outlives_its_parent_when_told_so(native_build: Any) -> None:
    control_port = free_port()
    argv = [native_build.bin / "fn-vgpu", "--control-port", str(control_port), "--parent-death", "off"]
    parent = proc.start([sys.executable, "-c", PARENT, *argv])
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    try:
        assert proc.wait_until(
            lambda: socket.socket().connect_ex(("127.0.0.1", control_port)) == 0, timeout_s=10
        )
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
        assert not proc.wait_until(lambda: not alive(pid), timeout_s=0.5)
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGTERM)
        proc.stop(parent)
    assert proc.wait_until(lambda: not alive(pid), timeout_s=5)


def test_a_second_client_waits_for_the_first(vgpu: StartGpu) -> None:
    gpu = vgpu()
    hello = bytes([14]) + struct.pack("<Q", 24) + bytes(24)  # command, size, capabilities: none

    def client() -> socket.socket:
        s = socket.create_connection(("127.0.0.1", gpu.port), timeout=0.5)
        s.sendall(hello)
        return s

    with client() as first:
        assert struct.unpack("<Q", first.recv(8, socket.MSG_WAITALL))[0] == 28
        with client() as second:
            with pytest.raises(TimeoutError):
                second.recv(8)
            first.close()
            second.settimeout(10)
            assert struct.unpack("<Q", second.recv(8, socket.MSG_WAITALL))[0] == 28


# under llama-server


def test_text_is_the_cpus_and_memory_is_flat(vgpu: StartGpu, llama_server: StartServer) -> None:
    expected = llama_server().complete(PROMPT)["content"]
    gpus = (vgpu("--memory", "64MiB"), vgpu("--memory", "64MiB"))
    server = llama_server(on=gpus)
    # both devices compute, and hold something
    assert server.complete(PROMPT)["content"] == expected
    before = [books_apart_from_traffic(gpu) for gpu in gpus]
    graphs = [gpu.books()["graphs"] for gpu in gpus]
    assert all(books["buffers"] > 0 and books["allocated_bytes"] > 1 << 20 for books in before)
    for length in (1, 40, 200, 7):
        server.complete("word " * length)
        assert server.complete(PROMPT)["content"] == expected
    assert [books_apart_from_traffic(gpu) for gpu in gpus] == before
    assert all(gpu.books()["graphs"] > n for gpu, n in zip(gpus, graphs, strict=True))

    assert server.end() == 0
    for gpu in gpus:
        gpu.wait_for(allocated_bytes=0, buffers=0, free_bytes=64 << 20)
        assert gpu.books()["refusals"] == 0


def test_what_does_not_fit_does_not_load(vgpu: StartGpu, llama_server: StartServer) -> None:
    gpus = (vgpu("--memory", "4MiB"), vgpu("--memory", "64MiB"))
    server = llama_server("-ts", "1,1", on=gpus, ready_s=None)
    assert server.ended(timeout_s=30) == 1
    refused = gpus[0].markers("refused")
    assert refused and all(line["asked_bytes"] > line["free_bytes"] for line in refused)
    assert "failed to allocate" in server.text or "unable to allocate" in server.text
    assert gpus[1].markers("refused") == []
    # the device is as before, and serves the next client
    gpus[0].wait_for(allocated_bytes=0, buffers=0)
    gpus[1].wait_for(allocated_bytes=0, buffers=0)
    gpus[0].control("memory 64MiB")
    assert llama_server("-ts", "1,1", on=gpus).complete(PROMPT)["content"]


def test_layers_follow_free_memory(vgpu: StartGpu, llama_server: StartServer) -> None:
    """The reason why a limit must be real: llama-server reads it before it allocates."""
    gpus = (vgpu("--memory", "24MiB"), vgpu("--memory", "96MiB"))
    llama_server(on=gpus)
    small, large = (gpu.books()["allocated_bytes"] for gpu in gpus)
    assert 0 < small < large


def test_an_allocation_fails_once(vgpu: StartGpu, llama_server: StartServer) -> None:
    gpu = vgpu("--fault", "alloc:1")
    server = llama_server(on=(gpu,), ready_s=None)
    assert server.ended(timeout_s=30) == 1
    assert [line["event"] for line in gpu.markers("fault")] == ["alloc"]
    gpu.wait_for(allocated_bytes=0, refusals=1, faults=1)
    assert llama_server(on=(gpu,)).complete(PROMPT)["content"]
    gpu.wait_for(refusals=1, faults=1)


def test_a_device_that_is_lost_ends_the_server(vgpu: StartGpu, llama_server: StartServer) -> None:
    gpu = vgpu()
    server = llama_server(on=(gpu,))
    gpu.control("fault abort:1")
    with pytest.raises(httpx.HTTPError):
        server.complete(PROMPT, timeout_s=20)
    assert gpu.ended(timeout_s=5) == -signal.SIGKILL
    assert [line["event"] for line in gpu.markers("fault")] == ["abort"]
    assert server.ended(timeout_s=20) == -signal.SIGABRT


def test_a_hang_lasts_until_the_device_is_stopped(vgpu: StartGpu, llama_server: StartServer) -> None:
    gpu = vgpu()
    server = llama_server(on=(gpu,))
    gpu.control("fault hang:1")
    with pytest.raises(httpx.ReadTimeout):
        server.complete(PROMPT, timeout_s=1.5)
    books = gpu.books()  # answers while it hangs
    assert (books["faults"], books["buffers"] > 0) == (1, True)
    gpu.child.send_signal(signal.SIGTERM)
    assert gpu.ended(timeout_s=5) == 0
    stopped = gpu.markers("stopped")[0]
    assert (stopped["allocated_bytes"], stopped["buffers"]) == (0, 0)


def test_a_running_graph_does_not_hold_up_the_stop(vgpu: StartGpu, llama_server: StartServer) -> None:
    gpu = vgpu()
    server = llama_server("-b", "2048", "-ub", "2048", on=(gpu,), experts_on_devices=True)
    prompt = "word " * 380  # about 1,900 tokens in one graph
    start = time.monotonic()
    server.complete(prompt, n_predict=1)
    whole_s = time.monotonic() - start

    graphs = gpu.books()["graphs"]
    abandoned = threading.Thread(target=lambda: suppressed(lambda: server.complete(prompt, n_predict=1)))
    abandoned.start()
    assert proc.wait_until(lambda: gpu.books()["graphs"] > graphs, timeout_s=10, every_s=0.01)
    start = time.monotonic()
    gpu.child.send_signal(signal.SIGTERM)
    assert gpu.ended(timeout_s=10) == 0
    assert time.monotonic() - start < whole_s / 2
    assert gpu.markers("stopped")[0]["allocated_bytes"] == 0
    server.stop()
    abandoned.join(10)


def test_a_wrong_byte_changes_the_answer(vgpu: StartGpu, llama_server: StartServer) -> None:
    """Of the load: every upload is a weight then. Later some are indices, and a wrong one is an abort."""

    def probabilities(gpu: VirtualGpu) -> list[Any]:
        server = llama_server(on=(gpu,))
        answer = server.complete(PROMPT, n_predict=1, n_probs=20)
        assert server.end() == 0
        return [(p["id"], p["logprob"]) for p in answer["completion_probabilities"][0]["top_logprobs"]]

    sound, wrong = vgpu(), vgpu("--fault", "upload-corrupt:8")
    expected = probabilities(sound)
    assert probabilities(wrong) != expected
    assert [line["event"] for line in wrong.markers("fault")] == ["upload-corrupt"]
    # once: the next load is sound again
    assert probabilities(wrong) == expected


def load_s(llama_server: StartServer, gpu: VirtualGpu) -> float:
    start = time.monotonic()
    server = llama_server(on=(gpu,))
    elapsed = time.monotonic() - start
    server.end()
    return elapsed


def test_uploads_are_as_slow_as_asked(vgpu: StartGpu, llama_server: StartServer) -> None:
    """A lower bound, far above what a load takes without; comparing two loads would only add noise."""
    late, narrow = vgpu("--upload-delay-us", "20000"), vgpu("--upload-mib-s", "1")
    late_s = load_s(llama_server, late)
    assert late.books()["uploads"] > 100
    assert late_s >= late.books()["uploads"] * 0.020
    narrow_s = load_s(llama_server, narrow)
    assert narrow.books()["upload_bytes"] > 2 << 20
    assert narrow_s >= narrow.books()["upload_bytes"] / (1 << 20)


def test_graphs_are_as_slow_as_asked(vgpu: StartGpu, llama_server: StartServer) -> None:
    gpu = vgpu("--compute-delay-us", "20000")
    server = llama_server(on=(gpu,))
    before = gpu.books()["graphs"]
    start = time.monotonic()
    server.complete(PROMPT, n_predict=4)
    elapsed = time.monotonic() - start
    assert elapsed >= (gpu.books()["graphs"] - before) * 0.020
    assert gpu.books()["graphs"] - before >= 4
