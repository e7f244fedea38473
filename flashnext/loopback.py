"""HTTP to our own children: loopback, the standard library's client, no proxies, no redirects, no retries.

``net.py`` is for the outside world; nothing here ever leaves the machine.
"""

from __future__ import annotations

import http.client
import json
import socket
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
