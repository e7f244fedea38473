"""`flashnext service`: the systemd unit of a profile."""

from __future__ import annotations

import os
import pwd
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from flashnext.console import print_data, print_json, say
from flashnext.errors import ServiceFolderError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Run a profile as a systemd service.",
)
Name = Annotated[str, typer.Option("--profile", metavar="NAME", help="A shipped profile, or a .yaml file.")]
Json = Annotated[bool, typer.Option("--json", help="As JSON.")]
User = Annotated[bool, typer.Option("--user", help="For this user's own service manager, without root.")]
_SYSTEM = Path("/etc/systemd/system")


@app.command()
def show(profile: Name, user: User = False, as_json: Json = False) -> None:
    """Print the unit."""
    file, text = _unit(profile, user=user)
    if as_json:
        print_json({"file": str(file), "unit": text})
    else:
        print_data(text.rstrip())


@app.command()
def install(profile: Name, user: User = False, as_json: Json = False) -> None:
    """Write the unit, and say what to do next. Starts nothing."""
    file, text = _unit(profile, user=user)
    account = None if user else _account()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ServiceFolderError(f"cannot write {file}: {error.strerror}") from None
    manager = "systemctl --user" if user else "systemctl"
    missing = [] if account is None else [str(p) for p in _writable(account) if not p.is_dir()]
    # the unit's sandbox opens only folders that are there when it starts
    first = [f"sudo -u {account} mkdir -p {shlex.join(missing)}"] if missing else []
    then = f"{manager} daemon-reload && {manager} enable --now {file.name}"
    if as_json:
        print_json({"file": str(file), "next": [*first, then]})
        return
    print_data(str(file))
    for command in first:
        say(f"first: {command}")
    say(f"next: {then}")


@app.command()
def uninstall(profile: Name, user: User = False, as_json: Json = False) -> None:
    """Remove the unit's file and its start at boot. A running service goes on until it is stopped."""
    file, _ = _unit(profile, user=user)
    manager = "systemctl --user" if user else "systemctl"
    # the link as well: `systemctl disable` does nothing any more once the file has gone
    boot = file.parent / f"{'default' if user else 'multi-user'}.target.wants" / file.name
    found = [path for path in (boot, file) if path.is_symlink() or path.exists()]
    if not found and not as_json:
        say(f"there is no {file}")
        return
    for path in found:
        try:
            path.unlink()
        except OSError as error:
            raise ServiceFolderError(f"cannot remove {path}: {error.strerror}") from None
    then = f"{manager} stop {file.name}; {manager} daemon-reload"
    if as_json:
        print_json({"removed": [str(path) for path in found], "next": [then] if found else []})
        return
    for path in found:
        print_data(f"removed {path}")
    say(f"next: {then}")


def _account() -> str:
    """Whom a system-wide unit runs as: under sudo, the person who called it."""
    return os.environ.get("SUDO_USER") or pwd.getpwuid(os.getuid()).pw_name


def _writable(account: str) -> list[Path]:
    """What the service writes to: the account's own folders, which under sudo are not those of root."""
    from flashnext import paths

    if account == os.environ.get("SUDO_USER"):
        return paths.account_dirs(Path(pwd.getpwnam(account).pw_dir))
    return [paths.share_dir(), paths.cache_dir(), paths.state_dir()]


def _unit(profile: str, *, user: bool) -> tuple[Path, str]:
    from flashnext.profile.load import load
    from flashnext.serve import unit

    loaded = load(profile)
    command = [str(Path(sys.argv[0]).absolute()), "serve", "--profile"]
    command.append(loaded.profile.name if profile == loaded.profile.name else str(loaded.file.absolute()))
    account = None if user else _account()
    writable = _writable(account) if account else []
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    folder = config / "systemd/user" if user else _SYSTEM
    text = unit.render(loaded.profile, command, writable=writable, account=account)
    return folder / unit.name(loaded.profile), text
