"""A scratch git repository: its data outside the work tree, and nobody's configuration in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashnext import proc
from flashnext.errors import GitNotFoundError, PatchNotVerifiedError

IDENTITY = ("flashnext", "flashnext@localhost")
_SETTINGS = (
    "core.autocrlf=false",
    "core.fsmonitor=false",
    "core.hooksPath=/dev/null",
    "core.excludesFile=/dev/null",
    "core.attributesFile=/dev/null",
    "core.quotePath=false",
    "gc.auto=0",
    "commit.gpgSign=false",
    "rerere.enabled=false",
    "apply.whitespace=nowarn",
    "merge.renames=true",
    "merge.conflictStyle=merge",
)


@dataclass(frozen=True)
class Scratch:
    """Git commands on ``work`` with the repository in ``git_dir``.

    Without this, ``git apply`` inside somebody else's repository skips every file and exits 0.
    """

    git_dir: Path
    work: Path

    @classmethod
    def create(cls, git_dir: Path, work: Path) -> Scratch:
        """Make the repository. Raises GitNotFoundError."""
        repository = cls(git_dir, work)
        git_dir.mkdir(parents=True, exist_ok=True)
        work.mkdir(parents=True, exist_ok=True)
        repository.must(["init", "--quiet", "--template=", "--initial-branch=series"])
        # The tree's own .gitattributes must not translate line ends; this file overrules it.
        (git_dir / "info").mkdir(exist_ok=True)
        (git_dir / "info" / "attributes").write_text("* -text -ident -filter -working-tree-encoding\n")
        return repository

    def environment(self) -> dict[str, str]:
        name, mail = IDENTITY
        return proc.environment(
            {
                "GIT_DIR": str(self.git_dir),
                "GIT_WORK_TREE": str(self.work),
                "GIT_CEILING_DIRECTORIES": str(self.work.parent),
                "GIT_CONFIG_NOSYSTEM": "1",
                "GIT_CONFIG_SYSTEM": "/dev/null",
                "GIT_CONFIG_GLOBAL": "/dev/null",
                "GIT_TERMINAL_PROMPT": "0",
                "GIT_EDITOR": "true",
                "GIT_AUTHOR_NAME": name,
                "GIT_AUTHOR_EMAIL": mail,
                "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
                "GIT_COMMITTER_NAME": name,
                "GIT_COMMITTER_EMAIL": mail,
                "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
                "LC_ALL": "C",
            }
        )

    def git(self, arguments: Sequence[str | Path], *, stdin: str | None = None) -> proc.Done:
        """One git command; the caller judges its result."""
        settings = [part for setting in _SETTINGS for part in ("-c", setting)]
        done = proc.run(
            ["git", *settings, *arguments], env=self.environment(), cwd=self.work, timeout_s=300, stdin=stdin
        )
        if done.code == 127:
            raise GitNotFoundError("git was not found on PATH", context=[done.err.strip()])
        return done

    def must(self, arguments: Sequence[str | Path], *, stdin: str | None = None) -> str:
        """A git command that cannot fail in a sound repository; returns its output."""
        done = self.git(arguments, stdin=stdin)
        if not done.ok:
            raise PatchNotVerifiedError(
                f"git {arguments[0]} failed in a scratch repository",
                context=[f"exit {done.code}", *done.err.strip().splitlines()[:8]],
            )
        return done.out

    def commit_all(self, message: str) -> str:
        """Commit the work tree as it is, ignored files included; returns the commit's id."""
        self.must(["add", "--all", "--force"])
        self.must(["commit", "--quiet", "--allow-empty", "--no-verify", "-m", message])
        return self.must(["rev-parse", "HEAD"]).strip()
