"""Facts about the host: cores, memory, disk. No judgement."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP_SELF = Path("/proc/self/cgroup")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
# A cgroup v1 without a limit reports a number near 2^63.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class HostFacts:
    """What a build may use. ``available_bytes`` is MemAvailable, lowered to what the cgroup still allows."""

    cores: int
    total_bytes: int
    available_bytes: int
    cgroup_limit_bytes: int | None


def probe_host() -> HostFacts:
    """Cores this process may run on, and memory as the kernel reports it now."""
    memory = _meminfo()
    available = memory.get("MemAvailable", memory.get("MemFree", 0))
    limit, used = _cgroup_memory()
    if limit is not None:
        available = min(available, max(0, limit - used))
    return HostFacts(cores(), memory.get("MemTotal", 0), available, limit)


def cores() -> int:
    """Cores of this process's affinity mask, lowered to a container's CPU quota (cgroup v2)."""
    count = len(os.sched_getaffinity(0))
    for folder, limit_name, _ in _cgroup_folders():
        if limit_name != "memory.max":
            continue
        try:
            quota, period = (folder / "cpu.max").read_text().split()
            count = min(count, math.ceil(int(quota) / int(period)))
        except (OSError, ValueError):
            continue  # "max 100000": no quota
    return max(1, count)


def temp_dir() -> Path:
    """Where compilers put their temporary files: TMPDIR, else the system's."""
    return Path(os.environ.get("TMPDIR") or tempfile.gettempdir())


def disk_free_bytes(path: Path) -> int:
    """Free bytes for this user on the filesystem of a path that need not exist yet."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def _meminfo() -> dict[str, int]:
    values: dict[str, int] = {}
    for line in _MEMINFO.read_text().splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            values[name] = int(words[0]) * (1024 if words[-1] == "kB" else 1)
    return values


def _cgroup_memory() -> tuple[int | None, int]:
    """(limit, used) of the tightest memory cgroup around this process; (None, 0) without one."""
    best: tuple[int | None, int] = (None, 0)
    for folder, limit_name, used_name in _cgroup_folders():
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is None or limit >= _NO_LIMIT:
            continue
        # The page cache counts as used but is given back under pressure.
        used = max(0, (used or 0) - _stat(folder / "memory.stat", "inactive_file"))
        if best[0] is None or limit - used < best[0] - best[1]:
            best = (limit, used)
    return best


def _cgroup_folders() -> list[tuple[Path, str, str]]:
    folders: list[tuple[Path, str, str]] = []
    try:
        lines = _CGROUP_SELF.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            root, names = _CGROUP_ROOT, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = _CGROUP_ROOT / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        own = root / name.lstrip("/")
        chain = [own, *[p for p in own.parents if p == root or root in p.parents]]
        folders.extend((folder, *names) for folder in chain)
    return folders


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _stat(path: Path, name: str) -> int:
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory since it booted; 0 if it does not say."""
    return _stat(Path("/proc/vmstat"), "oom_kill")
