"""Facts about the machine that a doctor asks for: memory modules, counters, disks, ports, stray settings."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from flashnext.proc import environment, run

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
EDAC = Path("/sys/devices/system/edac/mc")
CPUS = Path("/sys/devices/system/cpu")
SENSORS = Path("/sys/class/hwmon")
SYSTEM_CONFIG = Path("/etc/llama.cpp/config.ini")
_SAMPLE_BYTES = 64 << 20
_BLOCK = 4 << 20
# Read by llama.cpp, ggml or the CUDA runtime: none of them reaches the server, all of them confuse people.
_STRAY = re.compile(r"^(LLAMA_|GGML_|CUDA_LAUNCH_BLOCKING$)")


@dataclass(frozen=True)
class MemoryModules:
    """Installed modules as the firmware tells: how many, on how many channels, at which speed (MT/s)."""

    count: int
    channels: int
    speeds: tuple[int, ...]


def memory_modules() -> MemoryModules | None:
    """None where dmidecode is missing or not allowed (it wants root)."""
    tool = shutil.which("dmidecode") or shutil.which("/usr/sbin/dmidecode")
    if tool is None or os.geteuid():
        return None
    done = run([tool, "-t", "memory"], env=environment(), timeout_s=10.0)
    return parse_modules(done.out) if done.ok else None


def parse_modules(text: str) -> MemoryModules | None:
    """dmidecode's memory devices; None without one that is populated."""
    channels: set[str] = set()
    speeds: list[int] = []
    count = 0
    for block in text.split("\n\n"):
        if "Memory Device" not in block or not re.search(r"^\s*Size: \d+ [MG]", block, re.MULTILINE):
            continue
        count += 1
        where = re.search(r"^\s*(?:Bank )?Locator: (.*)$", block, re.MULTILINE)
        letter = re.search(r"channel\s*([A-Z0-9])|DIMM_?([A-Z])\d", block, re.IGNORECASE)
        channels.add((letter[1] or letter[2]).upper() if letter else where[1] if where else str(count))
        speed = re.search(r"^\s*Configured Memory Speed: (\d+)", block, re.MULTILINE)
        if speed is not None:
            speeds.append(int(speed[1]))
    return MemoryModules(count, len(channels), tuple(speeds)) if count else None


def huge_pages() -> str | None:
    """The chosen mode of transparent huge pages: always, madvise or never."""
    with contextlib.suppress(OSError):
        match = re.search(r"\[(\w+)\]", HUGE_PAGES.read_text())
        return match[1] if match else None
    return None


def memory_errors() -> tuple[int, int] | None:
    """(corrected, uncorrected) errors of the memory controllers since boot; None where none reports."""
    if not EDAC.is_dir():
        return None
    counts = [(_number(mc / "ce_count"), _number(mc / "ue_count")) for mc in sorted(EDAC.glob("mc[0-9]*"))]
    known = [(c, u) for c, u in counts if c is not None and u is not None]
    return (sum(c for c, _ in known), sum(u for _, u in known)) if known else None


def throttle_events() -> int | None:
    """How often a processor package throttled for heat since boot; None where the kernel does not count."""
    counts = [_number(p) for p in CPUS.glob("cpu[0-9]*/thermal_throttle/package_throttle_count")]
    known = [n for n in counts if n is not None]
    return max(known) if known else None


@dataclass(frozen=True)
class ModuleSensor:
    """The hottest memory module that has a sensor: degrees Celsius, and the limit from which it is refreshed
    twice as often or throttled (None where it tells none). ``alarm``: it says itself that it is too hot."""

    degrees: float
    limit: float | None
    alarm: bool


def module_sensor() -> ModuleSensor | None:
    """None where no module has a sensor that the kernel reads (jc42 for DDR3 and DDR4, spd5118 for DDR5)."""
    found = []
    for sensor in SENSORS.glob("hwmon[0-9]*"):
        with contextlib.suppress(OSError):
            if (sensor / "name").read_text().strip() not in ("jc42", "spd5118"):
                continue
            now, limit = _number(sensor / "temp1_input"), _number(sensor / "temp1_max")
            alarm = any(_number(sensor / f"temp1_{kind}_alarm") for kind in ("max", "crit"))
            if now is not None:
                found.append(ModuleSensor(now / 1000, limit / 1000 if limit else None, alarm))
    return max(found, key=lambda one: (one.alarm, one.degrees)) if found else None


def read_speed(path: Path) -> float | None:
    """Bytes per second of reading up to 64 MiB from the middle of a file, past the page cache, or None."""
    try:
        size = path.stat().st_size
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError:
        return None
    try:
        return _read_speed(handle, size)
    except OSError:
        return None
    finally:
        os.close(handle)


def _read_speed(handle: int, size: int) -> float | None:
    import mmap

    start = size // 2 // _BLOCK * _BLOCK
    with mmap.mmap(-1, _BLOCK) as block:  # page-aligned, as direct reads want it
        begin, done = time.perf_counter(), 0
        while done < _SAMPLE_BYTES:
            count = os.preadv(handle, [block], start + done)
            done += count
            if count < _BLOCK:
                break
        took = time.perf_counter() - begin
    return done / took if done >= _BLOCK and took > 0 else None


def port_holder(host: str, port: int) -> str | None:
    """None where a port can be bound; else the reason, with the holder where the kernel tells."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return ", ".join([error.strerror or str(error), *_listeners(port)])
    return None


def _listeners(port: int) -> list[str]:
    with contextlib.suppress(psutil.Error):
        held = {
            c.pid
            for c in psutil.net_connections("tcp")
            if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port
        }
        return [f"held by pid {pid}" if pid else "held by a process of another user" for pid in held]
    return []


def stray_files(env: Mapping[str, str] = os.environ) -> list[Path]:
    """Configuration files of llama.cpp itself: the system's is read whatever we do, the user's kept out."""
    home = Path(env.get("XDG_CONFIG_HOME") or Path(env.get("HOME", "/nonexistent")) / ".config")
    return [p for p in (SYSTEM_CONFIG, home / "llama.cpp" / "config.ini") if p.is_file()]


def stray_variables(env: Mapping[str, str] = os.environ) -> list[str]:
    """Names only: a value may be a secret."""
    return sorted(name for name in env if _STRAY.match(name))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
