"""Every rule of a feature folder, each broken once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from upstream import SOURCE, Upstream, diff_of

from flashnext.build import lint
from flashnext.errors import LintFailedError

SOURCES = '[[sources]]\ntarget = "llama"\nfiles = ["src/fn-first.cpp"]\n'


def good(world: Upstream) -> Path:
    """Two sound features; ``second`` requires ``first`` and has a test, an executable and a header."""
    edits = {"common/arg.cpp": ("int arg_10 = 10;\n", "int arg_10 = 10;\nfn_first();\n")}
    folder = world.feature("first", edits, toml=SOURCES)
    world.source("first", "src/fn-first.cpp", '#include "fn-first.h"\n\nvoid fn_first() {\n}\n')
    world.source("first", "src/fn-first.h", "#pragma once\n\nvoid fn_first();\n")
    world.feature(
        "second",
        {"common/arg.cpp": ("int arg_40 = 40;\n", "int arg_40 = 40;\nfn_second();\n")},
        requires=["first"],
        toml='[[executables]]\nname = "fn-tool"\nfiles = ["src/fn-tool.cpp"]\n'
        '[[tests]]\nname = "test-fn-tool"\nfiles = ["tests/test-fn-tool.cpp"]\n',
    )
    world.source("second", "src/fn-tool.cpp", "int main() {\n}\n")
    world.source("second", "tests/test-fn-tool.cpp", "int main() {\n}\n")
    return folder


def test_sound_features_pass(upstream: Upstream) -> None:
    good(upstream)
    assert [f.id for f in lint.check(upstream.patches, upstream.pristine())] == ["first", "second"]


def append(path: str, text: str) -> Callable[[Upstream, Path], None]:
    return lambda world, folder: (folder / path).write_text((folder / path).read_text() + text) and None


def write(path: str, text: str) -> Callable[[Upstream, Path], None]:
    def change(world: Upstream, folder: Path) -> None:
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)

    return change


def remove(path: str) -> Callable[[Upstream, Path], None]:
    return lambda world, folder: (folder / path).unlink()


def swap(path: str, old: str, new: str) -> Callable[[Upstream, Path], None]:
    def change(world: Upstream, folder: Path) -> None:
        text = (folder / path).read_text()
        assert old in text
        (folder / path).write_text(text.replace(old, new))

    return change


def hooks(old: str, new: str, *, context: int = 3) -> Callable[[Upstream, Path], None]:
    """Other hooks for ``first``, with a right mail header."""

    def change(world: Upstream, folder: Path) -> None:
        base = SOURCE["src/core.cpp"]
        mail = (folder / "hooks.patch").read_text().split("diff --git")[0]
        text = diff_of("src/core.cpp", base, base.replace(old, new), context=context)
        (folder / "hooks.patch").write_text(mail + text)

    return change


FN = "".join(f"fn_{i}();\n" for i in range(41))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (remove("README.md"), "README.md: missing"),
        (write("README.md", "# first\n\n## Problem\n"), "has only headings"),
        (write("notes.txt", "x"), "notes.txt: not part of a feature folder"),
        (write("src/fn-more.cpp", "static int x;\n"), "compiled by nothing"),
        (write("tests/test-fn-more.cpp", "static int x;\n"), "compiled by nothing"),
        (write("src/fn-data.bin", ""), "neither source nor header"),
        (remove("src/fn-first.cpp"), "is listed, but there is no such file"),
        (swap("feature.toml", "src/fn-first.cpp", "other/fn-first.cpp"), "neither in src/ nor in tests/"),
        (swap("feature.toml", "src/fn-first.cpp", "src/../../x.cpp"), "neither in src/ nor in tests/"),
        (
            swap("feature.toml", '"src/fn-first.cpp"', '"src/fn-first.cpp", "src/fn-first.cpp"'),
            "listed twice",
        ),
        (write("src/lonely.h", "#pragma once\n"), "the name must start fn-"),
        (write("src/fn-lonely.h", "#pragma once\n"), "included by nothing"),
        (append("src/fn-first.cpp", "\nint helper(int x) {\n}\n"), "fn-first.cpp:6"),
        (append("src/fn-first.cpp", "\nint helper(int x) {\n}\n"), "helper is visible to the linker"),
        (append("src/fn-first.cpp", "\nnamespace other {\n}\n"), "namespace other must start fn"),
        (
            append("src/fn-first.cpp", 'extern "C" {\nint in_c(int x) {\n}\n}\n'),
            "in_c is visible to the linker",
        ),
        (
            append("src/fn-first.cpp", "namespace {\nint a(int x) {\n}\n}\nint after() {\n}\n"),
            "after is visible",
        ),
        (append("src/fn-first.cpp", 'extern "C" int in_c(int x) {\n}\n'), "in_c is visible to the linker"),
        (
            hooks("int core_5 = 5;\n", "int core_5 = 5;\n" + FN),
            "adds 41 lines, its budget in feature.toml is 40",
        ),
        (hooks("int core_5 = 5;\n", ""), "removes 1 lines, its budget in feature.toml is 0"),
        (hooks("int core_9 = 9;\n", "int core_9 = 9;\nfn_x();\n", context=5), "more than 3 context lines"),
        (
            swap("hooks.patch", "Subject: [PATCH] first: ", "Subject: first "),
            "needs the header `Subject: [PATCH] first:",
        ),
        (
            swap("hooks.patch", "From: flashnext <flashnext@localhost>", "From: me <me@x>"),
            "needs the header `From:",
        ),
        (swap("hooks.patch", "The reason.\n\n", ""), "has no reason"),
        (swap("hooks.patch", "index ", "new file mode 100644\nindex "), "hooks only edit text files"),
        (swap("feature.toml", 'kill_switch = "none: a test"\n', ""), "kill_switch is missing"),
        (append("feature.toml", "[hooks]\nadded = 50\n"), "a hook budget of +50 -0 needs a reason"),
        (append("feature.toml", "[hooks]\nremoved = 2\n"), "a hook budget of +40 -2 needs a reason"),
        (
            swap("hooks.patch", " int arg_9 = 9;", " int arg_9 = 0;"),
            "first: hunk 1 of common/arg.cpp does not fit (in the",
        ),
        (lambda w, f: (w.patches / "stray").mkdir(), "stray: a folder that is not in the series"),
        (lambda w, f: (w.patches / "x.patch").write_text("") and None, "x.patch: not part of any feature"),
        (
            lambda w, f: (w.patches / "series").write_text("first\nghost\nsecond\n") and None,
            "ghost: listed in the series",
        ),
        (lambda w, f: (w.patches / "series").write_text("second\nfirst\n") and None, "which comes later"),
    ],
    ids=lambda value: value.replace(" ", "-")[:40] if isinstance(value, str) else "",
)
def test_each_rule(upstream: Upstream, change: Callable[[Upstream, Path], None], said: str) -> None:
    folder = good(upstream)
    change(upstream, folder)
    with pytest.raises(LintFailedError) as caught:
        lint.check(upstream.patches, upstream.pristine())
    assert any(said in line for line in caught.value.context), caught.value.context
    assert caught.value.exit_code == 6


def test_a_reason_pays_for_a_larger_budget(upstream: Upstream) -> None:
    folder = good(upstream)
    hooks("int core_5 = 5;\n", FN)(upstream, folder)
    append("feature.toml", '[hooks]\nadded = 50\nremoved = 1\nreason = "a table"\n')(upstream, folder)
    lint.check(upstream.patches, upstream.pristine())


def test_symbols_that_are_fine(upstream: Upstream) -> None:
    good(upstream)
    fine = (
        "static int local(int x) {\n}\nnamespace {\nint hidden(int x) {\n}\n}  // namespace\n"
        "namespace fn_first {\nint inner() {\n}\n} // namespace fn_first\n"
        'static const char * text = R"(\nplain words (here)\n)";\n/*\nmore words (here)\n*/\n'
        'extern "C" {\nint fn_c(int x) {\n}\n}\n'
        "GGML_API bool fn_exported(int x) {\n}\nvoid fn_class::run(int x) {\n}\nGGML_UNUSED(x);\n"
    )
    path = upstream.patches / "first/src/fn-first.cpp"
    path.write_text(path.read_text() + fine)
    lint.check(upstream.patches, upstream.pristine())


def test_cuda_only_on_its_target(upstream: Upstream) -> None:
    good(upstream)
    upstream.source("first", "src/fn-k.cu", "static int x;\n")
    path = upstream.patches / "first/feature.toml"
    path.write_text(path.read_text() + '[[sources]]\ntarget = "ggml-cuda"\nfiles = ["src/fn-k.cu"]\n')
    lint.check(upstream.patches, upstream.pristine())
    path.write_text(path.read_text().replace("ggml-cuda", "ggml-cpu"))
    with pytest.raises(LintFailedError) as caught:
        lint.check(upstream.patches, None)
    assert any("a .cu file only compiles on target ggml-cuda" in line for line in caught.value.context)


def test_same_name_in_two_features(upstream: Upstream) -> None:
    good(upstream)
    upstream.source("second", "src/fn-first.h", "#pragma once\n")
    with pytest.raises(LintFailedError) as caught:
        lint.check(upstream.patches, None)
    assert any("fn-first.h exists in first already" in line for line in caught.value.context)


def test_a_feature_must_apply_with_only_what_it_requires(upstream: Upstream) -> None:
    """``third`` edits a line that ``second`` added, without saying so."""
    good(upstream)
    upstream.feature("third", {"common/arg.cpp": ("fn_second();\n", "fn_second();\nfn_third();\n")})
    with pytest.raises(LintFailedError) as caught:
        lint.check(upstream.patches, upstream.pristine())
    (line,) = caught.value.context
    assert line.startswith("third: hunk 1 of common/arg.cpp does not fit (with only third): ")
    toml = upstream.patches / "third/feature.toml"
    toml.write_text(toml.read_text().replace("requires = []", 'requires = ["second"]'))
    lint.check(upstream.patches, upstream.pristine())


def test_all_problems_at_once(upstream: Upstream) -> None:
    folder = good(upstream)
    (folder / "README.md").unlink()
    (folder / "src/fn-first.cpp").unlink()
    (upstream.patches / "stray").mkdir()
    with pytest.raises(LintFailedError) as caught:
        lint.check(upstream.patches, upstream.pristine())
    assert caught.value.message == f"the patches have {len(caught.value.context)} problems"
    assert len(caught.value.context) == 4  # the header is no longer included by anything
