"""The server's log: one writer, a bound on disk use, and the last lines at hand."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from pathlib import Path

from flashnext.artefacts import state_written

CAP_BYTES = 16 * 1024 * 1024
KEEP = 100


class LogFile:
    """Appends lines to a file that moves to ``.1`` at the cap, so the two never exceed twice the cap.

    Never raises after opening: a full disk costs lines (counted in ``lost``), never the server.
    """

    def __init__(self, path: Path, *, cap_bytes: int = CAP_BYTES) -> None:
        self.path = path
        self.cap_bytes = cap_bytes
        self.lost = 0
        self.last: deque[str] = deque(maxlen=KEEP)
        self._lock = threading.Lock()
        with state_written(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = path.open("ab", buffering=0)
        self._size = path.stat().st_size

    def write(self, source: str, lines: list[str]) -> None:
        """Append lines, each with the name of the child that wrote it."""
        kept = [f"{source}| {line[:4096]}" for line in lines]
        data = ("\n".join(kept) + "\n").encode("utf-8", "replace")
        with self._lock:
            self.last.extend(kept)
            try:
                if self._size + len(data) > self.cap_bytes:
                    self._rotate()
                self._stream.write(data)
                self._size += len(data)
            except (OSError, ValueError):
                self.lost += len(lines)

    def tail(self, count: int = KEEP) -> list[str]:
        with self._lock:
            return list(self.last)[-count:]

    def close(self) -> None:
        with self._lock:
            self._stream.close()

    def _rotate(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # somebody tidied up
            self.path.replace(self.path.with_name(self.path.name + ".1"))
        fresh = self.path.open("ab", buffering=0)  # the old one stays in use where this fails
        self._stream.close()
        self._stream, self._size = fresh, 0
