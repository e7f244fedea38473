"""The control port: what the service is doing, for programs and for a person's browser. Loopback only.

It reads the supervisor's record and changes nothing. Clients of the model never pass through here.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources

from flashnext.errors import PortInUseError
from flashnext.serve.metrics import exposition
from flashnext.serve.states import State
from flashnext.services import Service

_HOSTS = {"127.0.0.1", "localhost", "[::1]"}
_KEEP_LINES = 100
_LOOKS_ON_S = 3.0  # a page asks every second


class Control:
    """Serves on a loopback port (0: a free one), in threads of its own, until :meth:`close`."""

    def __init__(
        self,
        service: Callable[[], Service],
        log_tail: Callable[[int], list[str]],
        server_metrics: Callable[[], str] = str,
        *,
        port: int = 0,
    ) -> None:
        try:
            self._server = _Server(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise PortInUseError(
                f"127.0.0.1:{port} (server.control_port) cannot be bound", context=[str(error)]
            ) from None
        self._server.service, self._server.log_tail = service, log_tail
        self._server.server_metrics = server_metrics
        threading.Thread(target=self._server.serve_forever, name="control", daemon=True).start()

    def farewell(self, limit_s: float = 1.5) -> None:
        """Somebody who looks on has a moment to learn how it ended; nobody waits where nobody looks."""
        if time.monotonic() - self._server.asked < _LOOKS_ON_S:
            self._server.told.clear()
            self._server.told.wait(limit_s)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    service: Callable[[], Service]
    log_tail: Callable[[int], list[str]]
    server_metrics: Callable[[], str]

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self.asked = float("-inf")  # when the status was asked for last
        self.told = threading.Event()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that left before it had its answer is nobody's problem; the default prints a traceback."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10

    def do_GET(self) -> None:
        # a page of another site that points its name at 127.0.0.1 would still send its own name
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host not in _HOSTS:
            self._answer(403, "text/plain", "only for this machine\n")
            return
        path, _, query = self.path.partition("?")
        service = self.server.service()
        match path:
            case "/healthz":
                self._answer(200, "text/plain", "ok\n")
            case "/readyz":
                ready = service.state == State.READY
                self._answer(200 if ready else 503, "application/json", json.dumps(readiness(service)))
            case "/status":
                self._answer(200, "application/json", service.model_dump_json())
                self.server.asked = time.monotonic()
                self.server.told.set()
            case "/metrics":
                text = exposition(service, self.server.server_metrics())
                self._answer(200, "text/plain; version=0.0.4; charset=utf-8", text)
            case "/logs":
                count = urllib.parse.parse_qs(query).get("n", [str(_KEEP_LINES)])[0]
                lines = self.server.log_tail(min(int(count), _KEEP_LINES) if count.isdigit() else _KEEP_LINES)
                self._answer(200, "text/plain; charset=utf-8", "\n".join(lines) + "\n")
            case "/":
                page = resources.files("flashnext.serve").joinpath("page.html").read_text(encoding="utf-8")
                self._answer(200, "text/html; charset=utf-8", page)
            case _:
                self._answer(404, "text/plain", "there are / /healthz /readyz /status /metrics /logs\n")

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """No access log: pollers would drown everything else."""


def readiness(service: Service) -> dict[str, object]:
    """``{ready, state, progress, message}``; progress is the share of the prompt that is read, else None."""
    progress = service.counters.get("prompt_share")
    ready = service.state == State.READY
    return {"ready": ready, "state": service.state, "progress": progress, "message": service.reason}
