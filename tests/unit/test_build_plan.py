"""What decides a build: flags, keys, and the files that CMake gets."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flashnext import paths, proc
from flashnext.build import cmake, pipeline
from flashnext.build.pipeline import Request, make_plan
from flashnext.build.series import load_series
from flashnext.errors import BuildOptionsError, SdistSizeMismatchError, UnknownFeatureError
from flashnext.probe import toolchain as probe
from flashnext.probe.toolchain import probe_cmake
from tests.fakes.programs import FakeBin


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeBin:
    made = FakeBin(tmp_path)
    made.gxx()
    made.nvcc()
    monkeypatch.setenv("PATH", made.path(made.cuda / "bin"))
    for name in ("CC", "CXX", "CUDACXX", "CUDAHOSTCXX", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(probe, "DEFAULT_CUDA_ROOT", tmp_path / "none")
    return made


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the shipped data that a test may edit."""
    root = tmp_path / "shipped"
    for name in ("patches", "cmake", "vendor"):
        shutil.copytree(paths.data_root() / name, root / name)
    monkeypatch.setattr(paths, "data_root", lambda: root)
    return root


def test_everything_that_upstream_would_guess_is_chosen(fakes: FakeBin) -> None:
    flags = make_plan(Request(backend="cuda", archs=("86", "90"))).flags
    assert flags["GGML_NATIVE"] == "OFF"
    assert flags["CMAKE_CUDA_ARCHITECTURES"] == "86;90"
    for name in (
        "LLAMA_USE_PREBUILT_UI",
        "LLAMA_OPENSSL",
        "LLAMA_LLGUIDANCE",
        "GGML_CUDA_NCCL",
        "GGML_RPC_RDMA",
    ):
        assert flags[name] == "OFF", name
    assert flags["GGML_RPC"] == flags["GGML_CUDA"] == "ON"
    cpu = make_plan(Request(backend="cpu")).flags
    assert not [name for name in cpu if "CUDA" in name]
    assert not [value for flags in (flags, cpu) for value in flags.values() if value.startswith("/")]


def test_an_sdist_that_is_named_is_judged_before_anything_else(fakes: FakeBin, tmp_path: Path) -> None:
    """Not only where its content is needed: an installed build or an unpacked tree would hide it."""
    wrong = tmp_path / "small.tar.gz"
    wrong.write_bytes(b"not the pinned one")
    with pytest.raises(SdistSizeMismatchError) as caught:
        make_plan(Request(backend="cpu", sdist=wrong))
    assert caught.value.exit_code == 5


