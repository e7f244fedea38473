"""The only place that starts a process: environment from an allowlist, own process group, time limits."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

# What a child may inherit. Everything else (llama-server reads some 190 names) stays outside.
ALLOWED = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "TERM",
    "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
)
# What a compiler run may inherit on top.
ALLOWED_BUILD = (
    "CC",
    "CXX",
    "CUDACXX",
    "CUDAHOSTCXX",
    "CUDA_HOME",
    "CUDA_PATH",
    "CCACHE_DIR",
    "CCACHE_DISABLE",
    "CCACHE_MAXSIZE",
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
)
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def environment(extra: Mapping[str, str] | None = None, *, also: Sequence[str] = ()) -> dict[str, str]:
    """A fresh environment: the allowlisted names of ours (and ``also``), then ``extra``."""
    env = {name: os.environ[name] for name in (*ALLOWED, *also) if name in os.environ}
    env.update(extra or {})
    return env


@dataclass(frozen=True)
class Done:
    """How a finished command ended. ``code`` is negative for a signal, as subprocess reports it."""

    code: int
    out: str
    err: str

    @property
    def ok(self) -> bool:
        return self.code == 0


def run(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float = 60.0,
    stdin: str | None = None,
) -> Done:
    """Run a short command to its end and return its output.

    A missing program is code 127, a run past ``timeout_s`` is killed with its whole group and is code 124.
    """
    try:
        child = subprocess.Popen(
            [str(a) for a in argv],
            env=dict(env) if env is not None else environment(),
            cwd=cwd,
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        return Done(127, "", str(error))
    try:
        out, err = child.communicate(stdin, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        kill_group(child)
        out, err = child.communicate()
        return Done(124, out, err + f"\nkilled after {timeout_s:g} s")
    except BaseException:
        kill_group(child)
        child.wait()
        raise
    return Done(child.returncode, out, err)


def hand_over(argv: Sequence[str | Path], *, cwd: Path) -> int:
    """Give the terminal to a program of the person's own (their shell) and return its exit code.

    It keeps their environment and stays in our process group, unlike every other child.
    """
    return subprocess.call([str(a) for a in argv], cwd=cwd)


def die_with_parent() -> None:
    """In a child, before exec: be killed when the parent dies, however it dies (Linux)."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def start(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdout: int | IO[Any] = subprocess.PIPE,
    stderr: int | IO[Any] = subprocess.STDOUT,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[str]:
    """Start a long-lived child in its own process group that dies with us. The caller owns and reaps it.

    ``pass_fds`` are open file handles that the child (and its children) inherit, a held lock for instance.

    The death signal follows the *thread* that starts the child: start children from a thread that lives on.
    """
    return subprocess.Popen(
        [str(a) for a in argv],
        env=dict(env) if env is not None else environment(),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        errors="replace",
        start_new_session=True,
        pass_fds=tuple(pass_fds),
        preexec_fn=die_with_parent,
    )


def detach(argv: Sequence[str | Path], *, env: Mapping[str, str], cwd: Path, log: Path) -> int:
    """Start a process that outlives us, in a session of its own, its output in ``log``. Returns its pid."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stream:
        child = subprocess.Popen(
            [str(a) for a in argv],
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return child.pid


def kill_group(child: subprocess.Popen[Any], sig: signal.Signals = signal.SIGKILL) -> None:
    """Signal the child's whole process group; a group that is gone is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, sig)


def stop(child: subprocess.Popen[Any], *, term_s: float = 5.0, again_s: float = 2.0) -> int:
    """End a child: TERM, a second TERM after ``term_s``, KILL after ``again_s`` more. Returns the code."""
    for sig, wait_s in ((signal.SIGTERM, term_s), (signal.SIGTERM, again_s), (signal.SIGKILL, 10.0)):
        if child.poll() is not None:
            break
        kill_group(child, sig)
        try:
            child.wait(wait_s)
        except subprocess.TimeoutExpired:
            continue
    kill_group(child)
    return child.wait()


def own_module(module: str, *words: str) -> list[str]:
    """The command line of a module of ours.

    ``-P`` keeps the folder that a person stands in out of it: a yaml.py there, or another checkout.
    """
    return [sys.executable, "-P", "-m", module, *words]


def is_nohup(number: int) -> bool:
    """Whether we were started with `nohup`: then the terminal's end is none of our business."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def wait_until(ready: Any, *, timeout_s: float, every_s: float = 0.05) -> bool:
    """Poll ``ready()`` until it is true or the deadline passes; returns whether it became true."""
    deadline = time.monotonic() + timeout_s
    while True:
        if ready():
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(every_s)
