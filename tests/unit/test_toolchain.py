"""Toolchain faults, each with its own id and the fix in its hint, found before anything is configured."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashnext.build import toolchain
from flashnext.build.toolchain import check_toolchain, find_toolchain, parse_archs
from flashnext.errors import (
    BuildOptionsError,
    CMakeMissingError,
    CublasMissingError,
    CudaArchInvalidError,
    CudaArchUnsupportedError,
    CxxMissingError,
    DiskTooSmallError,
    HostCompilerTooNewError,
    NvccBrokenError,
    NvccMissingError,
    NvccTooOldError,
    ToolchainError,
)
from flashnext.probe import gpu, host
from flashnext.probe import toolchain as probe
from tests.fakes.programs import FakeBin

RTX_3090 = "0, GPU-aaa, NVIDIA GeForce RTX 3090, 8.6, 24576, 550.1"
RTX_3090_SECOND = "1, GPU-bbb, NVIDIA GeForce RTX 3090, 8.6, 24576, 550.1"
H200 = "2, GPU-ccc, NVIDIA H200, 9.0, 143771, 550.1"


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeBin:
    """A machine with g++ 12 and nothing else; cmake and ninja are the real ones of the environment."""
    made = FakeBin(tmp_path)
    made.gxx()
    monkeypatch.setenv("PATH", made.path(made.cuda / "bin"))
    for name in ("CC", "CXX", "CUDACXX", "CUDAHOSTCXX", "CUDA_VISIBLE_DEVICES", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(probe, "DEFAULT_CUDA_ROOT", tmp_path / "usr-local-cuda")
    return made


def check(backend: str, *archs: str) -> toolchain.Tools:
    return check_toolchain(find_toolchain(backend, archs), work=Path("/nonexistent/work"))


# --- what is chosen --------------------------------------------------------------------------------------


def test_auto_is_cpu_without_a_device_even_with_nvcc(fakes: FakeBin) -> None:
    fakes.nvcc()
    assert find_toolchain("auto").backend == "cpu"
    assert check("auto").nvcc is None


def test_auto_is_cuda_for_the_devices_seen(fakes: FakeBin) -> None:
    fakes.nvcc()
    fakes.smi(RTX_3090, RTX_3090_SECOND, H200)
    found = find_toolchain("auto")
    assert (found.backend, found.archs) == ("cuda", ("86", "90"))
    assert check("auto").warnings == ()


@pytest.mark.parametrize(
    ("visible", "names"),
    [("2", ["NVIDIA H200"]), ("GPU-bbb,0", ["GPU-bbb", "GPU-aaa"]), ("", []), ("-1,0", [])],
)
def test_hidden_devices_do_not_count(
    visible: str, names: list[str], fakes: FakeBin, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes.smi(RTX_3090, RTX_3090_SECOND, H200)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    facts = gpu.probe_gpus()
    assert [d.uuid if names[0].startswith("GPU") else d.name for d in facts.devices] == names
    assert bool(facts.failure) == (not names)


def test_a_device_is_described(fakes: FakeBin) -> None:
    fakes.smi(RTX_3090)
    (device,) = gpu.probe_gpus().devices
    assert (device.name, device.arch, device.memory_bytes) == ("NVIDIA GeForce RTX 3090", "86", 24 << 30)


def test_a_failing_nvidia_smi_is_no_device_and_says_why(fakes: FakeBin) -> None:
    fakes.program("nvidia-smi", "#!/bin/sh\necho 'NVIDIA-SMI has failed: no driver' >&2\nexit 9\n")
    facts = gpu.probe_gpus()
    assert facts.devices == () and facts.failure is not None
    assert "code 9" in facts.failure and "no driver" in facts.failure


def test_cuda_without_a_device_or_driver_is_for_86(fakes: FakeBin) -> None:
    fakes.nvcc()
    found = find_toolchain("cuda")
    assert found.archs == ("86",)
    assert check("cuda").nvcc is not None


def test_cudacxx_wins_over_path(fakes: FakeBin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.nvcc("11.5")
    other = fakes.nvcc("12.8", root=tmp_path / "other")
    monkeypatch.setenv("CUDACXX", str(other))
    tools = check("cuda")
    assert tools.nvcc is not None
    assert (tools.nvcc.path, tools.nvcc.version, tools.nvcc.found_by) == (other, (12, 8, 88), "CUDACXX")


def test_the_default_folder_is_looked_at_last(fakes: FakeBin, tmp_path: Path) -> None:
    fakes.nvcc("12.4", root=tmp_path / "usr-local-cuda")
    assert check("cuda").nvcc is not None
    fakes.nvcc("12.8")
    tools = check("cuda")
    assert tools.nvcc is not None and tools.nvcc.version == (12, 8, 88)


# --- faults ----------------------------------------------------------------------------------------------


def test_no_compiler(fakes: FakeBin) -> None:
    (fakes.bin / "g++").unlink()
    with pytest.raises(CxxMissingError) as caught:
        check("cpu")
    assert "apt install g++" in caught.value.advice
    assert "g++: not found on PATH" in caught.value.context
    assert caught.value.exit_code == 7


def test_cxx_names_nothing(fakes: FakeBin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++-99 -O3")
    with pytest.raises(CxxMissingError) as caught:
        check("cpu")
    assert caught.value.context == ("g++-99: not found on PATH",)


def test_nvcc_missing(fakes: FakeBin) -> None:
    fakes.smi(RTX_3090)
    with pytest.raises(NvccMissingError) as caught:
        check("auto")
    assert "CUDACXX" in caught.value.advice and "--backend cpu" in caught.value.advice
    assert "device 0: NVIDIA GeForce RTX 3090" in caught.value.context


def test_cudacxx_names_no_program(fakes: FakeBin, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.nvcc()
    monkeypatch.setenv("CUDACXX", "/opt/none/nvcc")
    with pytest.raises(NvccMissingError, match="does not work") as caught:
        check("cuda")
    assert "used /opt/none/nvcc (found by CUDACXX)" in caught.value.context


def test_nvcc_that_fails(fakes: FakeBin) -> None:
    nvcc = fakes.program("nvcc", "#!/bin/sh\necho 'nvcc fatal: broken' >&2\nexit 1\n")
    with pytest.raises(NvccBrokenError) as caught:
        check("cuda")
    assert caught.value.context == (
        f"used {nvcc} (found by PATH)",
        "`--version` failed with code 1: nvcc fatal: broken",
    )


def test_an_old_nvcc_first_on_path_names_itself_the_minimum_and_the_other(
    fakes: FakeBin, tmp_path: Path
) -> None:
    old = fakes.nvcc("11.5", root=tmp_path / "old")
    fakes.program("nvcc", f'#!/bin/sh\nexec {old} "$@"\n')  # as a distribution's wrapper
    newer = fakes.nvcc("12.4")
    with pytest.raises(ToolchainError) as caught:
        check("cuda")
    text = "\n".join((caught.value.message, *caught.value.context, caught.value.advice))
    assert "nvcc 11.5.88 is too old, at least 11.8 is needed" in text
    assert f"used {fakes.bin / 'nvcc'} (found by PATH)" in text
    assert f"CUDACXX={newer} takes the other one that is here, version 12.4.88" in text


def test_nvcc_too_old_alone(fakes: FakeBin) -> None:
    fakes.nvcc("11.5")
    fakes.gxx("10.2.0")
    with pytest.raises(NvccTooOldError):
        check("cuda")


def test_the_architecture_is_not_in_nvccs_list(fakes: FakeBin) -> None:
    fakes.nvcc(archs="50 60 70 75")
    with pytest.raises(CudaArchUnsupportedError) as caught:
        check("cuda")
    assert caught.value.message == "this nvcc cannot compile for 86"
    assert "it compiles for 50, 60, 70, 75" in caught.value.context


def test_an_architecture_with_a_suffix_is_looked_up_by_its_number(fakes: FakeBin) -> None:
    fakes.nvcc()
    assert check("cuda", "90a-real", "86-virtual").nvcc is not None
    with pytest.raises(CudaArchUnsupportedError, match=r"cannot compile for 120a$"):
        check("cuda", "86", "120a")


def test_cublas_missing_names_the_package(fakes: FakeBin) -> None:
    fakes.nvcc("12.4", cublas=False)
    with pytest.raises(CublasMissingError) as caught:
        check("cuda")
    assert "libcublas-dev-12-4" in caught.value.advice
    assert "cublas_v2.h and libcublas.so missing" in caught.value.message


@pytest.mark.parametrize(("header", "limit"), [(True, 11), (False, 13)])
def test_host_compiler_too_new(header: bool, limit: int, fakes: FakeBin) -> None:
    """The toolkit's own header decides; without one, the table of its version."""
    fakes.nvcc("12.4")
    fakes.gxx("14.1.0")
    if header:
        fakes.newest_gcc(11)
    with pytest.raises(HostCompilerTooNewError) as caught:
        check("cuda")
    assert caught.value.message == "g++ 14.1.0 is too new for nvcc 12.4.88"
    assert f"CUDAHOSTCXX=g++-{limit}" in caught.value.advice


