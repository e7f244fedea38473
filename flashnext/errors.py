"""The one tree of errors.

A class per stage fixes the exit code; a subclass per kind of failure fixes the id (kebab-case, unique) and
the hint that tells a person what to do next. Raise the subclass with a message and context lines:

    raise SdistHashMismatch("the sdist is not the pinned one", context=[f"expected {a}", f"found {b}"])
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar


class FlashnextError(Exception):
    """Base of every failure that flashnext explains: ``error[id]: message``, context, ``hint: ...``."""

    exit_code: ClassVar[int] = 1
    id: ClassVar[str] = "bug"
    hint: ClassVar[str] = "this is a bug in flashnext: please report it with the lines above"

    def __init__(self, message: str, *, context: Sequence[str] = (), hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.context = tuple(context)
        self.advice = hint if hint is not None else type(self).hint

    def to_json(self) -> dict[str, Any]:
        """The machine form: ``{"error": id, "message", "context": [...], "hint", "exit_code"}``."""
        return {
            "error": self.id,
            "message": self.message,
            "context": list(self.context),
            "hint": self.advice,
            "exit_code": self.exit_code,
        }


def all_errors() -> Iterator[type[FlashnextError]]:
    """Every class of the tree, base included (for the test that ids are unique and hints are present)."""
    todo: list[type[FlashnextError]] = [FlashnextError]
    while todo:
        cls = todo.pop()
        yield cls
        todo.extend(cls.__subclasses__())


# --- stages: one exit code each --------------------------------------------------------------------------


class UsageError(FlashnextError):
    exit_code = 2
    id = "usage"
    hint = "see `flashnext --help`"


class ProfileError(FlashnextError):
    exit_code = 3
    id = "profile"
    hint = "see `flashnext profile schema` for every key"


class HostError(FlashnextError):
    exit_code = 4
    id = "host"
    hint = "this host cannot run the profile as it is"


class ModelError(HostError):
    """A model file that llama-server would reject or abort on."""

    id = "model"
    hint = "see `flashnext model inspect PATH`"


class FetchError(FlashnextError):
    exit_code = 5
    id = "fetch"
    hint = "fetch the sdist elsewhere and pass it with `--sdist FILE`"


class PatchError(FlashnextError):
    exit_code = 6
    id = "patch"
    hint = "see `flashnext patch check`"


class BuildError(FlashnextError):
    exit_code = 7
    id = "build"
    hint = "the log named above has the compiler's own words"


class ServerError(FlashnextError):
    exit_code = 8
    id = "server"
    hint = "the log named above has the server's own words"


class GateFailedError(FlashnextError):
    exit_code = 9
    id = "gate-failed"
    hint = "the report names the cells that missed their gate"


class InconclusiveError(FlashnextError):
    exit_code = 10
    id = "inconclusive"
    hint = "run more processes per arm"


class LockedError(FlashnextError):
    exit_code = 11
    id = "locked"
    hint = "wait for the other process, or stop it"


# --- usage and console -----------------------------------------------------------------------------------


# --- fetch and extraction --------------------------------------------------------------------------------


# --- patches ---------------------------------------------------------------------------------------------


# --- toolchain and build ---------------------------------------------------------------------------------


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


class BuildDamagedError(BuildError):
    id = "build-damaged"
    hint = "remove it with `flashnext build --remove KEY` and build again: objects are kept, so it is quick"


# --- model files -----------------------------------------------------------------------------------------


# --- profiles --------------------------------------------------------------------------------------------


# --- host and serving ------------------------------------------------------------------------------------
