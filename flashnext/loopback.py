"""HTTP to our own children: loopback, the standard library's client, no proxies, no redirects, no retries.

``net.py`` is for the outside world; nothing here ever leaves the machine.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


class UnreachableError(Exception):
    """No answer: nobody listens, the connection broke, or the time is over."""


@dataclass(frozen=True)
class Reply:
    """Status and body of an answer; ``data`` is the parsed JSON, None where the body is none."""

    status: int
    text: str
    data: Any


def request(
    address: tuple[str, int],
    path: str,
    *,
    body: dict[str, Any] | None = None,
    key: str | None = None,
    timeout_s: float = 5.0,
) -> Reply:
    """GET (or POST, with a body) one path. ``timeout_s`` bounds each wait on the socket, not their sum."""
    headers = {"Content-Type": "application/json"} if body is not None else {}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    connection = http.client.HTTPConnection(*address, timeout=timeout_s)
    try:
        payload = json.dumps(body) if body is not None else None
        connection.request("POST" if body is not None else "GET", path, payload, headers)
        answer = connection.getresponse()
        text = answer.read().decode("utf-8", "replace")
        status = answer.status
    except (OSError, http.client.HTTPException) as error:
        raise UnreachableError(f"{path}: {type(error).__name__}: {error}") from None
    finally:
        connection.close()
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    return Reply(status, text, data)


def ask_line(address: tuple[str, int], line: str, *, timeout_s: float = 2.0) -> dict[str, Any]:
    """Send one line to a control port and return the JSON object that comes back. Raises UnreachableError."""
    try:
        with socket.create_connection(address, timeout=timeout_s) as connection:
            connection.sendall(line.encode() + b"\n")
            with connection.makefile("rb") as stream:
                value = json.loads(stream.readline(65_536))
    except (OSError, ValueError) as error:
        raise UnreachableError(f"{line}: {type(error).__name__}: {error}") from None
    if not isinstance(value, dict):
        raise UnreachableError(f"{line}: no object")
    return value


class RefusedError(Exception):
    """An answer with an error status in place of a stream."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(f"HTTP {reply.status}: {reply.text[:300]}")
        self.reply = reply


def stream(
    address: tuple[str, int],
    path: str,
    body: dict[str, Any],
    *,
    key: str | None = None,
    timeout_s: float = 3600.0,
) -> Iterator[Any]:
    """POST and yield the JSON of every server-sent event until the end of the stream.

    Closing the iterator closes the connection: the server sees a client that leaves. Raises RefusedError for
    an error status, UnreachableError where the connection breaks or ``timeout_s`` pass without a byte.
    """
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    connection = http.client.HTTPConnection(*address, timeout=timeout_s)
    try:
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise RefusedError(Reply(answer.status, answer.read().decode("utf-8", "replace"), None))
        for raw in answer:
            line = raw.decode("utf-8", "replace").rstrip("\r\n")
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line[len("data: ") :])
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise UnreachableError(f"{path}: {type(error).__name__}: {error}") from None
    finally:
        connection.close()
