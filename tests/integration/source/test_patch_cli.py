"""`flashnext patch`: making, editing, checking and carrying over features, as a person does."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pexpect
import pytest
from upstream import SOURCE, Ran, Upstream, make_sdist, pin_of, refused, run_cli, write_pin

from flashnext import paths
from flashnext.build import fetch, hunks, lint, series, stage, tree
from flashnext.build.pin import load_pin

Patch = Callable[..., Ran]


@pytest.fixture
def patch(upstream: Upstream, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Patch:
    def run(verb: str, *more: str, sdist: bool = True) -> Ran:
        where = upstream.args() if sdist else upstream.args()[:-2]
        return run_cli(["patch", verb, *where, *more], capsys, monkeypatch)

    return run


def series_of_three(world: Upstream) -> None:
    world.feature("one", {"common/arg.cpp": ("int arg_10 = 10;\n", "int arg_10 = 10;\nfn_one();\n")})
    world.feature(
        "two",
        {
            "common/arg.cpp": ("int arg_30 = 30;\n", "int arg_30 = 30;\nfn_two();\n"),
            "src/core.cpp": ("int core_20 = 20;\n", "int core_20 = 20;\nfn_two_core();\n"),
        },
        requires=["one"],
    )
    world.feature("three")  # no hooks


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_wrong_sdist_is_refused_although_the_tree_is_unpacked(
    upstream: Upstream, patch: Patch, tmp_path: Path
) -> None:
    upstream.feature("three")
    assert patch("check").code == 0
    wrong = tmp_path / "wrong.tar.gz"
    wrong.write_bytes(b"not the pinned one")
    ran = patch("check", "--sdist", str(wrong))
    assert ran.code == 5 and "error[sdist-size-mismatch]" in ran.err


# --- list, check, new ------------------------------------------------------------------------------------


def test_list(
    upstream: Upstream, patch: Patch, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    series_of_three(upstream)
    ran = run_cli(["patch", "list", "--patches", str(upstream.patches)], capsys, monkeypatch)
    assert ran.code == 0
    assert "two: what two does" in ran.out
    assert "hooks +2 -0 in 2 files  requires one" in ran.out
    ran = run_cli(["patch", "list", "--json", "--patches", str(upstream.patches)], capsys, monkeypatch)
    listed = json.loads(ran.out)
    assert [f["id"] for f in listed["features"]] == ["one", "two", "three"]
    assert listed["features"][1]["hooks"] == {
        "added": 2,
        "removed": 0,
        "files": ["common/arg.cpp", "src/core.cpp"],
    }
    features = series.load_series(upstream.patches)
    assert listed["series_sha256"] == series.series_hash(features, paths.cmake_include())


def test_check(upstream: Upstream, patch: Patch) -> None:
    series_of_three(upstream)
    assert "3 features are sound" in patch("check").err
    assert json.loads(patch("check", "--json").out) == {
        "ok": True,
        "applied": True,
        "features": ["one", "two", "three"],
    }
    (upstream.patches / "two/README.md").unlink()
    said = refused(patch("check"), code=6, id="patch-lint-failed")
    assert "two/README.md: missing" in said


def test_check_without_the_source(upstream: Upstream, patch: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    series_of_three(upstream)
    monkeypatch.setattr(fetch, "fetch_sdist", lambda *_, **__: pytest.fail("asked for the sdist"))
    assert "(hooks not tried)" in patch("check", "--no-apply", sdist=False).err


def test_new_then_check(
    upstream: Upstream, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    series_of_three(upstream)

    def new(*more: str) -> Ran:
        return run_cli(["patch", "new", *more, "--patches", str(upstream.patches)], capsys, monkeypatch)

    words = ["--summary", 'says "hello"', "--kill-switch", "--no-hello"]
    ran = new("four", *words)
    assert ran.code == 0, ran
    assert ran.out.strip() == str(upstream.patches / "four")
    made = series.load_series(upstream.patches)[-1]
    assert (made.id, made.summary, made.kill_switch) == ("four", 'says "hello"', "--no-hello")
    assert [f.id for f in lint.check(upstream.patches, upstream.pristine())][-1] == "four"
    before = contents(upstream.patches)
    refused(new("four", *words), code=2, id="feature-exists")
    refused(new("../five", *words), code=2, id="unknown-feature")
    refused(new("five", "--summary", "two\nlines", "--kill-switch", "x"), code=6, id="feature-invalid")
    assert contents(upstream.patches) == before


def test_a_series_error_as_json(upstream: Upstream, patch: Patch) -> None:
    (upstream.patches / "series").write_text("ghost\n")
    ran = patch("check", "--json")
    assert (ran.code, ran.error()["error"]) == (6, "patch-lint-failed")


# --- shell and refresh -----------------------------------------------------------------------------------


def test_shell_shows_the_hooks_as_its_diff(upstream: Upstream, patch: Patch) -> None:
    series_of_three(upstream)
    ran = patch("shell", "two", "--print")
    folder = Path(ran.out.strip())
    assert "flashnext patch refresh two" in ran.err
    diff = subprocess.run(["git", "diff"], cwd=folder, capture_output=True, text=True, check=True).stdout
    assert "+fn_two();" in diff
    assert "fn_one" not in [line for line in diff.splitlines() if line.startswith("+")]
    log = subprocess.run(
        ["git", "log", "--format=%s"], cwd=folder, capture_output=True, text=True, check=True
    )
    assert log.stdout.splitlines() == ["one: what one does", "small-llama 1.0, pristine"]
    again = patch("shell", "two", "--print")
    assert Path(again.out.strip()) == folder
    assert "was there already" in again.err


def test_shell_of_the_whole_series(upstream: Upstream, patch: Patch) -> None:
    series_of_three(upstream)
    folder = Path(patch("shell", "--print").out.strip())
    assert (folder / "src/core.cpp").read_text() == upstream.now["src/core.cpp"]


def test_refresh_without_edits_changes_nothing(upstream: Upstream, patch: Patch) -> None:
    series_of_three(upstream)
    patch("shell", "two", "--print")
    assert patch("refresh", "two").code == 0  # git's hunk headers name the line before, the fixture's do not
    before = contents(upstream.patches)
    ran = patch("refresh", "two", "--json")
    assert json.loads(ran.out)["changed"] is False
    assert contents(upstream.patches) == before


def test_refresh_keeps_a_mail_header_and_takes_a_hook_back(upstream: Upstream, patch: Patch) -> None:
    series_of_three(upstream)
    file = upstream.patches / "two/hooks.patch"
    patch("shell", "two", "--print")
    patch("refresh", "two")
    mail = "From 0000 Mon Sep 17 00:00:00 2001\nFrom: flashnext <flashnext@localhost>\n"
    mail += "Subject: [PATCH] two: x\n\nWhy\nnot.\n---\n"
    file.write_text(mail + "diff --git" + file.read_text().split("diff --git", 1)[1] + "-- \n2.39.5\n\n")
    before = file.read_bytes()
    assert json.loads(patch("refresh", "two", "--json").out)["changed"] is False
    assert file.read_bytes() == before
    # The last file's hook goes: the new patch is the beginning of the old one.
    folder = Path(patch("shell", "two", "--print").out.strip())
    (folder / "src/core.cpp").write_text(SOURCE["src/core.cpp"])
    assert json.loads(patch("refresh", "two", "--json").out)["changed"] is True
    assert file.read_text().startswith(mail + "diff --git a/common/arg.cpp")
    assert "core.cpp" not in file.read_text()


def test_edit_then_refresh(upstream: Upstream, patch: Patch) -> None:
    series_of_three(upstream)
    folder = Path(patch("shell", "one", "--print").out.strip())
    edited = folder / "src/core.cpp"
    edited.write_text(edited.read_text().replace("int core_50 = 50;\n", "int core_50 = 50;\nfn_more();\n"))
    (folder / "src/new-file.cpp").write_text("")
    ran = patch("refresh", "one")
    assert ran.code == 0, ran
    assert "left out: src/new-file.cpp" in ran.err
    read = hunks.read_hooks(upstream.patches / "one/hooks.patch")
    assert (read.body, [e.path for e in read.edits]) == ("The reason.", ["common/arg.cpp", "src/core.cpp"])
    assert [f.id for f in lint.check(upstream.patches, upstream.pristine())] == ["one", "two", "three"]
    # What is above it was made on another base now.
    refused(patch("refresh", "three"), code=2, id="no-shell-tree")
    patch("shell", "two", "--print", "--fresh")
    assert patch("refresh", "two").code == 0


def test_refresh_of_a_feature_without_hooks_wants_a_reason(upstream: Upstream, patch: Patch) -> None:
    series_of_three(upstream)
    folder = Path(patch("shell", "three", "--print").out.strip())
    refused(patch("refresh", "three"), code=2, id="nothing-to-write")
    (folder / "CMakeLists.txt").write_text("project(small)\n# fn\n")
    assert "--reason" in refused(patch("refresh", "three"), code=2, id="usage")
    assert not (upstream.patches / "three/hooks.patch").exists()
    assert patch("refresh", "three", "--reason", "It is needed – so.").code == 0
    assert hunks.read_hooks(upstream.patches / "three/hooks.patch").body == "It is needed – so."


def test_refresh_refuses_what_is_no_edit(upstream: Upstream, patch: Patch) -> None:
    series_of_three(upstream)
    folder = Path(patch("shell", "one", "--print").out.strip())
    (folder / "CMakeLists.txt").unlink()
    before = contents(upstream.patches)
    refused(patch("refresh", "one"), code=6, id="hooks-invalid")
    assert contents(upstream.patches) == before


def test_refresh_that_breaks_a_later_feature_says_which(upstream: Upstream, patch: Patch) -> None:
    series_of_three(upstream)
    folder = Path(patch("shell", "one", "--print").out.strip())
    edited = folder / "common/arg.cpp"
    edited.write_text(edited.read_text().replace("int arg_31 = 31;\n", "int arg_31 = 0;\n"))
    said = refused(patch("refresh", "one"), code=6, id="patch-hunk-failed")
    assert "two: hunk 1 of common/arg.cpp does not fit" in said


def test_a_hook_that_does_not_fit_is_mended_by_shell_and_refresh(upstream: Upstream, patch: Patch) -> None:
    """The next step that patch-hunk-failed names."""
    series_of_three(upstream)
    file = upstream.patches / "two/hooks.patch"
    file.write_text(file.read_text().replace(" int core_19 = 19;", " int core_19 = 0;"))
    refused(patch("check"), code=6, id="patch-lint-failed")
    ran = patch("shell", "two", "--print")
    assert "did not fit: " in ran.err
    assert "core.cpp.rej" in ran.err
    folder = Path(ran.out.strip())
    assert "fn_two();" in (folder / "common/arg.cpp").read_text()
    core = folder / "src/core.cpp"
    core.write_text(core.read_text().replace("int core_20 = 20;\n", "int core_20 = 20;\nfn_two_core();\n"))
    assert patch("refresh", "two").code == 0
    assert patch("check").code == 0


def test_a_checkout_of_another_base_is_not_used(upstream: Upstream, patch: Patch) -> None:
    series_of_three(upstream)
    patch("shell", "two", "--print")
    toml = upstream.patches / "one/feature.toml"
    toml.write_text(toml.read_text() + "\n")
    refused(patch("shell", "two", "--print"), code=2, id="shell-tree-outdated")
    refused(patch("refresh", "two"), code=2, id="shell-tree-outdated")
    assert patch("shell", "two", "--print", "--fresh").code == 0


def test_unknown_feature(upstream: Upstream, patch: Patch) -> None:
    series_of_three(upstream)
    for verb in ("shell", "refresh"):
        assert "one, two, three" in refused(patch(verb, "fuor"), code=2, id="unknown-feature")


def test_the_shell_is_the_persons_own_on_their_terminal(upstream: Upstream) -> None:
    series_of_three(upstream)
    child = pexpect.spawn(
        "python",
        ["-m", "flashnext", "patch", "shell", "two", *upstream.args()],
        env={**os.environ, "SHELL": "/bin/sh", "PS1": "ready> "},
        encoding="utf-8",
        timeout=60,
    )
    child.expect("ready> ")
    child.sendline("git log --format=%s | head -1; tty > /dev/null && echo has-a-'terminal'; exit 7")
    child.expect("one: what one does")
    child.expect("has-a-terminal")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 7


def test_git_am_takes_every_hooks_patch(upstream: Upstream, tmp_path: Path) -> None:
    series_of_three(upstream)
    tree_folder = tmp_path / "am"
    subprocess.run(["cp", "-r", upstream.pristine(), tree_folder], check=True)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@localhost"]
    for command in (["init", "-q"], ["add", "-Af"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], cwd=tree_folder, check=True)
    (tree_folder / ".git/info/attributes").write_text("* -text -ident\n")
    for name in ("one", "two"):
        subprocess.run(
            [*git, "am", "-q", upstream.patches / name / "hooks.patch"], cwd=tree_folder, check=True
        )
    assert (tree_folder / "src/core.cpp").read_text() == upstream.now["src/core.cpp"]
    shown = subprocess.run(
        [*git, "log", "-1", "--format=%an %s%n%b"], cwd=tree_folder, capture_output=True, text=True
    )
    assert shown.stdout.strip() == "flashnext two: what two does\nThe reason."


# --- rebase ----------------------------------------------------------------------------------------------


def bump(world: Upstream, **edits: str) -> list[str]:
    """A new sdist with some files changed; returns the options of a rebase to it."""
    files = {
        **world.files,
        **{name.replace("__", "/").replace("_cpp", ".cpp"): text for name, text in edits.items()},
    }
    files = {name: text for name, text in files.items() if text}
    sdist = make_sdist(world.root / "new" / "small_llama-1.1.tar.gz", files, top="small_llama-1.1")
    pin = pin_of(sdist, version="1.1", commit="feed123")
    return ["--to", str(write_pin(world.root / "new-pin.toml", pin)), "--sdist", str(sdist)]


@pytest.fixture
def rebase(upstream: Upstream, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Patch:
    """Offline: the old sdist is given too, and a download would fail the test."""
    real = fetch.fetch_sdist

    def offline(pin, *, sdist=None):  # type: ignore[no-untyped-def]
        assert sdist is not None, "a rebase must not download"
        return real(pin, sdist=sdist)

    monkeypatch.setattr(fetch, "fetch_sdist", offline)

    def run(*more: str) -> Ran:
        where = ["--patches", str(upstream.patches), "--pin", str(upstream.pin_file)]
        where += ["--old-sdist", str(upstream.sdist)]
        return run_cli(["patch", "rebase", *where, *more], capsys, monkeypatch)

    return run


MOVED = SOURCE["common/arg.cpp"].replace("int arg_5 = 5;\n", "".join(f"int more_{i};\n" for i in range(30)))


def test_a_bump_that_carries_over(upstream: Upstream, rebase: Patch) -> None:
    series_of_three(upstream)
    before = contents(upstream.patches)
    options = bump(upstream, common__arg_cpp=MOVED)
    ran = rebase(*options)
    assert ran.code == 0, ran
    assert "one: changes" in ran.out
    assert contents(upstream.patches) == before
    assert load_pin(upstream.pin_file).version == "1.0"

    ran = rebase(*options, "--write", "--json")
    done = json.loads(ran.out)
    assert [(f["id"], f["changed"]) for f in done["features"]] == [("one", True), ("two", True)]
    pin = load_pin(upstream.pin_file)
    assert pin.version == "1.1"
    new = tree.pristine_tree(pin, lambda: Path(options[-1]))
    features = lint.check(upstream.patches, new)
    text = stage.patched_files(new, features)["common/arg.cpp"].decode()
    assert text == MOVED.replace("int arg_10 = 10;\n", "int arg_10 = 10;\nfn_one();\n").replace(
        "int arg_30 = 30;\n", "int arg_30 = 30;\nfn_two();\n"
    )
    refused(rebase(*options), code=2, id="same-pin")


def test_hooks_follow_a_file_that_upstream_moved(upstream: Upstream, rebase: Patch) -> None:
    series_of_three(upstream)
    ran = rebase(*bump(upstream, src__core_cpp="", src__main_cpp=SOURCE["src/core.cpp"]), "--write")
    assert ran.code == 0, ran
    assert [e.path for e in hunks.read_hooks(upstream.patches / "two/hooks.patch").edits] == [
        "common/arg.cpp",
        "src/main.cpp",
    ]


def test_hooks_that_upstream_took_over(upstream: Upstream, rebase: Patch) -> None:
    series_of_three(upstream)
    taken = SOURCE["common/arg.cpp"].replace("int arg_10 = 10;\n", "int arg_10 = 10;\nfn_one();\n")
    ran = rebase(*bump(upstream, common__arg_cpp=taken), "--write")
    assert "one: needs no hooks any more" in ran.out
    assert not (upstream.patches / "one/hooks.patch").exists()


CONFLICT = SOURCE["src/core.cpp"].replace("int core_20 = 20;\n", "int core_20 = 2000;\n")


def test_a_conflict_names_feature_file_hunk_and_next_step(upstream: Upstream, rebase: Patch) -> None:
    """The version bump drill: upstream edited the line that a hook follows."""
    series_of_three(upstream)
    before = contents(upstream.patches)
    options = bump(upstream, src__core_cpp=CONFLICT, common__arg_cpp=MOVED)
    said = refused(rebase(*options), code=6, id="rebase-conflict")
    assert "two does not carry over to the new source" in said
    assert "file  src/core.cpp hunk 1 of 1: @@ -18,6 +18,7 @@" in said
    assert "line 20: expected 'int core_20 = 20;', found 'int core_20 = 2000;'" in said
    assert "common/arg.cpp" not in said
    assert "merged before it: one" in said
    assert "run the same command again" in said
    assert contents(upstream.patches) == before
    # The same again while marks are left.
    assert "src/core.cpp" in refused(rebase(*options), code=6, id="rebase-conflict")
    # The next step, taken.
    work = Path(next(line for line in said.splitlines() if line.startswith("  mend")).split()[1])
    assert "<<<<<<< " in (work / "src/core.cpp").read_text()
    fixed = CONFLICT.replace("int core_20 = 2000;\n", "int core_20 = 2000;\nfn_two_core();\n")
    (work / "src/core.cpp").write_text(fixed)
    ran = rebase(*options, "--write")
    assert ran.code == 0, ran
    assert not work.exists()
    new = tree.pristine_tree(load_pin(upstream.pin_file), lambda: Path(options[-1]))
    assert stage.patched_files(new, lint.check(upstream.patches, new))["src/core.cpp"].decode() == fixed


def test_only_the_hunks_in_conflict_are_named(upstream: Upstream, rebase: Patch) -> None:
    both = SOURCE["common/arg.cpp"].replace("int arg_10 = 10;\n", "int arg_10 = 10;\nfn_a();\n")
    both = both.replace("int arg_40 = 40;\n", "int arg_40 = 40;\nfn_b();\n")
    upstream.feature("wide", {"common/arg.cpp": (SOURCE["common/arg.cpp"], both)})
    new = SOURCE["common/arg.cpp"].replace("int arg_40 = 40;\n", "int arg_40 = 41;\n")
    said = refused(rebase(*bump(upstream, common__arg_cpp=new)), code=6, id="rebase-conflict")
    assert "hunk 2 of 2" in said
    assert "hunk 1 of 2" not in said


def test_a_file_that_upstream_removed(upstream: Upstream, rebase: Patch) -> None:
    series_of_three(upstream)
    said = refused(rebase(*bump(upstream, src__core_cpp="")), code=6, id="rebase-conflict")
    assert "file  src/core.cpp: not in the new source (all 1 hunks)" in said


def test_a_conflict_is_forgotten_when_the_patches_change(upstream: Upstream, rebase: Patch) -> None:
    series_of_three(upstream)
    options = bump(upstream, src__core_cpp=CONFLICT)
    refused(rebase(*options), code=6, id="rebase-conflict")
    toml = upstream.patches / "one/feature.toml"
    toml.write_text(toml.read_text() + "\n")
    assert "two does not carry over" in refused(rebase(*options), code=6, id="rebase-conflict")
    (upstream.patches / "two/hooks.patch").unlink()
    assert rebase(*options).code == 0


def test_a_series_that_does_not_fit_the_old_source(upstream: Upstream, rebase: Patch) -> None:
    series_of_three(upstream)
    file = upstream.patches / "two/hooks.patch"
    file.write_text(file.read_text().replace(" int core_19 = 19;", " int core_19 = 0;"))
    refused(rebase(*bump(upstream, common__arg_cpp=MOVED)), code=6, id="patch-hunk-failed")


def test_the_real_sdist_where_it_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped series on the shipped pin; `flashnext build` is what fetches it."""
    pin = load_pin()
    sdist = fetch.cached_path(pin)
    if not sdist.exists():
        pytest.skip(f"no {sdist}: `flashnext build` has not run here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pristine = tree.pristine_tree(pin, lambda: sdist)
    assert (pristine / "CMakeLists.txt").is_file()
    assert not list(pristine.rglob(".git"))
    assert not list((pristine / "models").glob("*.gguf"))
    features = lint.check(paths.patches_dir(), pristine)
    files = stage.stage_tree(pin, pristine, features, tmp_path / "staged")
    assert len(files) == len(tree.verify_pristine(pristine)) > 3000
