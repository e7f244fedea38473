"""The one grammar of our native code's log markers: ``fn:<kind>:<event> {json}``, on a line of its own.

Kind and event are lower-case words joined by hyphens; the JSON is one object on the same line. The C++ side
writes them in one header; both are held to the golden lines in tests/data/markers.txt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Lines that go through llama-server's logger carry its clock and level in front.
_PREFIX = r"(?:\d+(?:\.\d{2,3}){3} [A-Z] )?"
_NAME = r"[a-z][a-z0-9-]*"
_LINE = re.compile(rf"{_PREFIX}fn:(?P<kind>{_NAME}):(?P<event>{_NAME}) (?P<data>\{{.*\}})\s*")
MAX_CHARS = 64 * 1024


@dataclass(frozen=True)
class Marker:
    """One marker line: what spoke, what happened, and its facts."""

    kind: str
    event: str
    data: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.event}"


def parse(line: str) -> Marker | None:
    """The marker in a log line, or None for every other line. Never raises."""
    if "fn:" not in line[:24] or len(line) > MAX_CHARS:
        return None
    match = _LINE.fullmatch(line)
    if match is None:
        return None
    try:
        data = json.loads(match["data"])
    except (ValueError, RecursionError):
        return None
    return Marker(match["kind"], match["event"], data) if isinstance(data, dict) else None
