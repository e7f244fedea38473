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


class UnknownFeatureError(UsageError):
    id = "unknown-feature"
    hint = "see `flashnext patch list`"


class FeatureRequiredError(UsageError):
    id = "feature-required"
    hint = "leave out the features that need it too, with one `--without` each"


class FeatureExistsError(UsageError):
    id = "feature-exists"
    hint = "choose another id, or edit the feature with `flashnext patch shell ID`"


class NoShellTreeError(UsageError):
    id = "no-shell-tree"
    hint = "make one with `flashnext patch shell ID`, edit it, then refresh"


class ShellTreeOutdatedError(UsageError):
    id = "shell-tree-outdated"
    hint = "`flashnext patch shell ID --fresh` makes a new one; edits in the old one are lost"


class NothingToWriteError(UsageError):
    id = "nothing-to-write"
    hint = "edit the vendored files in the folder named above first"


class ReportWriteError(UsageError):
    id = "report-not-written"
    hint = "choose another file with `--out`; an existing one is never replaced"


class SamePinError(UsageError):
    id = "same-pin"
    hint = "`--to` wants a pin file of another version; the present one is vendor/pin.toml"


class CacheLockedError(LockedError):
    id = "cache-locked"
    hint = "another flashnext holds this cache folder: wait for it, or stop it"


# --- fetch and extraction --------------------------------------------------------------------------------


class PinInvalidError(FetchError):
    id = "pin-invalid"
    hint = "restore vendor/pin.toml from git, or mend the keys named above"


class PipNotUsableError(FetchError):
    id = "pip-not-usable"
    hint = "`python -m ensurepip` installs pip; or pass the sdist with `--sdist FILE`"


class IndexUnreachableError(FetchError):
    id = "index-unreachable"
    hint = "check the network, and `pip config list` for index-url, proxy and cert; or pass `--sdist FILE`"


class IndexUnreadableError(FetchError):
    id = "index-unreadable"
    hint = "index-url must name a simple package index: see `pip config list`; or pass `--sdist FILE`"


class IndexWithoutFileError(FetchError):
    id = "index-without-file"
    hint = "point PIP_INDEX_URL at an index that has the file, or pass it with `--sdist FILE`"


class IndexHashMismatchError(FetchError):
    id = "index-hash-mismatch"
    hint = (
        "that index serves another file under this name: do not use it; take another index or `--sdist FILE`"
    )


class HttpStatusError(FetchError):
    id = "http-status"
    hint = "try again later, or point PIP_INDEX_URL at another index, or pass the sdist with `--sdist FILE`"


class SdistNotFoundError(FetchError):
    id = "sdist-not-found"
    hint = "`--sdist` wants the path of the pinned .tar.gz"


class SdistTruncatedError(FetchError):
    id = "sdist-truncated"
    hint = "run the command again: it resumes where the download stopped"


class SdistSizeMismatchError(FetchError):
    id = "sdist-size-mismatch"
    hint = "a copy or a download was cut short or altered: fetch the pinned file again"


class SdistHashMismatchError(FetchError):
    id = "sdist-hash-mismatch"
    hint = (
        "the file is not the pinned one and was not used: fetch it again, from another index if it stays so"
    )


class SdistUnreadableError(FetchError):
    id = "sdist-unreadable"
    hint = "fetch the sdist again; it must be a .tar.gz with one top folder"


class SdistUnsafeError(FetchError):
    id = "sdist-unsafe"
    hint = "nothing of it was kept: an sdist that writes outside its own folder must not be used"


class SourceMissingError(FetchError):
    id = "sdist-without-source"
    hint = "`source_dir` of vendor/pin.toml must name the llama.cpp folder inside the sdist"


class NoSpaceError(FetchError):
    id = "no-space"
    hint = "free some space there, or move the cache with XDG_CACHE_HOME"


class CacheNotWritableError(FetchError):
    id = "cache-not-writable"
    hint = "make the folder writable, or move the cache with XDG_CACHE_HOME"


class PristineChangedError(FetchError):
    id = "pristine-changed"
    hint = "something edited the unpacked source: delete the folder named above and run again"


