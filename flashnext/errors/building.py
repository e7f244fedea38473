"""Errors of toolchain, compilation and installed builds."""

from __future__ import annotations

from flashnext.errors.base import BuildError, LockedError, UsageError


class CudaArchInvalidError(UsageError):
    id = "cuda-arch-invalid"
    hint = "name compute capabilities as numbers, e.g. `--cuda-arch 86` or `--cuda-arch 86,89`"


class BuildOptionsError(UsageError):
    id = "build-options"
    hint = "see `flashnext build --help`"


class NoSuchBuildError(UsageError):
    id = "no-such-build"
    hint = "see `flashnext build --list`"


class BuildLockedError(LockedError):
    id = "build-locked"
    hint = "another `flashnext build` works in this folder: wait for it, or stop it"


class ToolchainError(BuildError):
    """Several problems of the toolchain at once; each is also an error of its own when it is the only one."""

    id = "toolchain"
    hint = "mend each problem named above, then run the same command again: nothing was built"


class CxxMissingError(ToolchainError):
    id = "cxx-missing"
    hint = "install a C++ compiler (Debian and Ubuntu: `apt install g++`), or name one with CXX"


class CMakeMissingError(ToolchainError):
    id = "cmake-missing"
    hint = "flashnext brings its own: `python -m pip install --force-reinstall cmake`"


class CMakeTooOldError(ToolchainError):
    id = "cmake-too-old"
    hint = "`python -m pip install --upgrade cmake` in flashnext's environment; the system's need not change"


class NinjaMissingError(ToolchainError):
    id = "ninja-missing"
    hint = "flashnext brings its own: `python -m pip install --force-reinstall ninja`"


class NinjaTooOldError(ToolchainError):
    id = "ninja-too-old"
    hint = "`python -m pip install --upgrade ninja` in flashnext's environment; the system's need not change"


class NvccMissingError(ToolchainError):
    id = "nvcc-missing"
    hint = "install the CUDA toolkit, or name its compiler with CUDACXX=/path/to/nvcc, or use `--backend cpu`"


class NvccBrokenError(ToolchainError):
    id = "nvcc-broken"
    hint = "reinstall the CUDA toolkit, or name another nvcc with CUDACXX=/path/to/nvcc"


class NvccTooOldError(ToolchainError):
    id = "nvcc-too-old"
    hint = "install a newer CUDA toolkit, and name its compiler with CUDACXX=/path/to/nvcc"


class HostCompilerTooNewError(ToolchainError):
    id = "host-compiler-too-new"
    hint = "install an older g++ beside it and name it with CXX=g++-N, or install a newer CUDA toolkit"


class CudaArchUnsupportedError(ToolchainError):
    id = "cuda-arch-unsupported"
    hint = "use another CUDA toolkit (CUDACXX=/path/to/nvcc), or another `--cuda-arch`"


class CublasMissingError(ToolchainError):
    id = "cublas-missing"
    hint = "install the toolkit's cuBLAS development package"


class DiskTooSmallError(ToolchainError):
    id = "disk-too-small"
    hint = (
        "free some space there, or move the work folder with XDG_CACHE_HOME and temporary files with TMPDIR"
    )


class ConfigureFailedError(BuildError):
    id = "configure-failed"


class CompileFailedError(BuildError):
    id = "compile-failed"


class CompilerKilledError(BuildError):
    id = "compiler-killed"
    hint = "memory ran out: close other programs or add swap, then run again; finished objects are kept"


class InstallFailedError(BuildError):
    id = "install-failed"
    hint = "the builds folder must be writable and have space; the previous builds are as they were"


class ImportRefusedError(BuildError):
    id = "import-refused"
    hint = "give a folder with llama-server and its shared libraries, as `flashnext build` installs them"


class BuildDamagedError(BuildError):
    id = "build-damaged"
    hint = "remove it with `flashnext build --remove KEY` and build again: objects are kept, so it is quick"
