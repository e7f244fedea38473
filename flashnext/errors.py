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


# --- model files -----------------------------------------------------------------------------------------


# --- profiles --------------------------------------------------------------------------------------------


# --- host and serving ------------------------------------------------------------------------------------


# --- bench -----------------------------------------------------------------------------------------------


class BenchExtraMissingError(UsageError):
    """A part of the bench was called whose packages are in the extra ``bench``."""

    id = "bench-extra-missing"
    hint = "install the extra: pip install 'flashnext[bench]'"


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
