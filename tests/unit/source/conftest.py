"""A small upstream, with every cache folder inside the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from upstream import Upstream


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Upstream:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Upstream(tmp_path)
