"""Facts that limit how much memory a process may take or pin: limits, NUMA nodes, WSL. No judgement."""

from __future__ import annotations

import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

from flashnext.probe.host import probe_host

KERNEL = Path("/proc/sys/kernel/osrelease")
NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True)
class Limits:
    """Bytes; ``memlock_bytes`` is None without a limit. ``available_bytes`` respects the memory cgroup."""

    total_bytes: int
    available_bytes: int
    cgroup_bytes: int | None
    memlock_bytes: int | None
    numa_nodes: int
    numactl: bool
    wsl: bool


def probe_limits() -> Limits:
    host = probe_host()
    return Limits(
        total_bytes=host.total_bytes,
        available_bytes=host.available_bytes,
        cgroup_bytes=host.cgroup_limit_bytes,
        memlock_bytes=memlock(),
        numa_nodes=numa_nodes(),
        numactl=shutil.which("numactl") is not None,
        wsl=is_wsl(),
    )


def memlock(pid: int = 0) -> int | None:
    """The soft RLIMIT_MEMLOCK of a process (0: this one), which its children inherit; None without a limit.

    Raises OSError for a process that is gone or not ours.
    """
    soft, _ = resource.prlimit(pid, resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def numa_nodes() -> int:
    """Memory nodes that the kernel shows; 1 where it shows none."""
    return max(1, len(list(NODES.glob("node[0-9]*")))) if NODES.is_dir() else 1


def is_wsl() -> bool:
    """A kernel of the Windows Subsystem for Linux, which pins about half of its memory at most."""
    try:
        return "microsoft" in KERNEL.read_text().lower()
    except OSError:
        return False
