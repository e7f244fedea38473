"""Mixed requests while server, virtual GPUs and supervisor are killed in turn: nobody waits for ever.

FLASHNEXT_SOAK_S sets the length (default 60 s); a fault comes a few seconds after the service is ready again.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from itertools import cycle

import httpx
import psutil
import pytest
from serve_home import Running, until
from test_serve_demo import RealHome, home

__all__ = ["home"]

SOAK_S = float(os.environ.get("FLASHNEXT_SOAK_S", "60"))
PATIENCE_S = 30.0
pytestmark = [pytest.mark.native, pytest.mark.slow, pytest.mark.timeout(SOAK_S + 240)]


class Client(threading.Thread):
    """Asks again and again; each request must end by itself, with an answer or an error."""

    def __init__(self, port: int, number: int) -> None:
        super().__init__(daemon=True)
        self.url = f"http://127.0.0.1:{port}"
        self.number = number
        self.over = threading.Event()
        self.outcomes: Counter[str] = Counter()
        self.slowest_s = 0.0

    def run(self) -> None:
        for turn in cycle(range(4)):
            if self.over.wait(0.3):
                return
            begin = time.monotonic()
            try:
                self.outcomes[self.ask(turn)] += 1
            except httpx.TimeoutException:
                self.outcomes["hung"] += 1
            except httpx.HTTPError:
                self.outcomes["error"] += 1
                self.over.wait(0.2)
            self.slowest_s = max(self.slowest_s, time.monotonic() - begin)

    def ask(self, turn: int) -> str:
        prompt = f"{self.number} {turn} " + "word " * (20 + 60 * turn)
        body = {"prompt": prompt, "n_predict": 16, "ignore_eos": True}
        if turn == 3:  # a client that leaves in mid-answer
            body["stream"] = True
            with httpx.stream("POST", f"{self.url}/completion", json=body, timeout=PATIENCE_S) as answer:
                for _ in answer.iter_lines():
                    return "left"
            return "error"
        reply = httpx.post(f"{self.url}/completion", json=body, timeout=PATIENCE_S)
        if reply.status_code != 200:
            return f"status {reply.status_code}"
        return "answer" if reply.json()["tokens_predicted"] == 16 else "short"


def noticed(running: Running) -> None:
    until(lambda: running.state().get("state") != "ready", "the fault is noticed", 10)


def test_soak(home: RealHome) -> None:
    # the account of restarts is closed after 2 s of quiet here, not after ten minutes
    profile = home.profile(life={"quiet_s": 2})
    running = home.serve(profile=profile)
    cold_s = running.until_state("ready", timeout_s=90)["counters"]["start_to_ready_s"]
    # the ready checks wait in the queue behind the clients, and all share two cores; the cold start did not
    limit_s = 3 * cold_s + 20
    clients = [Client(running.port, n) for n in range(2)]
    for client in clients:
        client.start()
    own = psutil.Process(running.process.pid)
    memory: list[int] = []
    end = time.monotonic() + SOAK_S
    faults: Counter[str] = Counter()
    for victim in cycle(["server", "vgpu0", "supervisor", "vgpu1"]):
        time.sleep(4)
        if time.monotonic() >= end:
            break
        state = running.until_state("ready")
        if victim == "supervisor":
            running.signal(signal.SIGKILL)
            running.end()
            home.nothing_left()
            running = home.serve(port=running.port, profile=profile)
            own = psutil.Process(running.process.pid)
        else:
            os.kill(next(c["pid"] for c in state["children"] if c["name"] == victim), signal.SIGKILL)
            noticed(running)
            memory.append(own.memory_info().rss)
        faults[victim] += 1
        running.until_state("ready", timeout_s=limit_s)
    for client in clients:
        client.over.set()
    for client in clients:
        client.join(PATIENCE_S + 5)
        assert not client.is_alive()
    outcomes = sum((c.outcomes for c in clients), Counter[str]())
    print(f"faults {dict(faults)}, outcomes {dict(outcomes)}, cold start {cold_s:.1f} s")
    assert set(faults) == {"server", "vgpu0", "supervisor", "vgpu1"}
    assert outcomes["hung"] == 0 and outcomes["short"] == 0
    assert outcomes["answer"] > 20 and outcomes["left"] > 5
    assert max(memory) - min(memory) < 40 * 1024 * 1024, "the supervisor's memory is flat"
    running.signal(signal.SIGTERM)
    assert running.end() == 143
    home.nothing_left()