@pytest.mark.parametrize(("machine", "has"), [("x86_64", True), ("aarch64", False)])
def test_avx2_belongs_to_x86(machine: str, has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    flags = cmake.build_flags("cpu", (), "abc")
    assert ("GGML_AVX2" in flags) == has


def test_an_edit_of_ours_is_another_build_in_the_same_work_folder(fakes: FakeBin, data: Path) -> None:
    request = Request(backend="cpu")
    before = make_plan(request)
    assert make_plan(request).key == before.key
    source = data / "patches/build-stamp/src/fn-build-stamp.cpp"
    source.write_text(source.read_text() + "// edit\n")
    after = make_plan(request)
    assert after.key != before.key and after.series_hash != before.series_hash
    assert after.work == before.work


@pytest.mark.parametrize(
    "name", ["cmake/flashnext.cmake", "cmake/fn-build-info.h.in", "patches/build-stamp/hooks.patch"]
)
def test_every_input_is_in_the_key(name: str, fakes: FakeBin, data: Path) -> None:
    before = make_plan(Request(backend="cpu"))
    (data / name).write_text((data / name).read_text() + "\n")
    assert make_plan(Request(backend="cpu")).key != before.key


def test_a_readme_is_no_input(fakes: FakeBin, data: Path) -> None:
    before = make_plan(Request(backend="cpu"))
    readme = data / "patches/build-stamp/README.md"
    readme.write_text(readme.read_text() + "more\n")
    assert make_plan(Request(backend="cpu")).key == before.key


def test_configurations_have_work_folders_of_their_own(
    fakes: FakeBin, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        Request(backend="cpu"),
        Request(backend="cpu", vanilla=True),
        Request(backend="cuda"),
        Request(backend="cuda", archs=("90",)),
    ]
    plans = [make_plan(request) for request in requests]
    fakes.gxx("13.1.0")
    plans.append(make_plan(requests[0]))
    assert len({plan.work.root for plan in plans}) == len({plan.key for plan in plans}) == 5


def test_a_build_for_tests_is_another_build(fakes: FakeBin) -> None:
    product = make_plan(Request(backend="cpu"))
    tests = make_plan(Request(backend="cpu", tests=True))
    assert product.series_hash == tests.series_hash and product.flags == tests.flags
    assert product.key != tests.key and product.work != tests.work
    for plan, value in ((product, "OFF"), (tests, "ON")):
        settings = cmake.feature_settings(
            plan.work, plan.features, plan.series_hash, vanilla=False, tests=plan.request.tests
        )
        assert settings["FLASHNEXT_TESTS"] == value


def test_options_that_exclude_each_other(fakes: FakeBin) -> None:
    with pytest.raises(BuildOptionsError):
        make_plan(Request(vanilla=True, without=("build-stamp",)))
    with pytest.raises(UnknownFeatureError, match="no such feature: build-stmp") as caught:
        make_plan(Request(backend="cpu", without=("build-stmp",)))
    assert "did you mean build-stamp?" in caught.value.context[0]


def test_presets_reach_cmake_as_written(tmp_path: Path) -> None:
    values = {
        "A": "ON",
        "B": "$ORIGIN",
        "C": 'a "b" \\c;d',
        "CMAKE_PROJECT_llama.cpp_INCLUDE": "/x y/z.cmake",
    }
    presets, script = tmp_path / "presets.cmake", tmp_path / "show.cmake"
    presets.write_text(cmake.presets_text(values))
    show = "\n".join(f'message("{name}=${{{name}}}")' for name in values)
    script.write_text(f'include("{presets}")\n{show}\n')
    tool = probe_cmake()
    assert tool is not None
    done = proc.run([tool.path, "-P", script])
    assert done.err.splitlines() == [f"{name}={value}" for name, value in values.items()]


def test_the_features_file_calls_in_the_order_of_the_series() -> None:
    features = load_series(paths.patches_dir())
    lines = cmake.features_text(features, Path("/w/patches")).splitlines()[1:]
    heads = [line for line in lines if line.startswith("fn_feature(")]
    assert heads == [f'fn_feature({f.id} "/w/patches/{f.id}")' for f in features]
    hooked = [line for line in lines if line.startswith("fn_feature_hooks(")]
    assert hooked == [f"fn_feature_hooks({f.id})" for f in features if (f.folder / "hooks.patch").exists()]
    stamp = next(f for f in features if f.id == "build-stamp")
    target, file = stamp.sources[0].target, stamp.sources[0].files[0]
    assert f'fn_feature_sources(build-stamp "{target}" "/w/patches/build-stamp/{file}")' in lines
    program = next(p for f in features for p in f.executables if f.id == "fn-vgpu")
    files = " ".join(f'"/w/patches/fn-vgpu/{name}"' for name in program.files)
    link = " ".join(f'"{name}"' for name in program.link)
    assert f'fn_feature_executable(fn-vgpu "{program.name}" FILES {files} LINK {link})' in lines


def test_tools_see_an_allowlisted_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXXFLAGS", "-march=native")
    monkeypatch.setenv("LLAMA_ARG_MODEL", "x")
    work = pipeline.Workspace(tmp_path)
    env = cmake.tool_environment(work)
    assert "CXXFLAGS" not in env and "LLAMA_ARG_MODEL" not in env
    assert env["CCACHE_BASEDIR"] == env["GIT_CEILING_DIRECTORIES"] == str(tmp_path)
