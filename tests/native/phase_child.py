"""The parent's side of phase_session.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

SCRIPT = Path(__file__).with_name("phase_session.py")
REPO = Path(__file__).parents[2]


class GoneError(Exception):
    """The child has ended; ``code`` as in subprocess (negative: the signal)."""

    def __init__(self, code: int, log: str) -> None:
        super().__init__(f"the session ended with {code}:\n{log[-2000:]}")
        self.code = code


class Child:
    """``child("open", micro_batch=64)`` sends one command and returns its answer."""

    def __init__(
        self,
        bin_dir: Path,
        model: Path,
        endpoints: list[str],
        folder: Path,
        env: dict[str, str] | None = None,
    ) -> None:
        self.log_path = folder / f"session-{os.urandom(4).hex()}.log"
        argv = [sys.executable, str(SCRIPT), str(bin_dir), str(model), ",".join(endpoints)]
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=REPO,
                env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1",
                     "GGML_NO_BACKTRACE": "1", **(env or {})},
            )  # fmt: skip
        self.info = self._answer()

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def markers(self, event: str) -> list[dict[str, Any]]:
        start = f"fn:phase:{event} "
        return [json.loads(line[len(start) :]) for line in self.log.splitlines() if line.startswith(start)]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise GoneError(self.process.wait(30), self.log)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __call__(self, op: str, **fields: Any) -> dict[str, Any]:
        assert self.process.stdin
        try:
            self.process.stdin.write(json.dumps({"op": op, **fields}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise GoneError(self.process.wait(30), self.log) from None
        return self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
