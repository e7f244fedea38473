"""Keeps what a long run saw: a JSON file in the folder FLASHNEXT_PHASE_RECORD, nothing without it."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def keep(name: str, **data: Any) -> None:
    folder = os.environ.get("FLASHNEXT_PHASE_RECORD")
    if folder:
        Path(folder, f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")


def parts(markers: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Least, median and greatest of every duration in the markers, in milliseconds."""
    names = [key for key in (markers[0] if markers else {}) if key.endswith("ms")]
    columns = {name: [float(marker[name]) for marker in markers] for name in names}
    return {
        name: {"min": min(values), "median": statistics.median(values), "max": max(values)}
        for name, values in columns.items()
    }
