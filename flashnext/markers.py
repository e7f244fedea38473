"""The one grammar of our native code's log markers: ``fn:<kind>:<event> {json}``, alone on a line.

Kind and event are lower-case words joined by hyphens; the JSON is one object on the same line. The C++ side
writes them in one header; both are held to the golden lines in tests/data/markers.txt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LINE = re.compile(r"fn:(?P<kind>[a-z][a-z0-9-]*):(?P<event>[a-z][a-z0-9-]*) (?P<data>\{.*\})\s*")
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
    if not line.startswith("fn:") or len(line) > MAX_CHARS:
        return None
    match = _LINE.fullmatch(line)
    if match is None:
        return None
    try:
        data = json.loads(match["data"])
    except (ValueError, RecursionError):
        return None
    return Marker(match["kind"], match["event"], data) if isinstance(data, dict) else None
