"""Errors of model files, profiles, the host, and a service."""

from __future__ import annotations

from flashnext.errors.base import HostError, LockedError, ModelError, ProfileError, ServerError, UsageError

# --- model files --------------------------------------------------------------------------------------


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


# --- profiles -----------------------------------------------------------------------------------------


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


# --- host and serving ---------------------------------------------------------------------------------


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
