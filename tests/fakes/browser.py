"""A headless Chromium over its debugging pipe: a width, a page, a question in JavaScript, a screenshot."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_LIMIT_S = 60.0


def find() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page. Requests that it makes are listed in ``requests``, what its script throws in ``errors``."""

    def __init__(self, program: str, folder: Path) -> None:
        folder.mkdir(parents=True)
        ours, theirs = os.pipe(), os.pipe()  # what they read, what they write
        line = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        line += [
            "--no-first-run",
            "--disable-background-networking",
            f"--user-data-dir={folder}",
            "about:blank",
        ]
        # the protocol is spoken on descriptors 3 and 4; from high ones, so that neither is in the other's way
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in (ours[0], theirs[1])]
        script = f'exec "$@" 3<&{ends[0]} 4>&{ends[1]} {ends[0]}<&- {ends[1]}>&-'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *line],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ["PATH"], "HOME": str(folder)},
        )
        for end in (ours[0], theirs[1], *ends):
            os.close(end)
        self._say, self._hear = os.fdopen(ours[1], "wb", buffering=0), os.fdopen(theirs[0], "rb", buffering=0)
        self._rest, self._count, self._session = b"", 0, ""
        self.requests: list[str] = []
        self.errors: list[str] = []
        pages = self._call("Target.getTargets")["targetInfos"]
        target = next(p["targetId"] for p in pages if p["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._say.close()
        self._process.kill()
        self._process.wait()
        self._hear.close()

    def width(self, pixels: int, *, height: int = 900, dark: bool = False) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=pixels,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")

    def until(self, expression: str, timeout_s: float = 20.0) -> None:
        end = time.monotonic() + timeout_s
        while not self.ask(expression):
            assert time.monotonic() < end, f"in vain: {expression}\n{self.ask('document.body.innerText')}"
            time.sleep(0.05)

    def screenshot(self, file: Path) -> None:
        """The whole page."""
        found = self._call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        file.write_bytes(base64.b64decode(found["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._say.write(json.dumps(message).encode() + b"\0")
        end = time.monotonic() + _LIMIT_S
        while time.monotonic() < end:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer}"
                return dict(answer["result"])
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(answer["params"]["exceptionDetails"])[:500])
        raise AssertionError(f"{method}: no answer")

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            block = self._hear.read(65_536)
            assert block, "the browser has ended"
            self._rest += block
        line, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(line))
