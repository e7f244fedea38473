"""Ninja: how many jobs, progress from its status line, and a compiler that was killed for memory."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from flashnext import console, proc
from flashnext.build.workspace import WorkLock, Workspace, drop_unfinished, end_session
from flashnext.errors import CompileFailedError, CompilerKilledError, ConfigureFailedError
from flashnext.probe.host import HostFacts, probe_host

# Peak of one compiler process; CUDA template instances are the largest.
JOB_BYTES = {"cpu": 3 << 29, "cuda": 4 << 30}
_STATUS = re.compile(r"^\[(\d+)/(\d+)\] (.*)")
# gcc, clang, nvcc and the shell each say in their own words that the kernel killed a compiler.
_KILLED = re.compile(
    r"\[code=(137|9)\]|\bKilled\b|signal 9\b|died due to signal|terminated by signal 9|"
    r"out of memory allocating|virtual memory exhausted|Cannot allocate memory|std::bad_alloc"
)
_SHOWN_LINES = 30
_STOP_S = 20.0


def jobs_for(host: HostFacts, backend: str, wanted: int | None = None) -> int:
    """Compilers at once: cores, bounded by the memory that is available; ``wanted`` replaces both."""
    if wanted is not None:
        return max(1, wanted)
    return max(1, min(host.cores, host.available_bytes // JOB_BYTES[backend]))


@dataclass
class _Run:
    """What one ninja run said."""

    code: int = 0
    done: int = 0
    total: int = 0
    failed: list[str] = field(default_factory=list)  # the lines of failed commands
    other: list[str] = field(default_factory=list)  # the lines outside of any command

    @property
    def was_killed(self) -> bool:
        return self.code == -signal.SIGKILL or any(_KILLED.search(line) for line in self.failed)


def compile_targets(
    work: Workspace,
    lock: WorkLock,
    *,
    ninja: Path,
    targets: Sequence[str],
    backend: str,
    jobs: int,
    env: Mapping[str, str],
    log: Path,
) -> int:
    """Compile targets; returns the number of commands that ran.

    A compiler that the kernel killed is continued with half the jobs, down to one. Raises CompileFailedError,
    CompilerKilledError or ConfigureFailedError (ninja runs CMake again when a CMakeLists.txt moved).
    """
    steps = 0
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as stream:
        while True:
            argv = [str(ninja), "-C", str(work.build), "-j", str(jobs), *targets]
            run = _run(argv, work, lock, env, stream)
            steps += run.done
            if run.code == 0:
                return steps
            if not run.was_killed:
                raise _failure(run, log)
            if jobs == 1:
                raise CompilerKilledError(
                    "a compiler was killed with one job: memory ran out",
                    context=[f"log {log}", *run.failed[:_SHOWN_LINES]],
                )
            fewer = max(1, min(jobs // 2, jobs_for(probe_host(), backend)))
            console.say(f"a compiler was killed: memory ran out with {jobs} jobs, continuing with {fewer}")
            jobs = fewer


def _failure(run: _Run, log: Path) -> CompileFailedError | ConfigureFailedError:
    if any("rebuilding 'build.ninja'" in line for line in run.other):
        return ConfigureFailedError("CMake failed", context=[f"log {log}", *run.other[-_SHOWN_LINES:]])
    lines = run.failed or run.other
    errors = [line for line in lines if re.search(r"\berror\b|undefined reference|FAILED:", line)]
    shown = (errors or lines)[:_SHOWN_LINES] if len(lines) > _SHOWN_LINES else lines
    return CompileFailedError(f"compiling failed (ninja's code {run.code})", context=[f"log {log}", *shown])


def _run(argv: Sequence[str], work: Workspace, lock: WorkLock, env: Mapping[str, str], log: IO[str]) -> _Run:
    drop_unfinished(work)
    work.compiling.write_text("")
    log.write("$ " + " ".join(argv) + "\n")
    child = proc.start(argv, env=env, cwd=work.root, pass_fds=(lock.handle,))
    try:
        lock.note_session(child.pid)
        run = _follow(child, log)
    except BaseException:
        # ninja passes the signal on to its compilers (in groups of their own) and removes what they wrote
        proc.stop(child, term_s=_STOP_S)
        work.compiling.unlink(missing_ok=True)
        raise
    if run.code >= 0:
        work.compiling.unlink(missing_ok=True)
    else:
        # ninja itself was killed: its compilers live on, and what they were writing is not whole
        end_session(child.pid, work.lock)
    return run


def _follow(child: subprocess.Popen[str], log: IO[str]) -> _Run:
    assert child.stdout is not None
    run = _Run()
    in_failed = False
    with console.progress() as bar:
        task = bar.add_task("compile", total=None)
        tell = _plain_teller(disabled=not bar.disable)
        for line in child.stdout:
            log.write(line)
            text = line.rstrip("\n")
            status = _STATUS.match(text)
            if status:
                in_failed = False
                run.done, run.total = int(status[1]), int(status[2])
                bar.update(task, completed=run.done, total=run.total)
                tell(run.done, run.total)
            elif text.startswith("FAILED: "):
                in_failed = True
            elif text.startswith("ninja: "):
                in_failed = False
            if not status:
                (run.failed if in_failed else run.other).append(text)
    run.code = child.wait()
    return run


def _plain_teller(*, disabled: bool) -> Callable[[int, int], None]:
    """Progress where stderr is no terminal: a line at most every 15 seconds."""
    last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        if not disabled and (time.monotonic() - last >= 15 or done == total):
            last = time.monotonic()
            console.say(f"compile {done}/{total}")

    return tell
