"""Errors of the bench."""

from __future__ import annotations

from flashnext.errors.base import HostError, LockedError, ServerError, UsageError


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
    hint = (
        "arms are candidate, control, transaction, bypass, vanilla, resident, ubatch:TOKENS, "
        "without:FEATURE, or a name given with --server-command"
    )


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
