"""What the Grafana board and the alert rules under launch/ ask Prometheus for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

LAUNCH = Path(__file__).parents[1] / "launch"
BOARD = LAUNCH / "grafana/flashnext.json"
ALERTS = LAUNCH / "prometheus/alerts.yml"
_SERIES = re.compile(r"(?<![\w:$\"])(?:flashnext|fn|llamacpp)[_:][a-z0-9_:]+")


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of everything in board and rules."""
    board: dict[str, Any] = json.loads(BOARD.read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for note in board["annotations"]["list"]:
        yield note["name"], note["expr"]
    for variable in board["templating"]["list"]:
        yield variable["name"], variable["query"]
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def names() -> dict[str, str]:
    """Series, and where one is used."""
    return {name: where for where, text in expressions() for name in _SERIES.findall(text)}
