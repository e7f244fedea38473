"""Ninja runs on small hand-written build files: memory kills, failures, leftovers of a killed run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flashnext import proc
from flashnext.build import ninja, workspace
from flashnext.build.workspace import Workspace, drop_unfinished
from flashnext.errors import BuildLockedError, CompileFailedError, CompilerKilledError
from flashnext.probe.toolchain import probe_ninja

# Fails as the kernel makes a compiler fail when more than LIMIT of it run at once.
HUNGRY = """#!/bin/sh
cd "$(dirname "$0")"
mkdir -p running
me=running/$$
: > $me
sleep 0.3
count=$(ls running | wc -l)
rm $me
if [ "$count" -gt {limit} ]; then
  echo "c++: fatal error: Killed signal terminated program cc1plus" >&2
  exit 137
fi
echo done >> ended
: > "../build/$1"
"""


@pytest.fixture
def work(tmp_path: Path) -> Workspace:
    made = Workspace(tmp_path / "work")
    made.build.mkdir(parents=True)
    return made


@pytest.fixture
def lock(work: Workspace) -> Iterator[workspace.WorkLock]:
    with workspace.locked(work) as held:
        yield held


def edges(work: Workspace, command: str, names: list[str]) -> None:
    lines = ["rule run", f"  command = {command} $out", "  description = run $out"]
    lines += [f"build {name}: run" for name in names]
    work.ninja_file.write_text("\n".join(lines) + "\n")


def compile_all(work: Workspace, lock: workspace.WorkLock, jobs: int, *names: str) -> int:
    tool = probe_ninja()
    assert tool is not None
    env = proc.environment({"NINJA_STATUS": "[%f/%t] "})
    log = work.log / "compile.log"
    return ninja.compile_targets(
        work, lock, ninja=tool.path, targets=names, backend="cpu", jobs=jobs, env=env, log=log
    )


def hungry(work: Workspace, limit: int) -> Path:
    script = work.root / "fake" / "cc"
    script.parent.mkdir()
    script.write_text(HUNGRY.format(limit=limit))
    script.chmod(0o755)
    return script


def test_a_killed_compiler_is_continued_with_fewer_jobs(
    work: Workspace, lock: workspace.WorkLock, capsys: pytest.CaptureFixture[str]
) -> None:
    script = hungry(work, limit=2)
    names = [f"o{i}" for i in range(8)]
    edges(work, str(script), names)
    compile_all(work, lock, 8, *names)
    assert all((work.build / name).exists() for name in names)
    told = capsys.readouterr().err
    assert "memory ran out with 8 jobs, continuing with" in told
    # what was done before the kill is not done again
    assert (script.parent / "ended").read_text().count("done") == len(names)
    assert not work.compiling.exists()


def test_a_compiler_killed_alone_is_an_error_about_memory(work: Workspace, lock: workspace.WorkLock) -> None:
    edges(work, str(hungry(work, limit=0)), ["o1", "o2"])
    with pytest.raises(CompilerKilledError) as caught:
        compile_all(work, lock, 4, "o1", "o2")
    assert caught.value.context[0] == f"log {work.log / 'compile.log'}"
    assert any("Killed signal terminated program cc1plus" in line for line in caught.value.context)
    assert "memory" in caught.value.advice
    assert (work.log / "compile.log").read_text().count("$ ") == 3  # 4, 2 and 1 jobs


@pytest.mark.parametrize(
    "line",
    [
        "nvcc error   : 'cicc' died due to signal 9 (Kill signal)",
        "clang: error: unable to execute command: Killed",
        "cc1plus: out of memory allocating 65536 bytes after a total of 1 bytes",
        "FAILED: [code=137] x.o",
    ],
)
def test_words_of_a_memory_kill(line: str) -> None:
    assert ninja._Run(code=1, failed=[line]).was_killed


def test_words_of_an_ordinary_error() -> None:
    lines = ["FAILED: [code=1] x.o", "x.cpp:9:1: error: 'KilledState' was not declared in this scope"]
    assert not ninja._Run(code=1, failed=lines).was_killed


def test_a_failure_shows_the_compilers_words_and_the_log(work: Workspace, lock: workspace.WorkLock) -> None:
    edges(work, "echo 'x.cpp:3:1: error: expected expression'; false", ["o1"])
    with pytest.raises(CompileFailedError) as caught:
        compile_all(work, lock, 1, "o1")
    assert caught.value.context[0] == f"log {work.log / 'compile.log'}"
    assert "x.cpp:3:1: error: expected expression" in caught.value.context
    assert not work.compiling.exists()


def test_nothing_to_do_runs_nothing(work: Workspace, lock: workspace.WorkLock) -> None:
    edges(work, "touch", ["o1"])
    assert compile_all(work, lock, 1, "o1") == 1
    assert compile_all(work, lock, 1, "o1") == 0


def test_an_interrupt_ends_ninja_and_its_compilers(work: Workspace, lock: workspace.WorkLock) -> None:
    """As Ctrl-C does it: the run unwinds, nothing stays behind, the output that was begun is removed."""
    edges(work, "sh -c 'echo part > $$0; exec sleep 60'", ["o1"])
    begun = work.build / "o1"

    def interrupt() -> None:
        assert proc.wait_until(begun.exists, timeout_s=20)
        os.kill(os.getpid(), 2)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        compile_all(work, lock, 1, "o1")
    thread.join()
    assert not begun.exists()
    assert not work.compiling.exists()
    assert [
        p for p in psutil.process_iter(["cmdline"]) if str(work.root) in " ".join(p.info["cmdline"] or [])
    ] == []


# --- after a kill ----------------------------------------------------------------------------------------


def test_outputs_cut_short_by_a_kill_are_dropped_and_finished_ones_kept(
    work: Workspace, lock: workspace.WorkLock
) -> None:
    edges(work, "echo whole >", ["o1", "o2", "o3"])
    compile_all(work, lock, 1, "o1", "o2", "o3")
    # o2 is removed (as a linker does with its output), a new run begins, finishes o3 and dies within o2
    (work.build / "o2").unlink()
    (work.build / "o3").unlink()
    compile_all(work, lock, 1, "o3")
    work.compiling.write_text("")
    before = (work.build / "o3").stat().st_mtime_ns - 1
    os.utime(work.compiling, ns=(before, before))
    log = work.build / ".ninja_log"
    lines = log.read_text().splitlines()
    moved = [line.split("\t") for line in lines]
    log.write_text(
        "\n".join(
            "\t".join([*c[:2], str(before + 1), *c[3:]]) if c[-2:-1] == ["o3"] else "\t".join(c)
            for c in moved
        )
        + "\n"
    )
    (work.build / "o2").write_text("who")
    # ninja alone would take it for finished
    tool = probe_ninja()
    assert tool is not None
    dry = proc.run([tool.path, "-C", work.build, "-n", "o2"])
    assert "no work to do" in dry.out
    assert drop_unfinished(work) == 1
    assert (work.build / "o3").exists() and (work.build / "o1").exists()
    assert compile_all(work, lock, 1, "o1", "o2", "o3") == 1
    assert (work.build / "o2").read_text() == "whole\n"


def test_nothing_is_dropped_after_an_orderly_end(work: Workspace, lock: workspace.WorkLock) -> None:
    edges(work, "echo whole >", ["o1"])
    compile_all(work, lock, 1, "o1")
    (work.build / "o1").write_text("edited")
    assert drop_unfinished(work) == 0


def test_outputs_of_a_build_file_are_read_with_its_escapes(work: Workspace) -> None:
    work.ninja_file.write_text(
        "build a$ b c$:d | e: CXX x\n  FLAGS = build z: y\n"
        "build all: phony a\nbuild build.ninja: RERUN_CMAKE x\n"
    )
    assert list(workspace._outputs(work.ninja_file)) == ["a b", "c:d", "e"]


# --- lock ------------------------------------------------------------------------------------------------


def test_a_second_build_is_refused_with_the_pid(work: Workspace, lock: workspace.WorkLock) -> None:
    with pytest.raises(BuildLockedError) as caught, workspace.locked(work):
        pytest.fail("the lock was given twice")
    assert caught.value.context == (f"its process is {os.getpid()}",)
    assert caught.value.exit_code == 11


def test_compilers_left_behind_are_ended_and_then_the_folder_is_free(work: Workspace, tmp_path: Path) -> None:
    """The holder is gone, a process that inherited its lock lives: the folder waits for it, and ends it."""
    with workspace.locked(work) as lock:
        orphan = proc.start(["sleep", "60"], pass_fds=(lock.handle,))
        lock.note_session(orphan.pid)
        dead = proc.start(["true"])
        dead.wait()
        workspace._write_holder(lock.handle, {"pid": dead.pid, "started": 1.0, "session": orphan.pid})
    begin = time.monotonic()
    with workspace.locked(work):
        assert time.monotonic() - begin < 10
        assert orphan.wait(5) == -9


def test_only_processes_that_hold_the_lock_are_ended(work: Workspace) -> None:
    """A session number that was given to somebody else since must not be killed."""
    innocent = proc.start(["sleep", "60"])
    try:
        workspace.end_session(innocent.pid, work.lock)
        time.sleep(0.1)
        assert innocent.poll() is None
    finally:
        proc.stop(innocent)
