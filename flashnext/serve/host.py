"""Checks of the machine before anything is launched: devices, ports, leftovers, stray configuration."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

from flashnext import services
from flashnext.errors import (
    FlashnextError,
    HostNotQualifiedError,
    LeftoverError,
    PortInUseError,
    StrayConfigError,
)
from flashnext.probe import gpu_use
from flashnext.probe.gpu import probe_gpus
from flashnext.proc import wait_until
from flashnext.profile.load import Loaded

SYSTEM_CONFIG = Path("/etc/llama.cpp/config.ini")
NODES = Path("/sys/devices/system/node")
_MIB = 1024 * 1024


def devices(loaded: Loaded, *, wait_s: float = 0.0) -> Iterator[FlashnextError]:
    """Does the machine have exactly the profile's CUDA devices, free enough? Never falls back to the CPU.

    Waits up to ``wait_s`` for a driver that is installed and does not answer yet.
    """
    want = loaded.profile.devices
    if want.kind == "virtual":
        return
    facts = probe_gpus()
    if facts.smi is not None and not facts.devices and wait_s:
        # at boot the driver may come up after us
        wait_until(lambda: bool(probe_gpus().devices), timeout_s=wait_s, every_s=1.0)
        facts = probe_gpus()
    place = loaded.place(("devices", "kind"))
    if not facts.devices:
        yield HostNotQualifiedError(
            "no CUDA device", context=[f"{place} asks for {want.count}", str(facts.failure)]
        )
        return
    reasons = []
    if len(facts.devices) != want.count:
        names = ", ".join(d.name for d in facts.devices)
        line = loaded.place(("devices", "count"))
        reasons.append(f"{line}: {want.count} devices required, {len(facts.devices)} visible ({names})")
    used, who = gpu_use.used_bytes(), gpu_use.holders()
    for device in facts.devices:
        label = f"device {device.index} ({device.name})"
        if want.name is not None and want.name.lower() not in device.name.lower():
            reasons.append(f"{loaded.place(('devices', 'name'))}: {label} is no {want.name}")
        total = device.memory_bytes // _MIB
        if want.usable_mib is not None and total < want.usable_mib:
            line = loaded.place(("devices", "usable_mib"))
            reasons.append(f"{line}: {label} has {total} MiB, required are {want.usable_mib}")
        held = used.get(device.index, 0) // _MIB
        if want.used_mib_max is not None and held > want.used_mib_max:
            line = loaded.place(("devices", "used_mib_max"))
            names = ", ".join(f"pid {h.pid} ({h.name})" for h in who if h.uuid == device.uuid)
            by = f" by {names}" if names else ""
            reasons.append(
                f"{line}: {held} MiB of {label} are in use already{by}, allowed are {want.used_mib_max}"
            )
    if reasons:
        yield HostNotQualifiedError("the CUDA devices are not the profile's", context=reasons)


def device_memory() -> tuple[dict[str, int | str], ...]:
    """Every CUDA device that this process may use, as the driver counts it now, whoever uses it."""
    used = gpu_use.used_bytes()
    return tuple(
        {
            "name": f"{device.name} ({device.index})",
            "memory_bytes": device.memory_bytes,
            "allocated_bytes": used[device.index],
        }
        for device in probe_gpus().devices
        if device.index in used
    )


def interleave(loaded: Loaded) -> tuple[bool, str | None]:
    """(use numactl, warning): interleaving pays with two or more nodes, and needs numactl."""
    nodes = len(list(NODES.glob("node[0-9]*"))) if NODES.is_dir() else 1
    if loaded.profile.numa.interleave == "never" or nodes < 2:
        return False, None
    if shutil.which("numactl") is None:
        return False, f"{nodes} NUMA nodes and no numactl: install it, or weights land on one node's memory"
    return True, None


def threads(loaded: Loaded) -> tuple[int, int]:
    """(threads of llama-server, threads of each virtual GPU) within the cores this process may use.

    Server and virtual GPUs take turns, but a waiting one spins: their product must stay within the cores.
    """
    cores = len(psutil.Process().cpu_affinity() or [0])
    if loaded.profile.devices.kind == "virtual":
        each = max(1, cores // (loaded.profile.devices.count + 1))
        return loaded.profile.server.threads or each, each
    physical = min(psutil.cpu_count(logical=False) or cores, cores)
    return loaded.profile.server.threads or physical, 0


def stray_config() -> Iterator[FlashnextError]:
    """llama-server merges this file into its command line, whatever that says."""
    if SYSTEM_CONFIG.exists():
        yield StrayConfigError(f"{SYSTEM_CONFIG} exists")


def leftovers(port: int) -> Iterator[FlashnextError]:
    """Children of a killed supervisor on this port that are still alive after a moment's grace."""
    past = services.read(port)
    if past is None or past.supervisor.alive:
        return
    if not wait_until(lambda: not any(c.alive for c in past.children), timeout_s=2.0):
        alive = [f"pid {c.pid}: {c.name}" for c in past.children if c.alive]
        yield LeftoverError(f"an earlier service on port {port} left processes behind", context=alive)


def port_taken(host: str, port: int) -> Iterator[FlashnextError]:
    """Is somebody listening there already? Names the holder where the kernel tells us."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            reason = [error.strerror or str(error), *holders(port)]
            yield PortInUseError(f"{host}:{port} cannot be bound", context=reason)


def holders(port: int) -> list[str]:
    """Who listens on a TCP port, one line each; empty where the kernel does not tell us."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        return ["held by a process of another user"]
    pids = {c.pid for c in connections if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port}
    lines = []
    for pid in sorted(p for p in pids if p is not None):
        try:
            words = psutil.Process(pid).cmdline()
            lines.append(f"held by pid {pid}: {' '.join(words)[:120]}")
        except psutil.Error:
            lines.append(f"held by pid {pid}")
    return lines or (["held by a process of another user"] if pids else [])


def free_port(host: str) -> int:
    """A port that nobody listens on right now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
