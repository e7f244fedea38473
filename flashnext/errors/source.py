"""Errors of the source: features by name, fetching, extraction, patches."""

from __future__ import annotations

from flashnext.errors.base import BuildError, FetchError, LockedError, PatchError, UsageError

# --- usage and console --------------------------------------------------------------------------------


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


# --- fetch and extraction -----------------------------------------------------------------------------


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


# --- patches ------------------------------------------------------------------------------------------


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