# --- patches ---------------------------------------------------------------------------------------------


class GitNotFoundError(BuildError):
    id = "git-not-found"
    hint = "install git (Debian and Ubuntu: `apt install git`)"


class SeriesInvalidError(PatchError):
    id = "series-invalid"
    hint = "patches/series lists feature ids, one per line, each after what it requires"


class FeatureInvalidError(PatchError):
    id = "feature-invalid"
    hint = "mend the lines named above; `flashnext patch new ID` writes a valid feature.toml to compare with"


class HooksInvalidError(PatchError):
    id = "hooks-invalid"
    hint = "hooks.patch only edits vendored text files: write it with `flashnext patch refresh ID`"


class HunkFailedError(PatchError):
    id = "patch-hunk-failed"
    hint = "`flashnext patch shell ID` opens the tree before it: mend it, then `flashnext patch refresh ID`"


class PatchNotVerifiedError(PatchError):
    id = "patch-not-verified"
    hint = "the tree was not used: run `flashnext patch check`, and report this if it stays"


class LintFailedError(PatchError):
    id = "patch-lint-failed"
    hint = "mend what is named above, then run `flashnext patch check` again"


class RebaseConflictError(PatchError):
    id = "rebase-conflict"
    hint = "mend the named hunks in the folder named above, then run the rebase again"


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


class ImportRefusedError(BuildError):
    id = "import-refused"
    hint = "give a folder with llama-server and its shared libraries, as `flashnext build` installs them"


class BuildDamagedError(BuildError):
    id = "build-damaged"
    hint = "remove it with `flashnext build --remove KEY` and build again: objects are kept, so it is quick"


# --- model files -----------------------------------------------------------------------------------------


class ModelHeaderError(ModelError):
    id = "model-header-broken"
    hint = "fetch the file again and compare its size and SHA-256 with those of its source"


class ModelProblemsError(ModelError):
    """A model file with one or more problems; the context lists them all."""

    id = "model-problems"
    hint = "see `flashnext model inspect PATH` for all of them with their hints"


class ModelWriteError(HostError):
    id = "model-write-failed"
    hint = "choose a folder you may write to with `--out`"


class ModelDiskFullError(ModelWriteError):
    id = "model-no-space"
    hint = "free some space, choose another folder with `--out`, or write fewer layers"


# --- profiles --------------------------------------------------------------------------------------------


class ProfileNotFoundError(ProfileError):
    id = "profile-not-found"
    hint = "see `flashnext profile list`, or give the path of a .yaml file"


class ProfileInvalidError(ProfileError):
    """Problems of form, of single values, or between values: all of them at once, each with file and line."""

    id = "profile-invalid"
    hint = "mend the lines named above; `flashnext profile schema` describes every key"


class ProfileNotQualifiedError(ProfileError):
    """A profile that calls itself qualified and deviates from the qualified set."""

    id = "profile-not-qualified"
    hint = "restore the values named above, or copy the profile and set `kind: experimental` in the copy"


class ProfileFlagsError(ProfileError):
    """The built server does not know a flag that the profile's command line uses."""

    id = "profile-flags"
    hint = "build again with `flashnext build`: the installed server is of another version"


# --- host and serving ------------------------------------------------------------------------------------


class HostNotQualifiedError(HostError):
    """Devices, driver, build or limits of this machine do not meet the profile: all reasons at once."""

    id = "host-not-qualified"
    hint = "mend what is named above, or serve another profile (`flashnext profile list`)"


class MemoryUnfitError(HostError):
    """The plan of a profile's memory is larger than what devices or host have left."""

    id = "memory-unfit"
    hint = "see `flashnext plan --profile NAME` for the whole calculation"


class NoBuildError(HostError):
    id = "no-build"
    hint = "run `flashnext build`"


class BuildUnfitError(HostError):
    """An installed build that is not ours, is of another series, or lacks a feature the profile uses."""

    id = "build-unfit"
    hint = "run `flashnext build` (without `--without` and `--vanilla`), then serve again"


