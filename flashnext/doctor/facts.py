"""Everything a diagnosis looks at, gathered once."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashnext import services
from flashnext.builds import Build, list_builds
from flashnext.errors import FlashnextError
from flashnext.model.inspect import Inspection, inspect_model
from flashnext.probe import gpu_use, machine
from flashnext.probe.gpu import GpuFacts, driver_cuda_level, probe_gpus
from flashnext.probe.limits import Limits, memlock, probe_limits
from flashnext.probe.toolchain import Nvcc, probe_nvcc
from flashnext.profile import fit
from flashnext.profile.load import Loaded


@dataclass(frozen=True)
class Facts:
    """Facts of one moment. ``fit`` is the plan's verdict, or the reason why there is none.

    ``service_memlock``: limit in bytes of each running flashnext service, by port (None: no limit);
    ``own``: pids of their children.
    """

    loaded: Loaded
    model: Path | None
    gpus: GpuFacts
    driver_cuda: tuple[int, int] | None
    nvcc: tuple[Nvcc, ...]
    links: tuple[gpu_use.Link, ...]
    used: dict[int, int]
    holders: tuple[gpu_use.Holder, ...]
    limits: Limits
    service_memlock: dict[int, int | None]
    own: frozenset[int]
    huge_pages: str | None
    modules: machine.MemoryModules | None
    memory_errors: tuple[int, int] | None
    module_sensor: machine.ModuleSensor | None
    throttled: int | None
    disk_bytes_per_s: float | None
    port: str | None
    stray_files: tuple[Path, ...]
    stray_variables: tuple[str, ...]
    builds: tuple[Build, ...]
    inspection: Inspection | None
    fit: fit.Verdict | FlashnextError | None


def gather(loaded: Loaded, model: Path | None, head: Path | None) -> Facts:
    """Ask the machine. Reads at most 64 MiB of the model, starts nothing but the driver's own tools."""
    gpus = probe_gpus()
    there = model if model is not None and model.is_file() else None
    running = [service for service in services.every() if service.supervisor.alive]
    return Facts(
        loaded=loaded,
        model=there,
        gpus=gpus,
        driver_cuda=driver_cuda_level(gpus.smi) if gpus.smi is not None and gpus.devices else None,
        nvcc=tuple(probe_nvcc()),
        links=tuple(gpu_use.links()),
        used=gpu_use.used_bytes(),
        holders=tuple(gpu_use.holders()),
        limits=probe_limits(),
        service_memlock=_limits(running),
        own=frozenset(p.pid for service in running for p in service.children),
        huge_pages=machine.huge_pages(),
        modules=machine.memory_modules(),
        memory_errors=machine.memory_errors(),
        module_sensor=machine.module_sensor(),
        throttled=machine.throttle_events(),
        disk_bytes_per_s=machine.read_speed(_largest(there)) if there is not None else None,
        port=machine.port_holder(loaded.profile.server.host, loaded.profile.server.port),
        stray_files=tuple(machine.stray_files()),
        stray_variables=tuple(machine.stray_variables()),
        builds=tuple(list_builds()),
        inspection=inspect_model(there, head) if there is not None else None,
        fit=_verdict(loaded, there, head, _on_port(running, loaded.profile.server.port)),
    )


def _limits(running: Sequence[services.Service]) -> dict[int, int | None]:
    found: dict[int, int | None] = {}
    for service in running:
        with contextlib.suppress(OSError):  # a service of another user
            found[service.port] = memlock(service.supervisor.pid)
    return found


def _largest(model: Path) -> Path:
    """The first shard of a set holds metadata alone: measure where the weights are."""
    stem = model.name.split("-00001-of-")[0]
    return max(model.parent.glob(f"{stem}*.gguf"), key=lambda p: p.stat().st_size, default=model)


def _on_port(running: Sequence[services.Service], port: int) -> set[int]:
    """Processes of the service that this profile would follow: two cannot have one port."""
    return {child.pid for service in running if service.port == port for child in service.children}


def _verdict(
    loaded: Loaded, model: Path | None, head: Path | None, ending: set[int]
) -> fit.Verdict | FlashnextError | None:
    if model is None:
        return None
    try:
        return fit.judge(loaded, model, head, ending=ending)
    except FlashnextError as error:
        return error
