"""The page in a real browser, at the width of a phone and of a desk. Runs only where a Chromium is installed.

FLASHNEXT_PAGE_SHOTS names a folder for the screenshots.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import browser
import pytest
from browser import Browser
from serve_home import FakeHome, until

from flashnext.serve.control import Control
from flashnext.services import Process, Service, Transition

PROGRAM = browser.find()
SHOTS = os.environ.get("FLASHNEXT_PAGE_SHOTS")
WIDTHS = (360, 1440)

pytestmark = [
    pytest.mark.skipif(PROGRAM is None, reason=f"none of {', '.join(browser.NAMES)} is installed"),
    pytest.mark.timeout(120),
]

GIB = 1024**3
NOW = datetime.now(UTC)
LOG = [f"server| 0.{n:02}.001.000 I slot update_slots: id 0 | task 1 | line {n}" for n in range(40)]
METRICS = {
    "llamacpp:prompt_tokens_total": 119_000.0,
    "llamacpp:prompt_seconds_total": 575.0,
    "llamacpp:tokens_predicted_total": 4_100.0,
    "llamacpp:tokens_predicted_seconds_total": 110.0,
    "fn_expert_cache_hits_total": 871_000.0,
    "fn_expert_cache_misses_total": 129_000.0,
    "fn_phase_begins_total": 12.0,
    "fn_phase_last_begin_ms": 420.0,
    "fn_phase_last_end_ms": 1_910.0,
}
STORY = [
    ("starting", "asked to serve"),
    ("warming", "the model is loaded; checking its text"),
    ("ready", "answers sanely, 212.4 s after the start"),
]


def service(state: str, reason: str, story: list[tuple[str, str]], **values: Any) -> Service:
    steps = [*story, (state, reason)]
    return Service(
        profile="2x3090",
        kind="experimental",
        profile_file="/home/someone/profiles/2x3090.yaml",
        port=8080,
        url="http://127.0.0.1:8080",
        state=state,
        reason=reason,
        started=NOW,
        supervisor=Process(name="flashnext", pid=4242, started=0.0),
        build="48505b302a286364",
        model="/srv/models/Qwen3.8-Flash-Next-UD-Q4_K_XL-00001-of-00004.gguf",
        head="/srv/models/mtp-Qwen3.8-Flash-Next-shared-Q8_0.gguf",
        transitions=tuple(
            Transition(at=NOW - timedelta(seconds=240 - 60 * i), state=s, reason=r)
            for i, (s, r) in enumerate(steps)
        ),
        **values,
    )


DEVICES = (
    {"name": "NVIDIA GeForce RTX 3090 (0)", "memory_bytes": 24 * GIB, "allocated_bytes": 22 * GIB},
    {"name": "NVIDIA GeForce RTX 3090 (1)", "memory_bytes": 24 * GIB, "allocated_bytes": 24 * GIB - 50},
)
DEATH = (
    "server crashed (segmentation fault) (SIGSEGV, 139); "
    "CUDA error: an illegal memory access was encountered in /src/ggml/src/ggml-cuda/ggml-cuda.cu:2710"
)
READING = {
    "busy": 1, "read": 51_200, "written": 0, "acceptance": 0.62,
    "prompt_share": 0.43, "prompt_tokens": 119_070, "prompt_left_s": 327.9,
}  # fmt: skip
LOOKS = {
    "loading": service("starting", "asked to serve", []),
    "reading": service(*STORY[-1], STORY[:2], counters=READING, metrics=METRICS, devices=DEVICES, restarts=1),
    "writing": service(
        *STORY[-1],
        STORY[:2],
        counters={**READING, "written": 312},
        metrics=METRICS,
        devices=DEVICES,
        warnings=("acceptance is 1.0% over 600 drafts: is the head this model's?",),
    ),
    "degraded": service(
        "degraded",
        "degenerate text: 24 of 24 tokens are 14",
        STORY,
        metrics=METRICS,
        devices=DEVICES,
        deviations=("2x3090.yaml:41: found 100, qualified is 150: what fits beside the decode workspace",),
        last_lines=tuple(LOG),
    ),
    "fatal": service("fatal", DEATH, STORY, metrics=METRICS, restarts=3, last_lines=tuple(LOG)),
}
WORDS = {
    "loading": "loading, for ",
    "reading": "reading the prompt, 51,200 of about 119,070 tokens, about 5 min left",
    "writing": "writing, 312 tokens so far",
    "degraded": "degenerate text: 24 of 24 tokens are 14",
    "fatal": "CUDA error: an illegal memory access",
}


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert PROGRAM is not None
    with Browser(PROGRAM, tmp_path_factory.mktemp("chromium") / "profile") as started:
        yield started


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("look", sorted(LOOKS))
def test_every_state_fits_its_window(chromium: Browser, look: str, width: int) -> None:
    control = Control(lambda: LOOKS[look], lambda count: LOG[-count:])
    try:
        chromium.requests.clear()
        chromium.width(width, dark=look == "writing")
        chromium.open(f"{control.url}/")
        state = LOOKS[look].state
        chromium.until(f"document.getElementById('state')?.textContent === '{state}'")
        text = chromium.ask("document.body.innerText")
        assert WORDS[look] in text, text
        assert ("Last lines" in text) == (look in ("degraded", "fatal"))
        assert chromium.ask("document.documentElement.scrollWidth") <= width, "no scrolling sideways"
        outside = (
            "[...document.body.querySelectorAll('*')].filter(e => e.getClientRects().length"
            " && !e.closest('.bar') && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName)"
        )
        assert chromium.ask(outside) == []
        hosts = {url.split("/")[2] for url in chromium.requests if "://" in url}
        assert hosts == {control.url.removeprefix("http://")}, "nothing from anywhere else"
        assert chromium.errors == []
        if SHOTS:
            Path(SHOTS).mkdir(parents=True, exist_ok=True)
            chromium.screenshot(Path(SHOTS) / f"{look}-{width}.png")
    finally:
        control.close()


def test_the_page_follows_a_service_to_its_end(chromium: Browser, home: FakeHome) -> None:
    home.behave({"load_s": 2, "lines": [[6.0, "NVRM: GPU has fallen off the bus"]]})
    running = home.serve()
    url = until(lambda: running.state().get("control"), "a control port")
    chromium.width(1440)
    chromium.open(f"{url}/")
    state = "document.getElementById('state')?.textContent"
    chromium.until(f"{state} === 'starting'")
    chromium.until(f"{state} === 'ready'")
    assert "idle" in chromium.ask("document.body.innerText")
    chromium.until(f"{state} === 'fatal'")
    assert running.end() == 8
    chromium.until("document.body.innerText.includes('the supervisor has ended')")
    text = chromium.ask("document.body.innerText")
    assert "a GPU fell off the bus" in text and chromium.ask(state) == "fatal", "how it ended stays there"


def test_the_page_of_a_killed_supervisor_says_so(chromium: Browser, home: FakeHome) -> None:
    running = home.serve()
    url = running.until_state("ready")["control"]
    chromium.open(f"{url}/")
    state = "document.getElementById('state')?.textContent"
    chromium.until(f"{state} === 'ready'")
    running.signal(signal.SIGKILL)
    running.end()
    chromium.until(f"{state} === 'gone'")
