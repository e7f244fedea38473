"""Small parts of starting a server by its build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashnext import builds
from flashnext.bench.launching import _reason
from flashnext.errors import NoBuildError
from flashnext.proc import Done
from flashnext.profile.load import load
from flashnext.serve import binary


def test_the_reason_of_a_refused_command_line_is_the_refusal() -> None:
    said = '{"error": "no-build", "message": "no build", "context": ["a", "b"], "hint": "x", "exit_code": 4}'
    assert _reason(Done(4, said, "")) == "no build; a; b"
    assert _reason(Done(1, "", "Traceback")) == "ended with code 1: Traceback"
    assert _reason(Done(1, "[]", "")) == "ended with code 1: []"


class Installed:
    def __init__(self, root: Path, *programs: str) -> None:
        self.bin = root
        root.mkdir()
        for name in programs:
            (root / name).write_text("")


def test_a_build_without_virtual_gpus_borrows_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Installed(tmp_path / "plain", "llama-server")
    ours = Installed(tmp_path / "ours", "llama-server", "fn-vgpu")
    listed: list[Any] = [plain, ours]
    monkeypatch.setattr(builds, "list_builds", lambda: listed)
    monkeypatch.setattr(binary, "choose", lambda loaded, series: (_ for _ in ()).throw(NoBuildError("none")))
    assert binary.vgpu(load("demo"), "series") == ours.bin / "fn-vgpu"
    listed.remove(ours)
    with pytest.raises(NoBuildError):
        binary.vgpu(load("demo"), "series")