def test_cudahostcxx_settles_it(fakes: FakeBin, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.nvcc("12.4")
    fakes.gxx("14.1.0")
    older = fakes.gxx("13.2.0", name="g++-13")
    monkeypatch.setenv("CUDAHOSTCXX", "g++-13")
    tools = check("cuda")
    assert (tools.host.version, tools.cuda_host.cxx) == ((14, 1, 0), older)


def test_a_driver_older_than_the_toolkit_is_a_warning(fakes: FakeBin) -> None:
    fakes.nvcc("12.0")
    fakes.smi(RTX_3090, level="11.7")
    (warning,) = check("auto").warnings
    assert "driver supports CUDA 11.7, the toolkit is 12.0.88" in warning


def test_cmake_too_old(fakes: FakeBin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the Python package has no binary the one on PATH is taken, and judged."""
    cmake = fakes.program("cmake", "#!/bin/sh\necho 'cmake version 3.13.4'\n")
    monkeypatch.setattr(probe, "_package_dir", lambda name: None)
    fakes.program("ninja", "#!/bin/sh\necho 1.8.2\n")
    with pytest.raises(ToolchainError) as caught:
        check("cpu")
    lines = caught.value.context
    assert "[cmake-too-old] cmake 3.13.4 is too old, at least 3.28 is needed" in lines
    assert f"  used {cmake}" in lines
    assert "[ninja-too-old] ninja 1.8.2 is too old, at least 1.11 is needed" in lines


def test_an_old_cmake_on_path_does_not_matter(fakes: FakeBin) -> None:
    fakes.program("cmake", "#!/bin/sh\necho 'cmake version 3.13.4'\n")
    assert (check("cpu").cmake.version or ()) >= (3, 28)


def test_no_cmake_at_all(fakes: FakeBin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "probe_cmake", lambda: None)
    with pytest.raises(CMakeMissingError) as caught:
        check("cpu")
    assert "pip install" in caught.value.advice


@pytest.mark.parametrize("full", ["work", "temp"])
def test_disk(full: str, fakes: FakeBin, monkeypatch: pytest.MonkeyPatch) -> None:
    temp = Path("/somewhere/tmp")
    monkeypatch.setenv("TMPDIR", str(temp))
    free = {"work": {temp: 100 << 30}, "temp": {temp: 100 << 20}}[full]
    default = 100 << 30 if full == "temp" else 100 << 20
    monkeypatch.setattr(host, "disk_free_bytes", lambda path: free.get(path, default))
    with pytest.raises(DiskTooSmallError) as caught:
        check("cpu")
    assert caught.value.context == (str(temp) if full == "temp" else "/nonexistent/work",)
    assert "0.1 GiB free" in caught.value.message


def test_every_problem_is_told_at_once(fakes: FakeBin, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.nvcc("12.4", archs="75", cublas=False)
    fakes.gxx("15.1.0")
    monkeypatch.setattr(host, "disk_free_bytes", lambda path: 0)
    with pytest.raises(ToolchainError) as caught:
        check("cuda")
    heads = [line.split("]")[0][1:] for line in caught.value.context if line.startswith("[")]
    assert heads == [
        "cuda-arch-unsupported",
        "cublas-missing",
        "host-compiler-too-new",
        "disk-too-small",
        "disk-too-small",
    ]
    assert sum(line.startswith("  hint: ") for line in caught.value.context) == len(heads)


# --- options ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("native", "depends on the machine that builds"),
        ("all", "depends on the machine that builds"),
        ("8.6", "did you mean 86?"),
        ("sm_86", "did you mean 86?"),
        ("86,abc", "abc: not a compute capability"),
        (" ", "it is empty"),
        ("", "it is empty"),
        ("86,,", "'86,,' has an empty entry"),
        (",86", "',86' has an empty entry"),
    ],
)
def test_architectures_that_are_refused(text: str, part: str) -> None:
    with pytest.raises(CudaArchInvalidError) as caught:
        parse_archs(text)
    assert part in "\n".join(caught.value.context)
    assert caught.value.exit_code == 2


def test_architectures_as_a_list() -> None:
    assert parse_archs("86, 89;90a-real 86") == ("86", "89", "90a-real")


def test_architectures_need_cuda(fakes: FakeBin) -> None:
    with pytest.raises(BuildOptionsError):
        find_toolchain("cpu", ["86"])
    assert find_toolchain("auto", ["86"]).backend == "cuda"
    with pytest.raises(BuildOptionsError):
        find_toolchain("rocm")
