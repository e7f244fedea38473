"""The series is applied whole or not at all, and what git did is compared with what it should have done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from upstream import SOURCE, Upstream

from flashnext.build import series, stage, tree
from flashnext.errors import HunkFailedError, PatchNotVerifiedError, PristineChangedError


def two_features(world: Upstream) -> None:
    world.feature("first", {"common/arg.cpp": ("int arg_10 = 10;\n", "int arg_10 = 10;\nfn_first();\n")})
    world.feature(
        "second",
        {
            "common/arg.cpp": ("int arg_40 = 40;\n", "fn_second();\nint arg_40 = 40;\n"),
            "src/core.cpp": ("int core_5 = 5;\n", "int core_5 = 5;\nfn_second_core();\n"),
        },
        requires=["first"],
    )


def staged(world: Upstream, into: Path, *, without: tuple[str, ...] = ()) -> dict[str, str]:
    features = series.select(series.load_series(world.patches), without=without)
    return stage.stage_tree(world.pin, world.pristine(), features, into)


def test_staged_tree_has_every_hook_and_its_manifest(upstream: Upstream, tmp_path: Path) -> None:
    two_features(upstream)
    files = staged(upstream, tmp_path / "out")
    kept = {n for n in SOURCE if ".git" not in Path(n).parts and not n.endswith(".gguf")}
    assert set(files) == kept
    for name in kept:
        assert (tmp_path / "out" / name).read_text() == upstream.now[name]
    assert tree.manifest(tmp_path / "out") == files
    # No translation of line ends, whatever the tree's own .gitattributes ask for.
    assert b"\r" not in (tmp_path / "out/src/core.cpp").read_bytes()


def test_files_that_no_hook_touches_keep_their_time(upstream: Upstream, tmp_path: Path) -> None:
    two_features(upstream)
    staged(upstream, tmp_path / "out")
    assert (tmp_path / "out/CMakeLists.txt").stat().st_mtime == 1_000_000_000


def test_second_run_touches_nothing(upstream: Upstream, tmp_path: Path) -> None:
    two_features(upstream)
    first = staged(upstream, tmp_path / "out")
    before = (tmp_path / "out").stat().st_ino
    assert staged(upstream, tmp_path / "out") == first
    assert (tmp_path / "out").stat().st_ino == before


def test_an_edited_staged_tree_is_replaced(upstream: Upstream, tmp_path: Path) -> None:
    two_features(upstream)
    first = staged(upstream, tmp_path / "out")
    (tmp_path / "out/src/core.cpp").write_text("edited\n")
    (tmp_path / "out/src/more.cpp").write_text("added\n")
    assert staged(upstream, tmp_path / "out") == first
    assert tree.manifest(tmp_path / "out") == first


def test_without_leaves_a_feature_out(upstream: Upstream, tmp_path: Path) -> None:
    two_features(upstream)
    staged(upstream, tmp_path / "out", without=("second",))
    assert "fn_second" not in (tmp_path / "out/common/arg.cpp").read_text()
    assert (tmp_path / "out/src/core.cpp").read_text() == SOURCE["src/core.cpp"]


def test_works_inside_another_repository(
    upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain `git apply` in such a folder skips every file and exits 0."""
    two_features(upstream)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    inner = tmp_path / "inner"
    inner.mkdir()
    monkeypatch.setenv("TMPDIR", str(inner))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    monkeypatch.chdir(inner)
    staged(upstream, inner / "out")
    assert (inner / "out/common/arg.cpp").read_text() == upstream.now["common/arg.cpp"]


