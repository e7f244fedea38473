"""sd_notify: what systemd wants to hear, over its datagram socket. Without one, nothing happens."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

_EXTEND_S = 60
_EXTEND_EVERY_S = 15.0


class Notifier:
    """Speaks to ``NOTIFY_SOCKET``. Never raises: a service manager that is gone must not end the service."""

    def __init__(self, env: Mapping[str, str] = os.environ) -> None:
        path = env.get("NOTIFY_SOCKET", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path
        usec = env.get("WATCHDOG_USEC", "")
        self._watchdog_s = int(usec) / 2_000_000 if usec.isdigit() else 0.0
        self._fed = self._extended = float("-inf")

    def send(self, **fields: str | int) -> None:
        """One datagram of ``NAME=value`` lines."""
        if not self._address:
            return
        text = "\n".join(f"{name}={value}" for name, value in fields.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as speaker:
                speaker.sendto(text.encode(), self._address)
        except OSError:
            return

    def loading(self) -> None:
        """More time, asked for while a load shows progress: 60 s from now, at most every 15 s."""
        now = time.monotonic()
        if now - self._extended >= _EXTEND_EVERY_S:
            self._extended = now
            self.send(EXTEND_TIMEOUT_USEC=_EXTEND_S * 1_000_000)

    def alive(self) -> None:
        """Feed the watchdog, twice per period."""
        now = time.monotonic()
        if self._watchdog_s and now - self._fed >= self._watchdog_s:
            self._fed = now
            self.send(WATCHDOG=1)
