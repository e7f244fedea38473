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
    hint = "build again with `flashnext build`: the installed server is not the one this package was written for"


# --- host and serving ------------------------------------------------------------------------------------


class HostNotQualifiedError(HostError):
    """Devices, driver, build or limits of this machine do not meet the profile: all reasons at once."""

    id = "host-not-qualified"
    hint = "mend what is named above, or serve another profile (`flashnext profile list`)"


class NoBuildError(HostError):
    id = "no-build"
    hint = "run `flashnext build`"


class BuildUnfitError(HostError):
    """An installed build that is not ours, is of another series, or lacks a feature the profile uses."""

    id = "build-unfit"
    hint = "run `flashnext build` (without `--without` and `--vanilla`), then serve again"


class StrayConfigError(HostError):
    id = "stray-config"
    hint = "move the file away: llama-server reads it whatever the command line says"


class LeftoverError(HostError):
    id = "leftover-processes"
    hint = "end them with `kill -9 PID`; a process that does not go is stuck in its driver and needs a restart"


class PortInUseError(LockedError):
    id = "port-in-use"
    hint = "stop that process, or choose another port with `--port N` (0 finds a free one)"


class AlreadyServingError(LockedError):
    id = "already-serving"
    hint = "see `flashnext status`; end it with `flashnext stop`, or choose another port with `--port N`"


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
    hint = "switch the machine off at the power supply for ten seconds: a card that fell off the bus stays away"


class InsaneTextError(ServerError):
    """The server answers, but with degenerate text."""

    id = "insane-text"
    hint = "keep the log, and compare with `flashnext serve --profile demo`; see the README, when it refuses"
