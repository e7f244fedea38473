"""A package index on loopback, as JSON or HTML, that can misbehave."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PROJECT = "small-llama"


@dataclass
class Index:
    """What the server says. ``log`` holds (path, Range header) of every request."""

    file: Path
    sha256: str
    form: str = "json"
    offered_sha256: str | None = None
    lists_file: bool = True
    page_status: int = 200
    page_type: str | None = None
    page_body: str | None = None
    file_status: list[int] = field(default_factory=list)  # one per request; 200 (or 206) when used up
    cut_after: list[int] = field(default_factory=list)  # close the connection after so many body bytes
    truncate_to: int | None = None  # an honest Content-Length of a shorter file
    ranges: bool = True
    serve_other: bytes | None = None
    credentials: str | None = None
    on_body: Callable[[int], None] = lambda _: None
    log: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""

    def requests(self, kind: str) -> list[tuple[str, str | None]]:
        return [entry for entry in self.log if kind in entry[0]]

    def page(self) -> tuple[str, bytes]:
        digest = self.offered_sha256 if self.offered_sha256 is not None else self.sha256
        names = ["small_llama-0.9.tar.gz", *([self.file.name] if self.lists_file else [])]
        if self.form == "json":
            hashes = {"sha256": digest} if digest else {}
            files = [{"filename": n, "url": f"../../files/{n}", "hashes": hashes} for n in names]
            text = json.dumps({"meta": {"api-version": "1.1"}, "name": PROJECT, "files": files})
            return "application/vnd.pypi.simple.v1+json", text.encode()
        mark = f"#sha256={digest}" if digest else ""
        links = "".join(f'<a href="../../files/{n}{mark}" data-yanked>{n}</a><br>' for n in names)
        return "text/html; charset=utf-8", f"<!DOCTYPE html><html><body>{links}</body></html>".encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    index: Index

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        index = self.index
        index.log.append((self.path, self.headers.get("Range")))
        if index.credentials is not None:
            wanted = "Basic " + base64.b64encode(index.credentials.encode()).decode()
            if self.headers.get("Authorization") != wanted:
                return self._answer(401, "text/plain", b"who are you")
        if self.path == f"/simple/{PROJECT}/":
            media_type, body = index.page()
            body = index.page_body.encode() if index.page_body is not None else body
            return self._answer(index.page_status, index.page_type or media_type, body)
        if self.path == f"/files/{index.file.name}":
            return self._file()
        return self._answer(404, "text/plain", b"not here")

    def _answer(self, status: int, media_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self) -> None:
        index = self.index
        status = index.file_status.pop(0) if index.file_status else 200
        if status != 200:
            return self._answer(status, "text/plain", b"not now")
        body = index.serve_other if index.serve_other is not None else index.file.read_bytes()
        body = body[: index.truncate_to] if index.truncate_to is not None else body
        start = 0
        asked = re.match(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if asked and index.ranges:
            start = int(asked.group(1))
            if start >= len(body):
                return self._answer(416, "text/plain", b"")
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        index.on_body(start)
        rest = body[start:]
        if index.cut_after:
            self.wfile.write(rest[: index.cut_after.pop(0)])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)
            return None
        self.wfile.write(rest)
        return None


@contextmanager
def serve(index: Index) -> Iterator[Index]:
    """Serve an index on a free loopback port; ``index.url`` is then its index-url."""
    handler = type("Handler", (_Handler,), {"index": index})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    index.url = f"http://127.0.0.1:{server.server_address[1]}/simple"
    try:
        yield index
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
