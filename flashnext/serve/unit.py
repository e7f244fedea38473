"""The systemd unit of a profile: a pure function, snapshot-tested and verified by systemd-analyze."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flashnext.errors import HostError, LockedError, ProfileError, UsageError
from flashnext.profile.schema import Profile

# A restart cannot mend these: wrong usage, profile, host or build, and a port that somebody else holds.
_NEVER_AGAIN = sorted(
    {UsageError.exit_code, ProfileError.exit_code, HostError.exit_code, LockedError.exit_code}
)


def name(profile: Profile) -> str:
    return f"flashnext-{profile.name}.service"


def render(profile: Profile, command: Sequence[str], *, writable: Sequence[Path], account: str | None) -> str:
    """The unit's text. ``account``: the user of a system-wide unit; None for the user's own manager.

    ``writable`` are the folders that stay writable under ProtectSystem=strict.
    """
    life = profile.life
    lines = [
        "[Unit]",
        f"Description=flashnext: {profile.summary}".replace("%", "%%"),
        "After=network.target nvidia-persistenced.service",
        # the supervisor restarts the server by itself; this counts only its own failures
        "StartLimitIntervalSec=3600",
        "StartLimitBurst=5",
        "",
        "[Service]",
        "Type=notify",
        "NotifyAccess=main",
        f"ExecStart={' '.join(_word(w) for w in command)}",
        *([f"User={account}"] if account else []),
        "Restart=on-failure",
        "RestartSec=5",
        f"RestartPreventExitStatus={' '.join(map(str, _NEVER_AGAIN))}",
        "SuccessExitStatus=130 143",
        # extended by the supervisor while a load shows progress
        f"TimeoutStartSec={life.load_limit_s + 3 * life.check_limit_s}",
        f"TimeoutStopSec={life.stop_limit_s + 15}",
        "WatchdogSec=60",
        "KillMode=mixed",
        "OOMPolicy=stop",
        "LimitMEMLOCK=infinity",
        "LimitCORE=0",
        "LimitNOFILE=65536",
        "NoNewPrivileges=yes",
        *(_sandbox(writable) if account else []),
        "",
        "[Install]",
        f"WantedBy={'multi-user.target' if account else 'default.target'}",
        "",
    ]
    return "\n".join(lines)


def _sandbox(writable: Sequence[Path]) -> list[str]:
    """What can be closed without taking the GPUs away: no PrivateDevices, and CUDA's JIT writes code.

    A writable folder that is not there (`-`) must not keep the unit from starting: serve says what it lacks.
    """
    return [
        "ProtectSystem=strict",
        "ProtectHome=read-only",
        f"ReadWritePaths={' '.join(_word(f'-{p}') for p in writable)}",
        "PrivateTmp=yes",
        "ProtectKernelTunables=yes",
        "ProtectKernelModules=yes",
        "ProtectControlGroups=yes",
        "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
        "RestrictSUIDSGID=yes",
        "RestrictRealtime=yes",
        "LockPersonality=yes",
    ]


def _word(text: str) -> str:
    """One word of a command line, in systemd's quoting."""
    text = text.replace("%", "%%").replace("$", "$$")
    if text and not set(text) & set(" \t\"'\\;"):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
