"""One child process: started with its own group and death signal, its output read, counted and judged."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from flashnext import failures, markers, proc
from flashnext.serve import timings
from flashnext.serve.logfile import LogFile
from flashnext.services import Process, process_record

# A writer that never ends its line must not fill our memory.
_MAX_LINE = 64 * 1024


class Child:
    """A running child. ``on_marker`` and ``on_finding`` are called from its reader thread.

    Start it from the thread that lives as long as the supervisor: the kernel's parent-death signal follows
    the thread, not the process.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: LogFile,
        *,
        on_marker: Callable[[Child, markers.Marker], None],
        on_finding: Callable[[Child, failures.Finding], None],
        on_timing: Callable[[Child, timings.Acceptance | timings.PromptProgress], None],
        on_line: Callable[[Child, str], None] | None = None,
        on_end: Callable[[Child], None],
    ) -> None:
        self.name = name
        self.last_output = time.monotonic()
        self._log = log
        self._on_marker, self._on_finding, self._on_end = on_marker, on_finding, on_end
        self._on_timing, self._on_line = on_timing, on_line
        self.process = proc.start(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.record: Process = process_record(name, self.process.pid)
        self._reader = threading.Thread(target=self._read, name=f"read-{name}", daemon=True)
        self._reader.start()

    @property
    def code(self) -> int | None:
        """Exit code as subprocess reports it, None while it runs."""
        return self.process.poll()

    def drain(self, timeout_s: float = 1.0) -> None:
        """Wait until the output of an ended child is read to its end."""
        self._reader.join(timeout_s)

    def stop(self, *, term_s: float, again_s: float) -> int:
        """TERM, TERM again, KILL; returns the exit code. Safe on a child that has ended."""
        code = proc.stop(self.process, term_s=term_s, again_s=again_s)
        self.drain()
        return code

    def _read(self) -> None:
        assert self.process.stdout is not None
        handle = self.process.stdout.fileno()
        rest = b""
        while True:
            try:
                block = os.read(handle, 64 * 1024)
            except OSError:
                break
            if not block:
                break
            self.last_output = time.monotonic()
            *lines, rest = (rest + block).split(b"\n")
            if len(rest) > _MAX_LINE:
                lines.append(rest)
                rest = b""
            self._take(lines)
        if rest:
            self._take([rest])
        self._on_end(self)

    def _take(self, raw: list[bytes]) -> None:
        if not raw:
            return
        block = b"\n".join(raw).decode("utf-8", "replace").replace("\r", "")
        lines = block.split("\n")
        self._log.write(self.name, lines)
        told = "fn:" in block or any(needle in block for needle in timings.NEEDLES)
        if told or failures.worth_reading(block):
            self._judge(lines)
        if self._on_line is not None:
            for line in lines:
                self._on_line(self, line)

    def _judge(self, lines: list[str]) -> None:
        for line in lines:
            marker = markers.parse(line)
            if marker is not None:
                self._on_marker(self, marker)
                continue
            timing = timings.parse(line)
            if timing is not None:
                self._on_timing(self, timing)
                continue
            finding = failures.classify(line)
            if finding is not None:
                self._on_finding(self, finding)