def test_a_git_that_exits_0_and_does_nothing_is_caught(
    upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_features(upstream)
    real = subprocess.run(["which", "git"], capture_output=True, text=True, check=True).stdout.strip()
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    script = '#!/bin/sh\ncase "$*" in *--numstat*) ;; *" apply "*) exit 0;; esac\nexec REAL "$@"\n'
    fake.write_text(script.replace("REAL", real))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    with pytest.raises(PatchNotVerifiedError) as caught:
        staged(upstream, tmp_path / "out")
    assert "first: common/arg.cpp" in caught.value.message
    assert not (tmp_path / "out").exists()


def test_changed_context_is_refused_by_patch_and_hunk(upstream: Upstream, tmp_path: Path) -> None:
    """B51: one context line edited; the tree of the build before stays as it was."""
    two_features(upstream)
    good = staged(upstream, tmp_path / "out")
    patch = upstream.patches / "second/hooks.patch"
    patch.write_text(patch.read_text().replace(" int core_4 = 4;", " int core_4 = 44;"))
    for _ in range(2):
        with pytest.raises(HunkFailedError) as caught:
            staged(upstream, tmp_path / "out")
        error = caught.value
        assert error.message == "second: hunk 1 of src/core.cpp does not fit"
        said = "\n".join(error.context)
        assert str(patch) in said
        assert "hunk  1 of 1: @@ -3,6 +3,7 @@" in said
        assert "line 4: expected 'int core_4 = 44;', found 'int core_4 = 4;'" in said
        assert "flashnext patch refresh second" in error.advice
        assert tree.manifest(tmp_path / "out") == good


def test_the_failing_hunk_is_the_one_named(upstream: Upstream) -> None:
    upstream.feature("first", {"common/arg.cpp": ("int arg_10 = 10;\n", "fn_a();\n")})
    upstream.now = dict(SOURCE)
    text = SOURCE["common/arg.cpp"].replace("int arg_9 = 9;\n", "int arg_9 = 9;\nfn_1();\n")
    text = text.replace("int arg_30 = 30;\n", "int arg_30 = 30;\nfn_2();\n")
    upstream.feature("late", {"common/arg.cpp": (SOURCE["common/arg.cpp"], text)})
    with pytest.raises(HunkFailedError) as caught:
        stage.patched_files(upstream.pristine(), series.load_series(upstream.patches))
    assert "late: hunk 1 of common/arg.cpp" in caught.value.message
    assert "hunk  1 of 2" in "\n".join(caught.value.context)


def test_a_hook_that_is_in_the_source_already_says_so(upstream: Upstream) -> None:
    upstream.feature("first", {"common/arg.cpp": ("int arg_10 = 10;\n", "int arg_10 = 10;\nfn_a();\n")})
    upstream.feature("again")
    patch = (upstream.patches / "first/hooks.patch").read_text()
    (upstream.patches / "again/hooks.patch").write_text(patch)
    with pytest.raises(HunkFailedError) as caught:
        stage.patched_files(upstream.pristine(), series.load_series(upstream.patches))
    assert any("looks applied" in line for line in caught.value.context)


def test_a_file_that_is_not_in_the_source(upstream: Upstream) -> None:
    folder = upstream.feature("first", {"common/arg.cpp": ("int arg_10 = 10;\n", "fn_a();\n")})
    patch = folder / "hooks.patch"
    patch.write_text(patch.read_text().replace("common/arg.cpp", "common/gone.cpp"))
    with pytest.raises(HunkFailedError) as caught:
        stage.patched_files(upstream.pristine(), series.load_series(upstream.patches))
    assert any("not in the pinned source" in line for line in caught.value.context)


def test_a_patch_edited_by_hand_must_match_its_index_line(upstream: Upstream, tmp_path: Path) -> None:
    folder = upstream.feature(
        "first", {"common/arg.cpp": ("int arg_10 = 10;\n", "int arg_10 = 10;\nfn_a();\n")}
    )
    patch = folder / "hooks.patch"
    patch.write_text(patch.read_text().replace("fn_a", "fn_b"))
    with pytest.raises(PatchNotVerifiedError) as caught:
        staged(upstream, tmp_path / "out")
    assert "index line" in caught.value.message
    assert not (tmp_path / "out").exists()


def test_interrupt_between_two_patches_changes_nothing(
    upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_features(upstream)
    good = staged(upstream, tmp_path / "out")
    upstream.feature("third", {"src/core.cpp": ("int core_50 = 50;\n", "fn_third();\n")})
    real = stage._apply
    applied = []

    def interrupted(scratch, feature, *rest):  # type: ignore[no-untyped-def]
        if len(applied) == 1:
            raise KeyboardInterrupt
        applied.append(feature.id)
        return real(scratch, feature, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(stage, "_apply", interrupted)
        with pytest.raises(KeyboardInterrupt):
            staged(upstream, tmp_path / "out")
    assert applied == ["first"]
    assert tree.manifest(tmp_path / "out") == good
    assert "fn_third" in (staged(upstream, tmp_path / "out") and (tmp_path / "out/src/core.cpp").read_text())


@pytest.mark.parametrize("where", ["shutil.copytree", "flashnext.build.tree.manifest"])
def test_killed_while_it_stages_then_run_again(upstream: Upstream, tmp_path: Path, where: str) -> None:
    """SIGKILL: no handler runs. The next run cleans up and gives the same tree."""
    two_features(upstream)
    upstream.pristine()
    out = tmp_path / "work" / "out"
    code = f"""
import os, shutil, signal
from pathlib import Path
from flashnext.build import series, stage, tree
from flashnext.build.pin import load_pin
pin = load_pin(Path({str(upstream.pin_file)!r}))
pristine = tree.pristine_tree(pin, lambda: None)
features = series.load_series(Path({str(upstream.patches)!r}))
import {where.rsplit(".", 1)[0]} as module
real = module.{where.rsplit(".", 1)[1]}
def killed(*args, **more):
    real(*args, **more)
    if "out" in str(args) and "new" in str(args):
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **more)
module.{where.rsplit(".", 1)[1]} = killed
stage.stage_tree(pin, pristine, features, Path({str(out)!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not out.exists()
    assert [p for p in out.parent.iterdir() if p.is_dir()]
    files = staged(upstream, out)
    assert tree.manifest(out) == files
    assert [p.name for p in out.parent.iterdir() if p.is_dir()] == ["out"]


def test_edited_pristine_source_is_refused_with_both_hashes(upstream: Upstream, tmp_path: Path) -> None:
    """B06: hooks may only go onto the pinned source."""
    two_features(upstream)
    pristine = upstream.pristine()
    expected = tree.tree_hash(tree.manifest(pristine))
    (pristine / "src/core.cpp").write_text(SOURCE["src/core.cpp"].replace("core_60 = 60", "core_60 = 61"))
    found = tree.tree_hash(tree.manifest(pristine))
    with pytest.raises(PristineChangedError) as caught:
        stage.stage_tree(upstream.pin, pristine, series.load_series(upstream.patches), tmp_path / "out")
    said = "\n".join(caught.value.context)
    assert f"expected {expected}" in said
    assert f"found    {found}" in said
    assert "src/core.cpp: edited" in said
    assert not (tmp_path / "out").exists()


def test_a_moved_hunk_is_found(upstream: Upstream) -> None:
    """A feature applied without one that adds lines above it in the same file."""
    two_features(upstream)
    only = [f for f in series.load_series(upstream.patches) if f.id == "second"]
    text = stage.patched_files(upstream.pristine(), only)["common/arg.cpp"].decode()
    assert text == SOURCE["common/arg.cpp"].replace("int arg_40", "fn_second();\nint arg_40")
