"""launch/demo and launch/test say what is missing before they do anything."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
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


def in_venv(tmp_path: Path, text: str) -> None:
    """Put a program in the place of the Python of the checkout's .venv."""
    python = tmp_path / "checkout/.venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(text)
    python.chmod(0o755)


def test_half_a_venv_is_made_anew(tmp_path: Path) -> None:
    in_venv(tmp_path, "#!/bin/sh\nexit 1\n")
    maker = '#!/bin/sh\ncase "$*" in "-m venv"*) echo "made: $*" >&2; exit 1;; esac\n'
    done = run("demo", tmp_path, {"c++": "#!/bin/sh\n", "python3": maker})
    assert "made: -m venv --clear" in done.stderr
    assert done.returncode == 7 and "could not be made" in done.stderr


def test_ctrl_c_in_pip_is_no_network_error(tmp_path: Path) -> None:
    in_venv(tmp_path, '#!/bin/sh\ncase "$*" in *install*) kill -INT $PPID; exit 1;; esac\n')
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell cannot trap what is ignored
    try:
        done = run("demo", tmp_path, {"c++": "#!/bin/sh\n", "python3": "#!/bin/sh\n"})
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.returncode == 130
    assert "network" not in done.stderr


def test_no_answer_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch/ask.py"), f"http://127.0.0.1:{port}/v1", "Why?"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 8
    assert done.stderr.startswith("error: no answer from") and done.stderr.count("\n") == 1


def test_ctrl_c_while_the_answer_comes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        command = [
            sys.executable,
            str(ROOT / "launch/ask.py"),
            f"http://127.0.0.1:{silent.getsockname()[1]}",
            "Why?",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as client:
            silent.settimeout(30)
            connection, _ = silent.accept()
            with connection:
                client.send_signal(signal.SIGINT)
                _, errors = client.communicate(timeout=30)
    assert client.returncode == -signal.SIGINT  # a shell calls it 130
    assert errors == ""


def test_scripts_are_executable() -> None:
    for name in ("launch/demo", "launch/test", ".ci/run"):
        assert os.access(ROOT / name, os.X_OK), name
