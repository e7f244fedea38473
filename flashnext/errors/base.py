"""The base of all errors, and one class per stage: it fixes the exit code."""

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