class ModelFilesError(ModelError):
    """Files of a profile that are missing, partial, or not the ones it names."""

    id = "model-files"
    hint = "fetch the files named above completely; serving never downloads"


class ContextTooLongError(ProfileError):
    id = "context-too-long"
    hint = "lower context.size to the model's own length"


class PlacementError(ProfileError):
    """A placement rule without a tensor, or experts without a rule."""

    id = "placement-unfit"
    hint = "see `flashnext model inspect PATH --json`; a rule is a regular expression over names"


class HostMemoryError(HostError):
    id = "host-memory"
    hint = "end other programs, or serve on a machine with more memory"


class StateNotWritableError(HostError):
    """A folder for logs, state, locks or samples that cannot be made or written."""

    id = "state-not-writable"
    hint = "make it writable, or choose another with XDG_STATE_HOME, XDG_RUNTIME_DIR or the bench's `--out`"


class StrayConfigError(HostError):
    id = "stray-config"
    hint = "move the file away: llama-server reads it whatever the command line says"


class LeftoverError(HostError):
    id = "leftover-processes"
    hint = "end them with `kill -9 PID`; one that does not go is stuck in its driver"


class PortInUseError(LockedError):
    id = "port-in-use"
    hint = "stop that process, or choose another port with `--port N` (0 finds a free one)"


class AlreadyServingError(LockedError):
    id = "already-serving"
    hint = "see `flashnext status`; end it with `flashnext stop`, or choose another port with `--port N`"


class ServiceFolderError(HostError):
    id = "service-folder"
    hint = "run it with sudo, or use `--user` for this user's own service manager"


class NotServingError(UsageError):
    id = "not-serving"
    hint = "start one with `flashnext serve --profile demo`"


class ServerStartError(ServerError):
    """llama-server or a virtual GPU ended, or did not come up, before it was ready. Never retried."""

    id = "server-start-failed"


class ServerDiedError(ServerError):
    """llama-server ended after it had been ready, and the restarts that are allowed are used up."""

    id = "server-died"


class DeviceLostError(ServerError):
    id = "device-lost"
    hint = "switch the machine off at the power supply for ten seconds: the card does not come back else"


class InsaneTextError(ServerError):
    """The server answers, but with degenerate text."""

    id = "insane-text"
    hint = "keep the log, and compare with `flashnext serve --profile demo`; see the README, when it refuses"


# --- bench -----------------------------------------------------------------------------------------------


class BenchExtraMissingError(UsageError):
    """A part of the bench was called whose packages are in the extra ``bench``."""

    id = "bench-extra-missing"
    hint = "install this package's extra `bench`; in a checkout: .venv/bin/pip install -e '.[bench]'"


class ScenarioInvalidError(UsageError):
    id = "scenario-invalid"
    hint = "the scenarios and gates are data: compare with bench/scenarios/*.yaml and bench/gates.yaml"


class SamplesUnreadableError(UsageError):
    id = "samples-unreadable"
    hint = "a bench folder holds samples.jsonl, written by `flashnext bench`"


class SamplesMismatchError(UsageError):
    id = "samples-mismatch"
    hint = "use another --out folder, or repeat the command that began this one"


class ArmUnknownError(UsageError):
    id = "arm-unknown"
    hint = "arms are control, candidate, vanilla, without:<feature>, or a name given with --server-command"


class ArmServerFailedError(ServerError):
    """The server process of an arm did not become ready, or left in mid-run."""

    id = "arm-server-failed"
    hint = "the log named above has the server's own words; the run resumes with the same command"


class ArmCheckFailedError(ServerError):
    """An arm's process does not have the environment its arm demands: its numbers would be of another arm."""

    id = "arm-check-failed"
    hint = "the run was stopped, so that no number of a wrong arm is recorded"


class GpuBusyError(LockedError):
    id = "gpu-busy"
    hint = "stop the service, or pass --stop-service to stop it for the run"


class VramHoldFailedError(HostError):
    id = "vram-hold-failed"
    hint = "the limit must be above what is in use and below the size of each device"
