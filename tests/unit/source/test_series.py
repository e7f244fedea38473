"""series and feature.toml: what is accepted, and where an error is said to be."""

from __future__ import annotations

from pathlib import Path

import pytest
from upstream import Upstream

from flashnext.build import series
from flashnext.errors import (
    FeatureInvalidError,
    FeatureRequiredError,
    PatchError,
    SeriesInvalidError,
    UnknownFeatureError,
    UsageError,
)


def problems(call, kind: type[PatchError]) -> list[str]:  # type: ignore[no-untyped-def]
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.exit_code == 6
    assert caught.value.advice
    return list(caught.value.context)


def test_order_comments_and_blank_lines(upstream: Upstream) -> None:
    for name in ("b", "a"):
        upstream.feature(name)
    (upstream.patches / "series").write_text("# why b is first\nb\n\n  a   # trailing\n")
    assert [f.id for f in series.load_series(upstream.patches)] == ["b", "a"]


def test_series_errors_are_all_reported_with_their_line(upstream: Upstream) -> None:
    path = upstream.patches / "series"
    path.write_text("a\nBad_Name\na\n")
    assert problems(lambda: series.read_series(upstream.patches), SeriesInvalidError) == [
        f"{path}:2: 'Bad_Name' is no feature id (lower case, digits, single dashes)",
        f"{path}:3: a is listed already in line 1",
    ]


def test_missing_series_and_missing_folder(upstream: Upstream) -> None:
    (upstream.patches / "series").write_text("ghost\n")
    found = problems(lambda: series.load_series(upstream.patches), SeriesInvalidError)
    assert found == [f"{upstream.patches / 'ghost'}: no folder"]
    (upstream.patches / "series").unlink()
    problems(lambda: series.load_series(upstream.patches), SeriesInvalidError)


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ('id = "a"\nsummary = "s"\nkill_switch = "k"\nrequire = []\n', 4, "did you mean requires?"),
        ('id = "a"\nsummary = "s"\n', 1, "kill_switch is missing"),
        ('id = "a"\nsummary = "s"\nkill_switch = ""\n', 3, "kill_switch"),
        ('id = "b"\nsummary = "s"\nkill_switch = "k"\n', 1, "id is 'b', the folder is 'a'"),
        ('id = "a"\nsummary = "s"\nkill_switch = "k"\nrequires = ["a"]\n', 4, "requires itself"),
        ('id = "a"\nsummary = "s"\nkill_switch = "k"\n[hooks]\nadd = 3\n', 5, "did you mean added?"),
        ('id = "a"\nsummary = "s"\nkill_switch = "k"\n[hooks]\nadded = -1\n', 5, "hooks.added"),
        (
            'id = "a"\nsummary = "s"\nkill_switch = "k"\n'
            '[[sources]]\ntarget = "llama"\nfiles = ["src/fn-a.cpp"]\n'
            '[[sources]]\ntarget = "ggml"\nfile = ["src/fn-b.cpp"]\n',
            9,
            "did you mean files?",
        ),
        ('id = "a"\nsummary = "s"\nkill_switch = "k"\n[[sources]]\ntarget = "x"\nfiles = []\n', 6, "files"),
        ('id = "a"\nsummary = \nkill_switch = "k"\n', 2, "Invalid value"),
        ('id = "a"\nid = "a"\n', 2, "overwrite"),
    ],
)
def test_feature_errors_name_file_and_line(upstream: Upstream, text: str, line: int, said: str) -> None:
    path = upstream.feature("a") / "feature.toml"
    path.write_text(text)
    found = problems(lambda: series.load_series(upstream.patches), FeatureInvalidError)
    assert any(entry.startswith(f"{path}:{line}: ") and said in entry for entry in found), found


def test_errors_of_all_features_at_once(upstream: Upstream) -> None:
    for name in ("a", "b"):
        (upstream.feature(name) / "feature.toml").write_text("nonsense = 1\n")
    found = "\n".join(problems(lambda: series.load_series(upstream.patches), FeatureInvalidError))
    assert "/a/feature.toml" in found
    assert "/b/feature.toml" in found


def test_requirement_that_is_unknown_or_later(upstream: Upstream) -> None:
    upstream.feature("first", requires=["second2"])
    upstream.feature("other", requires=["second"])
    upstream.feature("second", requires=["other"])
    found = problems(lambda: series.load_series(upstream.patches), SeriesInvalidError)
    first = upstream.patches / "first/feature.toml"
    other = upstream.patches / "other/feature.toml"
    assert found == [
        f"{first}:3: first requires second2, which is not in the series; did you mean second?",
        f"{other}:3: other requires second, which comes later in the series",
    ]


def test_selection(upstream: Upstream) -> None:
    upstream.feature("base")
    upstream.feature("top", requires=["base"])
    upstream.feature("alone")
    features = series.load_series(upstream.patches)
    assert [f.id for f in series.select(features, without=["top"])] == ["base", "alone"]
    assert [f.id for f in series.select(features, without=["top", "base"])] == ["alone"]
    with pytest.raises(FeatureRequiredError) as needed:
        series.select(features, without=["base"])
    assert needed.value.context == ("top requires base",)
    with pytest.raises(UnknownFeatureError) as unknown:
        series.select(features, without=["alnoe"])
    assert unknown.value.context == ("alnoe: not in the series; did you mean alone?",)
    assert issubclass(UnknownFeatureError, UsageError)
    assert unknown.value.exit_code == 2


def test_closure_is_in_series_order(upstream: Upstream) -> None:
    upstream.feature("a")
    upstream.feature("b")
    upstream.feature("c", requires=["a"])
    upstream.feature("d", requires=["c", "b"])
    features = series.load_series(upstream.patches)
    assert [f.id for f in series.closure(features, "c")] == ["a", "c"]
    assert [f.id for f in series.closure(features, "d")] == ["a", "b", "c", "d"]


def test_hash_follows_every_input_and_nothing_else(upstream: Upstream, tmp_path: Path) -> None:
    upstream.feature("a", {"src/core.cpp": ("int core_5 = 5;\n", "fn_a();\n")})
    upstream.source("a", "src/fn-a.cpp")
    upstream.source("a", "tests/test-fn-a.cpp")
    cmake = tmp_path / "flashnext.cmake"
    cmake.write_text("# one\n")

    def digest() -> str:
        return series.series_hash(series.load_series(upstream.patches), cmake)

    seen = {digest()}
    assert digest() in seen
    folder = upstream.patches / "a"
    for path in (
        *(folder / n for n in ("feature.toml", "hooks.patch", "src/fn-a.cpp", "tests/test-fn-a.cpp")),
        cmake,
    ):
        path.write_text(path.read_text() + "\n")
        assert digest() not in seen, path
        seen.add(digest())
    (folder / "src/fn-a.cpp").rename(folder / "src/fn-b.cpp")
    assert digest() not in seen
    seen.add(digest())
    (folder / "README.md").write_text("other words\n")
    assert digest() in seen


def test_hash_follows_the_order(upstream: Upstream, tmp_path: Path) -> None:
    upstream.feature("a")
    upstream.feature("b")
    features = series.load_series(upstream.patches)
    none = tmp_path / "none"
    assert series.series_hash(features, none) != series.series_hash(features[::-1], none)
    assert series.series_hash(features[:1], none) != series.series_hash(features, none)


def test_the_shipped_series_is_sound() -> None:
    from flashnext import paths

    for feature in series.load_series(paths.patches_dir()):
        assert feature.kill_switch
