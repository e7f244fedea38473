"""`flashnext build` as a program: exit codes, JSON, listing, and how fast it says so."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flashnext import cli, paths
from flashnext.build import pipeline
from flashnext.build.workspace import Workspace, locked
from flashnext.errors import CompileFailedError
from flashnext.probe import toolchain as probe
from tests.fakes.programs import FakeBin
from tests.timing import best_time


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeBin:
    made = FakeBin(tmp_path)
    made.gxx()
    monkeypatch.setenv("PATH", made.path(made.cuda / "bin"))
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    for name in ("CC", "CXX", "CUDACXX", "CUDAHOSTCXX", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(probe, "DEFAULT_CUDA_ROOT", tmp_path / "none")
    return made


def flashnext(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["flashnext", *args])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


@pytest.mark.parametrize(
    ("args", "code", "id_"),
    [
        (["--backend", "cuda"], 7, "nvcc-missing"),
        (["--backend", "rocm"], 2, "build-options"),
        (["--cuda-arch", "native"], 2, "cuda-arch-invalid"),
        (["--cuda-arch", "86", "--backend", "cpu"], 2, "build-options"),
        (["--without", "nothing-of-ours", "--backend", "cpu"], 2, "unknown-feature"),
        (["--vanilla", "--tests"], 2, "build-options"),
        (["--list", "--verify"], 2, "build-options"),
        (["abc"], 2, "build-options"),
        (["--remove", "abc"], 2, "no-such-build"),
        (["--verify", "abc"], 2, "no-such-build"),
        (["--backend", "cpu", "--sdist", "/nonexistent/x.tar.gz"], 5, "sdist-not-found"),
    ],
)
def test_faults(
    args: list[str],
    code: int,
    id_: str,
    fakes: FakeBin,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert flashnext(monkeypatch, "build", "--json", *args) == code
    error = json.loads(capsys.readouterr().out)
    assert (error["error"], error["exit_code"]) == (id_, code)
    assert error["hint"]


def test_an_error_for_people_has_id_context_and_hint(
    fakes: FakeBin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.nvcc(archs="50 75")
    assert flashnext(monkeypatch, "build", "--backend", "cuda") == 7
    out, err = capsys.readouterr()
    assert out == ""
    assert "error[cuda-arch-unsupported]: this nvcc cannot compile for 86" in err
    assert f"  used {fakes.cuda / 'bin' / 'nvcc'} 12.4.88" in err
    assert "\nhint: " in err


def test_plan_says_everything_and_does_nothing(
    fakes: FakeBin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nvcc = fakes.nvcc()
    fakes.smi("0, GPU-a, NVIDIA GeForce RTX 4090, 8.9, 24576, 550.1", level="11.8")
    assert flashnext(monkeypatch, "build", "--plan", "--json", "--jobs", "7") == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["backend"], plan["archs"], plan["jobs"]) == ("cuda", ["89"], 7)
    assert plan["devices"] == ["NVIDIA GeForce RTX 4090"]
    assert plan["tools"]["nvcc"] == f"{nvcc} 12.4.88"
    assert plan["installed"] is False
    assert len(plan["warnings"]) == 1 and "driver" in plan["warnings"][0]
    assert not (tmp_path / "xdg_cache_home").exists() and not (tmp_path / "xdg_data_home").exists()
    assert flashnext(monkeypatch, "build", "--plan") == 0
    assert "backend: cuda" in capsys.readouterr().out.splitlines()


def test_nothing_installed_lists_nothing(
    fakes: FakeBin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flashnext(monkeypatch, "build", "--list", "--json") == 0
    assert json.loads(capsys.readouterr().out) == []
    assert flashnext(monkeypatch, "build", "--verify", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"verified": []}


@pytest.mark.parametrize(("raised", "code"), [(KeyboardInterrupt(), 130), (CompileFailedError("x"), 7)])
def test_how_a_build_ends(
    raised: BaseException, code: int, fakes: FakeBin, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(request: pipeline.Request) -> Any:
        raise raised

    monkeypatch.setattr(pipeline, "build", build)
    assert flashnext(monkeypatch, "build") == code


def test_help_is_quick() -> None:
    took, _ = best_time([sys.executable, "-m", "flashnext", "--help"], 0.3)
    assert took < 0.3


def test_prune_keeps_the_last_work_folder_and_what_is_at_work(
    fakes: FakeBin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flashnext(monkeypatch, "build", "--prune") == 0
    assert "nothing to remove" in capsys.readouterr().err
    works = [Workspace(paths.work_dir() / name) for name in ("cpu-old", "cuda-busy", "cpu-last")]
    for age, work in zip((300, 200, 100), works, strict=True):
        (work.build / "bin").mkdir(parents=True)
        (work.build / "bin/llama-server").write_bytes(b"x" * 8192)
        work.lock.touch()
        for path in (work.root, work.lock):
            os.utime(path, (time.time() - age,) * 2)
    old, busy, last = works
    with locked(busy):
        os.utime(busy.lock, (time.time() - 200,) * 2)
        assert flashnext(monkeypatch, "build", "--prune", "--json") == 0
        rows = {Path(r["folder"]).name: r for r in json.loads(capsys.readouterr().out)}
    assert set(rows) == {"cpu-old", "cuda-busy"} and rows["cpu-old"]["size_bytes"] >= 8192
    assert "another build works" in rows["cuda-busy"]["kept"] and rows["cpu-old"]["kept"] == ""
    assert not old.root.exists() and busy.bin.is_dir() and last.bin.is_dir()
    assert flashnext(monkeypatch, "build", "--prune") == 0
    assert f"removed {busy.root} (" in capsys.readouterr().out
    assert flashnext(monkeypatch, "build", "--prune", "--list") == 2
