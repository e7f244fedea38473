"""Judgement on the toolchain, before anything is configured: every problem at once, each with its fix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flashnext.errors import (
    BuildOptionsError,
    CMakeMissingError,
    CMakeTooOldError,
    CublasMissingError,
    CudaArchInvalidError,
    CudaArchUnsupportedError,
    CxxMissingError,
    DiskTooSmallError,
    HostCompilerTooNewError,
    NinjaMissingError,
    NinjaTooOldError,
    NvccBrokenError,
    NvccMissingError,
    NvccTooOldError,
    ToolchainError,
)
from flashnext.probe import gpu, host, toolchain
from flashnext.probe.toolchain import HostCompiler, Nvcc, Tool, Version, version_text

BACKENDS = ("auto", "cpu", "cuda")
# The two RTX 3090 of the profile that is measured: built for where no device can be asked.
DEFAULT_ARCH = "86"
# From this toolkit on all CUDA code of the pinned tree compiles (launch attributes, sm_89 and sm_90).
MIN_NVCC: Version = (11, 8)
# cmake/flashnext.cmake uses deferred calls (3.19); the package's requirement is what is tried.
MIN_CMAKE: Version = (3, 28)
MIN_NINJA: Version = (1, 11)
# Tree, objects and the installed copy, with room; one CUDA architecture's objects and libraries are larger.
DISK_BYTES = {"cpu": 1 << 30, "cuda": 4 << 30}
# nvcc keeps every intermediate file of a translation unit, per job.
TEMP_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
# Newest gcc per toolkit, for one without its header crt/host_config.h (source: NVIDIA's installation guide).
_NEWEST_GCC: tuple[tuple[Version, int], ...] = (
    ((13, 0), 15),
    ((12, 8), 14),
    ((12, 4), 13),
    ((12, 0), 12),
    ((11, 5), 11),
)
_ARCH = re.compile(r"(\d{2,3})([af]?)(-real|-virtual)?")


@dataclass(frozen=True)
class Toolchain:
    """What a build would use. A part that is missing is None, and then ``problems`` says so."""

    backend: str
    archs: tuple[str, ...]
    host: HostCompiler | None
    cuda_host: HostCompiler | None = None
    nvcc: Nvcc | None = None
    other_nvccs: tuple[Nvcc, ...] = ()
    gpus: gpu.GpuFacts | None = None
    problems: tuple[ToolchainError, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tools:
    """The programs of a checked toolchain."""

    host: HostCompiler
    cuda_host: HostCompiler
    nvcc: Nvcc | None
    cmake: Tool
    ninja: Tool
    ccache: Tool | None
    warnings: tuple[str, ...] = field(default=())


def parse_archs(text: str) -> tuple[str, ...]:
    """``"86,90a-real"`` as a tuple. Raises CudaArchInvalidError for `native`, `all` and what is unclear."""
    parts = re.split(r"\s*[,;]\s*|\s+", text.strip()) if text.strip() else []
    bad = []
    for part in parts:
        if not part:
            bad.append(f"{text.strip()!r} has an empty entry")
        elif part in ("native", "all", "all-major"):
            bad.append(
                f"{part}: a build says which cards it is for; {part!r} depends on the machine that builds"
            )
        elif re.fullmatch(r"\d{1,2}\.\d", part):
            bad.append(f"{part}: did you mean {part.replace('.', '')}?")
        elif match := re.fullmatch(r"(?:sm|compute)_?(\d{2,3}[af]?)", part):
            bad.append(f"{part}: did you mean {match[1]}?")
        elif not _ARCH.fullmatch(part):
            bad.append(f"{part}: not a compute capability")
    if bad or not parts:
        raise CudaArchInvalidError(
            "the list of CUDA architectures is not usable",
            context=list(dict.fromkeys(bad)) or ["it is empty"],
        )
    return tuple(dict.fromkeys(parts))


def find_toolchain(backend: str, archs: Sequence[str] = ()) -> Toolchain:
    """Choose backend, architectures and compilers. Quick: only what names a build; problems are collected."""
    if backend not in BACKENDS:
        raise BuildOptionsError(f"no backend {backend!r}", hint=f"one of {', '.join(BACKENDS)}")
    if archs and backend == "cpu":
        raise BuildOptionsError("--cuda-arch needs the cuda backend", hint="add `--backend cuda`")
    problems: list[ToolchainError] = []
    compiler, tried = toolchain.probe_host_compiler()
    if compiler is None:
        problems.append(CxxMissingError("no working C++ compiler", context=tried))
    gpus = None if backend == "cpu" else gpu.probe_gpus()
    if backend == "auto":
        backend = "cuda" if archs or (gpus is not None and gpus.devices) else "cpu"
    if backend == "cpu":
        return Toolchain("cpu", (), compiler, compiler, gpus=gpus, problems=tuple(problems))
    cuda_host = compiler
    if named := toolchain.named_compiler("CUDAHOSTCXX"):
        cuda_host, tried = toolchain.probe_host_compiler([named])
        if cuda_host is None:
            problems.append(CxxMissingError("CUDAHOSTCXX names no working compiler", context=tried))
    found = toolchain.probe_nvcc()
    nvcc = found[0] if found else None
    chosen, warnings = (tuple(archs), []) if archs else _default_archs(gpus)
    others = tuple(found[1:])
    problems += _nvcc_problems(nvcc, others, gpus)
    return Toolchain(
        "cuda", chosen, compiler, cuda_host, nvcc, others, gpus, tuple(problems), tuple(warnings)
    )


def _default_archs(gpus: gpu.GpuFacts | None) -> tuple[tuple[str, ...], list[str]]:
    devices = gpus.devices if gpus else ()
    seen = sorted({d.arch for d in devices if d.arch is not None}, key=int)
    unknown = [d.name for d in devices if d.arch is None]
    warnings = [f"the driver does not say the compute capability of {name}" for name in unknown]
    return (tuple(seen) or (DEFAULT_ARCH,)), warnings


def _nvcc_problems(
    nvcc: Nvcc | None, others: Sequence[Nvcc], gpus: gpu.GpuFacts | None
) -> Iterator[ToolchainError]:
    if nvcc is None:
        devices = [f"device {d.index}: {d.name}" for d in gpus.devices] if gpus else []
        tried = ["looked at CUDACXX, PATH", f"looked at {toolchain.DEFAULT_CUDA_ROOT}/bin/nvcc"]
        yield NvccMissingError("no CUDA compiler (nvcc)", context=[*devices, *tried])
        return
    used = f"used {nvcc.path} (found by {nvcc.found_by})"
    working = [n for n in others if n.failure is None and n.version and n.version[:2] >= MIN_NVCC]
    better = f"CUDACXX={working[0].path} takes the other one that is here, " if working else None
    if nvcc.failure is not None or nvcc.version is None:
        cls: type[ToolchainError] = (
            NvccMissingError if nvcc.failure == toolchain.NO_PROGRAM else NvccBrokenError
        )
        hint = better + f"version {version_text(working[0].version or ())}" if better else None
        yield cls("the CUDA compiler does not work", context=[used, str(nvcc.failure)], hint=hint)
    elif nvcc.version[:2] < MIN_NVCC:
        version = version_text(nvcc.version)
        hint = better + f"version {version_text(working[0].version or ())}" if better else None
        yield NvccTooOldError(
            f"nvcc {version} is too old, at least {version_text(MIN_NVCC)} is needed",
            context=[used],
            hint=hint,
        )


def check_toolchain(found: Toolchain, *, work: Path) -> Tools:
    """Every check that a build needs. Raises the one problem, or ToolchainError with all of them."""
    problems = list(found.problems)
    cmake = _checked_tool(
        "cmake", toolchain.probe_cmake(), MIN_CMAKE, CMakeMissingError, CMakeTooOldError, problems
    )
    ninja = _checked_tool(
        "ninja", toolchain.probe_ninja(), MIN_NINJA, NinjaMissingError, NinjaTooOldError, problems
    )
    warnings = list(found.warnings)
    if found.backend == "cuda" and found.nvcc and not any(isinstance(p, NvccBrokenError) for p in problems):
        for check in (_check_arch, _check_cublas, _check_cuda_host):
            problems += check(found, found.nvcc)
        warnings += _driver_warnings(found, found.nvcc)
    problems += _check_disk(found.backend, work)
    raise_problems(problems)
    assert found.host and found.cuda_host and cmake and ninja
    return Tools(
        found.host, found.cuda_host, found.nvcc, cmake, ninja, toolchain.probe_ccache(), tuple(warnings)
    )


def raise_problems(problems: Sequence[ToolchainError]) -> None:
    """Nothing for none, the problem itself for one, a ToolchainError that tells them all for more."""
    if not problems:
        return
    if len(problems) == 1:
        raise problems[0]
    lines: list[str] = []
    for problem in problems:
        lines.append(f"[{problem.id}] {problem.message}")
        lines += [f"  {line}" for line in problem.context]
        lines.append(f"  hint: {problem.advice}")
    raise ToolchainError(f"{len(problems)} problems with the toolchain", context=lines)


def _checked_tool(
    name: str,
    tool: Tool | None,
    minimum: Version,
    missing: Callable[..., ToolchainError],
    too_old: Callable[..., ToolchainError],
    problems: list[ToolchainError],
) -> Tool | None:
    if tool is None:
        problems.append(missing(f"no {name}: neither the Python package nor one on PATH"))
    elif tool.version is None:
        problems.append(missing(f"{name} does not run", context=[f"used {tool.path}"]))
    elif tool.version < minimum:
        problems.append(
            too_old(
                f"{name} {version_text(tool.version)} is too old, at least {version_text(minimum)} is needed",
                context=[f"used {tool.path}"],
            )
        )
    return tool


def _check_arch(found: Toolchain, nvcc: Nvcc) -> Iterator[ToolchainError]:
    if nvcc.version is None:
        return
    bases = [(arch, match[1]) for arch in found.archs if (match := _ARCH.fullmatch(arch))]
    missing = [arch for arch, base in bases if base not in nvcc.archs]
    used = f"used {nvcc.path} {version_text(nvcc.version)}"
    if not nvcc.archs:
        yield NvccBrokenError(
            "nvcc does not say what it compiles for", context=[used, "tried --list-gpu-arch"]
        )
    elif missing:
        yield CudaArchUnsupportedError(
            f"this nvcc cannot compile for {', '.join(missing)}",
            context=[used, f"it compiles for {', '.join(nvcc.archs)}"],
        )


def _check_cublas(found: Toolchain, nvcc: Nvcc) -> Iterator[ToolchainError]:
    cublas = toolchain.probe_cublas(nvcc)
    missing = [
        name
        for name, path in (("cublas_v2.h", cublas.header), ("libcublas.so", cublas.library))
        if path is None
    ]
    if missing and nvcc.version is not None:
        package = f"libcublas-dev-{nvcc.version[0]}-{nvcc.version[1]}"
        yield CublasMissingError(
            f"the CUDA toolkit is there, but not its cuBLAS: {' and '.join(missing)} missing",
            context=[f"used {nvcc.path}", *(f"looked in {p}" for p in nvcc.library_dirs()[:3])],
            hint=f"install the package {package} (NVIDIA's repository) or libcublas-dev (Debian's own)",
        )


def _check_cuda_host(found: Toolchain, nvcc: Nvcc) -> Iterator[ToolchainError]:
    compiler = found.cuda_host
    if compiler is None or nvcc.version is None:
        return
    limit = nvcc.newest_hosts.get(compiler.kind)
    if limit is None and compiler.kind == "gcc":
        limit = next((newest for since, newest in _NEWEST_GCC if nvcc.version[:2] >= since), None)
    if limit is not None and compiler.version[0] > limit:
        name = "g++" if compiler.kind == "gcc" else "clang++"
        yield HostCompilerTooNewError(
            f"{name} {version_text(compiler.version)} is too new for nvcc {version_text(nvcc.version)}",
            context=[f"used {compiler.cxx} and {nvcc.path}", f"this nvcc accepts {name} up to {limit}"],
            hint=f"install {name}-{limit} and set CUDAHOSTCXX={name}-{limit}, or take a newer CUDA toolkit",
        )


def _driver_warnings(found: Toolchain, nvcc: Nvcc) -> Iterator[str]:
    """A toolkit of a newer major version than the driver knows builds, but does not run on this machine."""
    if found.gpus is None or found.gpus.smi is None or nvcc.version is None:
        return
    level = gpu.driver_cuda_level(found.gpus.smi)
    if level is not None and level[0] < nvcc.version[0]:
        yield (
            f"the driver supports CUDA {version_text(level)}, the toolkit is {version_text(nvcc.version)}: "
            "the build will not run here until the driver is updated"
        )


def _check_disk(backend: str, work: Path) -> Iterator[ToolchainError]:
    for what, folder, need in (
        ("the work folder", work, DISK_BYTES[backend]),
        ("temporary files", host.temp_dir(), TEMP_BYTES[backend]),
    ):
        free = host.disk_free_bytes(folder)
        if free < need:
            yield DiskTooSmallError(
                f"not enough disk for {what}: {free / 2**30:.1f} GiB free, {need / 2**30:.1f} GiB needed",
                context=[str(folder)],
            )
