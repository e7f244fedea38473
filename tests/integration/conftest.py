"""Fixtures of the tests that run whole commands over the fake server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from serve_home import FakeHome


@pytest.fixture
def home(tmp_path: Path) -> Iterator[FakeHome]:
    made = FakeHome(tmp_path)
    yield made
    made.close()
