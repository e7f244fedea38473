"""Two hundred broken profiles through `flashnext serve`: every planted fault is told, and nothing runs."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashnext import cli, proc
from flashnext.profile import load
from flashnext.serve import prepare

COUNT = 200
_SETTINGS = settings(
    max_examples=COUNT, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
BASES = {name: yaml.safe_load(load.find(name).read_text()) for name in ("demo", "demo-full", "2x3090")}

# (section, key, value, what is told): each is wrong whatever stands beside it
FAULTS: list[tuple[str, str, Any, str]] = [
    ("context", "micro_batch", "2k", "context.micro_batch"),
    ("context", "size", -256, "context.size"),
    ("context", "batch", 0, "context.batch"),
    ("context", "sequences", 65, "context.sequences"),
    ("context", "kv_type", "q4", "context.kv_type"),
    ("context", "checkpoints", 1.5, "context.checkpoints"),
    ("context", "ctx_size", 4096, "write context.size"),
    ("devices", "count", 0, "devices.count"),
    ("devices", "kind", "vulkan", "devices.kind"),
    ("devices", "cards", [1, 2], "devices.cards"),
    ("model", "mmproj", "x.gguf", "text only"),
    ("model", "hf_repo", "a/b", "never downloads"),
    ("model", "synthetic", "huge", "model.synthetic"),
    ("server", "port", 80_800, "server.port"),
    ("server", "timeout_s", 60, "server.timeout_s"),
    ("server", "alias", "", "server.alias"),
    ("server", "sleep_idle_seconds", 60, "server.sleep_idle_seconds"),
    ("server", "threads", True, "server.threads"),
    ("life", "restarts", 11, "life.restarts"),
    ("life", "stop_limit_s", 0, "life.stop_limit_s"),
    ("life", "load_limit_s", "never", "life.load_limit_s"),
    ("attention", "flash", "maybe", "attention.flash"),
    ("load", "mode", "magic", "load.mode"),
    ("numa", "interleave", 1, "numa.interleave"),
    ("expert_cache", "slots", 0, "expert_cache.slots"),
    ("mtp", "depth", 99, "mtp.depth"),
    ("phase_prefill", "micro_batch", 1024, "phase_prefill.micro_batch"),
]


class ReachedError(Exception):
    """The profile was sound: the checks of the machine would follow."""


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`flashnext serve FILE --json` in this process: its exit code and what it printed. Nothing may start."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))

    def launched(*words: Any, **_: Any) -> None:
        raise AssertionError(f"launched: {words}")

    def reached(*_: Any) -> None:
        raise ReachedError

    for name in ("run", "start"):
        monkeypatch.setattr(proc, name, launched)
    monkeypatch.setattr(subprocess, "Popen", launched)
    monkeypatch.setattr(prepare, "prepare", reached)
    file = tmp_path / "mutant.yaml"

    def run(raw: bytes) -> tuple[int, str]:
        file.write_bytes(raw)
        monkeypatch.setattr(
            sys, "argv", ["flashnext", "serve", "--profile", str(file), "--port", "0", "--json"]
        )
        monkeypatch.setattr(sys.modules["__main__"], "__package__", None)
        out, err = io.StringIO(), io.StringIO()
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as ended,
        ):
            cli.main()
        return int(ended.value.code or 0), out.getvalue() + err.getvalue()

    return run


def test_every_planted_fault_is_told_at_once(serve: Any) -> None:
    ran = 0

    @_SETTINGS
    @given(st.sampled_from(sorted(BASES)), st.lists(st.sampled_from(FAULTS), min_size=1, max_size=8))
    def mutant(base: str, faults: list[tuple[str, str, Any, str]]) -> None:
        nonlocal ran
        ran += 1
        data = deepcopy(BASES[base])
        planted = {(section, key): (value, words) for section, key, value, words in faults}
        for (section, key), (value, _) in planted.items():
            data[section] = {**data.get(section, {}), key: value}
        code, text = serve(yaml.safe_dump(data, sort_keys=False).encode())
        assert code == 3, text
        told = json.loads(text)
        assert told["error"] == "profile-invalid" and told["hint"]
        missing = [words for _, words in planted.values() if not any(words in c for c in told["context"])]
        assert missing == [], told["context"]
        assert all(c.startswith("mutant.yaml:") for c in told["context"])

    mutant()
    assert ran >= COUNT


def test_any_mutilation_has_an_answer(serve: Any) -> None:
    """Lines dropped, doubled, moved, overwritten: reasons, or a sound profile; no bug, no launch."""
    ran, refused = 0, 0
    pieces = [
        "on",
        "010",
        "~",
        "[",
        "{a: b}",
        "&a",
        "*a",
        "\t",
        "!!x",
        "'",
        '"',
        ": ",
        "- ",
        "2k",
        "1e9",
        "é",
        "%",
    ]

    @_SETTINGS
    @given(st.sampled_from(sorted(BASES)), st.data())
    def mutant(base: str, draw: st.DataObject) -> None:
        nonlocal ran, refused
        ran += 1
        lines = load.find(base).read_text().splitlines()
        for _ in range(draw.draw(st.integers(1, 6))):
            at, other = (draw.draw(st.integers(0, len(lines) - 1)) for _ in range(2))
            match draw.draw(st.sampled_from(["drop", "double", "swap", "indent", "value", "text", "cut"])):
                case "drop":
                    lines[at] = ""
                case "double":
                    lines.insert(at, lines[at])
                case "swap":
                    lines[at], lines[other] = lines[other], lines[at]
                case "indent":
                    lines[at] = " " * draw.draw(st.integers(0, 5)) + lines[at].strip()
                case "value":
                    lines[at] = lines[at].partition(":")[0] + ": " + draw.draw(st.sampled_from(pieces))
                case "text":
                    lines[at] += draw.draw(st.text(max_size=8))
                case _:
                    del lines[max(1, at) :]
        code, text = serve("\n".join(lines).encode("utf-8", "replace"))
        if "ReachedError" in text:
            return  # what was hit was a comment, or a value that may be another
        refused += 1
        assert code == 3, text
        told = json.loads(text)
        assert told["error"] in ("profile-invalid", "profile-not-qualified") and told["context"], text
        assert all(c.startswith("mutant.yaml") for c in told["context"]), text

    mutant()
    assert ran >= COUNT and refused > COUNT / 4
