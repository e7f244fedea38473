"""launch/demo and launch/test say what is missing before they do anything."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("bash", "env", "dirname", "cksum", "cat", "mktemp", "rm", "git")


def run(script: str, tmp_path: Path, programs: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a copy of the script, beside a PATH that has only the named programs and what bash needs."""
    checkout = tmp_path / "checkout"
    (checkout / "launch").mkdir(parents=True)
    for name in (script, "prepare.sh"):
        shutil.copy(ROOT / "launch" / name, checkout / "launch" / name)
    shutil.copy(ROOT / "pyproject.toml", checkout)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None, name
        (tools / name).symlink_to(found)
    for name, text in programs.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    env = {"PATH": str(tools), "HOME": str(tmp_path)}
    return subprocess.run(
        [str(checkout / "launch" / script)], env=env, capture_output=True, text=True, timeout=30, check=False
    )


@pytest.mark.parametrize("script", ["demo", "test"])
def test_no_compiler(script: str, tmp_path: Path) -> None:
    done = run(script, tmp_path, {})
    assert done.returncode == 7
    assert "error: c++ was not found" in done.stderr and "hint: install it" in done.stderr


@pytest.mark.parametrize("script", ["demo", "test"])
def test_only_an_old_python(script: str, tmp_path: Path) -> None:
    done = run(script, tmp_path, {"c++": "#!/bin/sh\n", "python3": "#!/bin/sh\nexit 1\n"})
    assert done.returncode == 7
    assert "error: no Python 3.11 or newer was found" in done.stderr and "PYTHON=" in done.stderr
    assert not (tmp_path / "checkout/.venv").exists()


def test_scripts_are_executable() -> None:
    for name in ("launch/demo", "launch/test", ".ci/run"):
        assert os.access(ROOT / name, os.X_OK), name
