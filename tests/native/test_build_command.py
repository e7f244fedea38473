"""`flashnext build` on the shared native build: no work for no change, failures, interruptions.

All of it works on the warm work folder of the build that every native test shares, with an XDG_DATA_HOME of
its own. An attempt costs seconds because only a few of its objects are removed before it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flashnext import builds, paths, proc
from flashnext.build import pipeline, store
from flashnext.build.pipeline import Request
from flashnext.builds import Build
from flashnext.errors import CompileFailedError
from tests.timing import best_time

pytestmark = pytest.mark.native

REQUEST = Request(backend="cpu", tests=True)
COMMAND = [sys.executable, "-m", "flashnext", "build", "--backend", "cpu", "--tests", "--json"]
KILLS = 20


@pytest.fixture
def built(native_build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """The shared build's record. A test installs elsewhere; afterwards the objects are whole again."""
    if native_build.objects is None:
        pytest.skip("FLASHNEXT_TEST_BIN is set: there is no work folder of ours to build in")
    record = builds.load_build(native_build.root)
    assert record is not None
    with monkeypatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
        yield record
    monkeypatch.undo()
    (native_build.objects.parent / ".tested").unlink(missing_ok=True)
    pipeline.build(REQUEST)


class Outputs:
    """The finished objects, libraries and programs of a work folder, to remove a few before an attempt."""

    def __init__(self, objects: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.small = [p for p in sorted(objects.rglob("*.o")) if p.stat().st_size < 400_000]
        self.linked = [p for p in sorted((objects / "bin").iterdir()) if not p.is_symlink()]

    def remove(self) -> None:
        """Some objects and a library or program; fewer where the last attempt has not brought them back."""
        for files, most in ((self.small, 6), (self.linked, 3)):
            there = [p for p in files if p.exists()]
            for path in self.chance.sample(there, max(0, most - len(files) + len(there))):
                path.unlink()


def processes_of(folder: Path) -> list[str]:
    """Command lines of what works in a folder: ninja names it, compilers have it as their current folder."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd", "status"]):
        words = " ".join(process.info["cmdline"] or ())
        inside = str(folder) in words or str(process.info["cwd"] or "").startswith(str(folder))
        if inside and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(words)
    return found


def wait_for_any(files: list[Path], child: subprocess.Popen[bytes]) -> None:
    """Until one of the files begins to exist, or the child has ended."""
    proc.wait_until(
        lambda: any(p.exists() for p in files) or child.poll() is not None, timeout_s=60, every_s=0.001
    )


def compilers_of(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_an_unchanged_build_does_nothing_in_under_a_second(native_build: Any) -> None:
    if native_build.objects is None:
        pytest.skip("FLASHNEXT_TEST_BIN is set: nothing of ours is installed")
    took, out = best_time(COMMAND, 1.0)
    result = json.loads(out)
    assert (result["compiled"], result["log"]) == (False, None)
    assert result["folder"] == str(native_build.root)
    assert took < 1.0


def test_the_installed_build_is_recorded_and_verifies(native_build: Any) -> None:
    if native_build.objects is None:
        pytest.skip("FLASHNEXT_TEST_BIN is set: nothing of ours is installed")
    record = builds.load_build(native_build.root)
    assert record is not None
    assert {"llama-server", "ggml-rpc-server", "llama-bench", "fn-vgpu"} <= set(record.binaries)
    assert not [name for name in record.binaries if name.startswith("test-")]
    assert store.verify([record.key]) == [record]
    assert record.tests and record in builds.list_builds()
    # whoever has also built the product is served that
    chosen = builds.find_build(record.series_hash, backend="cpu")
    assert chosen is not None and (chosen == record or not chosen.tests)
    # the installed copy runs from where it is, with its own libraries
    done = proc.run([record.bin / "llama-server", "--version"])
    assert done.ok and record.series_hash in done.err
    loaded = proc.run(["ldd", record.bin / "llama-server"]).out
    assert str(record.bin / "libllama.so.0") in loaded.replace("/bin/../bin/", "/bin/")
    # a person can repeat the configuration by hand
    assert "presets.cmake" in (native_build.objects.parent / "command.txt").read_text()


@pytest.mark.slow
def test_a_source_that_does_not_compile_leaves_the_previous_build(
    built: Build, native_build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = pipeline.build(REQUEST).build
    shipped = tmp_path / "shipped"
    for name in ("patches", "cmake", "vendor"):
        shutil.copytree(paths.data_root() / name, shipped / name)
    with monkeypatch.context() as patch:
        patch.setattr(paths, "data_root", lambda: shipped)
        source = shipped / "patches/build-stamp/src/fn-build-stamp.cpp"
        good = source.read_text()
        source.write_text(good + "\nthis does not compile;\n")
        with pytest.raises(CompileFailedError) as caught:
            pipeline.build(REQUEST)
        text = "\n".join(caught.value.context)
        assert "fn-build-stamp.cpp" in text and "error:" in text
        log = Path(caught.value.context[0].removeprefix("log "))
        assert "this does not compile" in log.read_text()
        assert store.verify([]) == [first]
        # mended: an incremental build, and the old one stays beside it
        source.write_text(good + "// mended\n")
        second = pipeline.build(REQUEST)
        assert second.build.key != first.key and second.compiled
        assert len((second.log or log).read_text().splitlines()) < 60
        assert {b.key for b in store.verify([])} == {first.key, second.build.key}


@pytest.mark.slow
def test_ctrl_c_ends_the_compilers_and_the_build_resumes(built: Build, native_build: Any) -> None:
    Outputs(native_build.objects, seed=1).remove()
    child = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    root = native_build.objects.parent
    assert proc.wait_until((root / ".compiling").exists, timeout_s=60)
    os.killpg(child.pid, signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130, err.decode()
    assert not processes_of(root)
    assert builds.list_builds() == []
    resumed = pipeline.build(REQUEST)
    assert resumed.build.binaries == built.binaries


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_random_points_it_always_resumes(built: Build, native_build: Any) -> None:
    """SIGKILL 20 times: of the process group at random moments, and of everything while a linker writes.

    Whatever is installed at any moment is byte for byte the build that was never interrupted.
    """
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    outputs = Outputs(native_build.objects, seed)
    outputs.remove()
    whole = pipeline.build(REQUEST)
    assert whole.build.binaries == built.binaries
    killed_in_ninja = 0
    for attempt in range(KILLS):
        shutil.rmtree(paths.builds_dir(), ignore_errors=True)
        outputs.remove()
        child = subprocess.Popen(
            COMMAND, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        if attempt % 2:
            # the group alone: compilers live on until the next attempt finds them
            time.sleep(outputs.chance.uniform(0.1, 1.2 * whole.elapsed_s))
            os.killpg(child.pid, signal.SIGKILL)
        else:
            # everything, as a power cut would, while a linker writes
            removed = [p for p in outputs.linked if not p.exists()]
            wait_for_any(removed, child)
            for pid in (child.pid, *compilers_of(child.pid)):
                kill(pid)
        child.wait()
        killed_in_ninja += (native_build.objects.parent / ".compiling").exists()
        for found in store.verify([]):
            assert (found.key, found.binaries) == (built.key, built.binaries)
    print(f"{killed_in_ninja} of {KILLS} while compilers ran")
    assert killed_in_ninja > 0, "no kill hit the compilers: the test has tried nothing"
    shutil.rmtree(paths.builds_dir(), ignore_errors=True)
    last = pipeline.build(REQUEST).build
    assert (last.key, last.binaries, last.links) == (built.key, built.binaries, built.links)
    assert store.verify([]) == [last]
    assert proc.run([last.bin / "llama-server", "--version"]).ok
