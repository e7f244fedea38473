"""`flashnext model` as people and programs use it: data on stdout, people on stderr, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from model_variants import draft


def _run(*arguments: str | Path, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    if home is not None:
        env["XDG_DATA_HOME"] = str(home)
    code = "from flashnext.cli import main; main()"
    argv = [sys.executable, "-c", code, "model", *map(str, arguments)]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_synth_then_inspect(tmp_path: Path) -> None:
    done = _run("synth", "tiny", "--mtp", "shared", "--shards", "3", "--out", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [Path(name).name for name in result["files"]] == [
        "flashnext-tiny-00001-of-00003.gguf",
        "flashnext-tiny-00002-of-00003.gguf",
        "flashnext-tiny-00003-of-00003.gguf",
        "mtp-flashnext-tiny-shared-Q8_0.gguf",
    ]
    assert sum(Path(name).stat().st_size for name in result["files"]) == result["file_bytes"]
    seen = _run("inspect", result["model"], "--head", result["head"], "--json")
    assert seen.returncode == 0
    report = json.loads(seen.stdout)
    assert report["problems"] == []
    assert report["head"]["form"] == "shared"
    assert report["hyper"]["expert_count"] == 32
    assert len(report["tensors"]) == 214
    assert report["experts"][2]["types"] == ["Q5_K", "Q5_K", "Q8_0"]


def test_synth_prints_the_path_alone_and_defaults_to_the_models_folder(tmp_path: Path) -> None:
    done = _run("synth", "tiny", "--layers", "2", home=tmp_path)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    assert path == tmp_path / "flashnext" / "models" / "flashnext-tiny-2l.gguf"
    assert path.is_file()
    assert "tensors" in done.stderr


def test_inspect_for_people(tmp_path: Path) -> None:
    path = draft().write(tmp_path / "model.gguf")
    done = _run("inspect", path)
    assert done.returncode == 0
    for words in (
        "qwen4exp",
        "embedding_length",
        "blk.*.ffn_down_exps.weight",
        "layer 2",
        "draft head: none",
    ):
        assert words in done.stdout
    assert done.stderr == ""


def test_every_problem_is_shown_with_its_hint(tmp_path: Path) -> None:
    file = draft()
    file.drop("context_length")
    file.u32("ssm.inner_size", 7)
    done = _run("inspect", file.write(tmp_path / "model.gguf"))
    assert done.returncode == 4
    assert "error[model-key-missing]: model.gguf: qwen4exp.context_length is missing" in done.stderr
    assert "error[model-ssm-sizes]" in done.stderr
    assert "llama-server would abort" in done.stderr
    assert done.stderr.count("hint: ") == 2


@pytest.mark.parametrize("content", [None, b"", b"GGUF", b"#!/bin/sh\n"])
def test_bad_files_end_with_code_4_and_no_traceback(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    for extra in ([], ["--json"]):
        done = _run("inspect", path, *extra)
        assert done.returncode == 4
        assert "Traceback" not in done.stderr
        if extra:
            assert json.loads(done.stdout)["problems"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["synth", "huge"], 2, "huge"),
        (["synth", "tiny", "--layers", "1"], 2, "error[usage]"),
        (["synth", "tiny", "--shards", "0"], 2, "--shards"),
        (["synth", "tiny", "--expert-type", "q9"], 2, "q9"),
        (["synth", "tiny", "--out", "/proc/none/here"], 4, "error[model-write-failed]"),
    ],
)
def test_wrong_arguments(arguments: list[str], code: int, words: str) -> None:
    done = _run(*arguments)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr
