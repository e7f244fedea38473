"""Does a profile fit this machine? The memory plan of its model against what devices and host have left."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from flashnext import paths
from flashnext.errors import MemoryUnfitError, ModelProblemsError
from flashnext.model import memory
from flashnext.model.header import TensorEntry
from flashnext.model.hyper import Hyper, read_hyper
from flashnext.model.memory import MIB, MemoryPlan, Rule, Settings
from flashnext.model.memory_tiled import TILE
from flashnext.model.shards import open_set
from flashnext.probe.gpu import probe_gpus
from flashnext.probe.gpu_use import holders, used_bytes
from flashnext.probe.limits import Limits, probe_limits
from flashnext.profile.load import Loaded
from flashnext.profile.schema import Profile

_GIB = 1024 * MIB
# A CUDA context with its modules and cuBLAS' workspace; the driver takes it outside of all buffers.
CUDA_OVERHEAD = 500 * MIB
# Left free on a card: what the driver and a desktop take while we run. Under it a card is called full.
CARD_RESERVE = 256 * MIB
# What a CUDA process takes in host memory beside its buffers, as people who ran this model report.
CUDA_HOST_OVERHEAD = 8 * _GIB
HOST_OVERHEAD = 256 * MIB
HOST_RESERVE = 2 * _GIB
SMALL_RESERVE = 256 * MIB
_WSL_SHARE = 2
TILED = "tiled-qsa"
_LEAST_CHUNK = 512


@dataclass(frozen=True)
class Room:
    """One device: bytes in total and in use by others, and who they are."""

    name: str
    total: int
    used: int
    by: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sources:
    """What the arithmetic needs of the files."""

    hyper: Hyper
    tensors: tuple[TensorEntry, ...]
    head: memory.Head | None


@dataclass(frozen=True)
class Verdict:
    """A plan, what it was held against, what is wrong with it, and the change that helps most."""

    plan: MemoryPlan
    rooms: tuple[Room, ...]
    limits: Limits
    refusals: tuple[str, ...]
    warnings: tuple[str, ...]
    change: str | None


def check_fits(
    loaded: Loaded, model: Path, head: Path | None = None, *, features: Collection[str] | None = None
) -> tuple[str, ...]:
    """Warnings for a profile that fits. Raises MemoryUnfitError with the numbers for one that does not.

    Reads headers and asks the driver: under two seconds for the real model. A model whose header cannot be
    read raises ModelProblemsError or ModelHeaderError.
    """
    found = judge(loaded, model, head, features=features)
    if found.refusals:
        hint = found.change or MemoryUnfitError.hint
        raise MemoryUnfitError(
            f"{loaded.profile.name} does not fit this machine", context=list(found.refusals), hint=hint
        )
    return found.warnings


def judge(
    loaded: Loaded,
    model: Path,
    head: Path | None = None,
    *,
    features: Collection[str] | None = None,
    ending: Collection[int] = (),
) -> Verdict:
    """Draw the plan and hold it against this machine.

    ``features``: the build's; None: this package's own. ``ending``: pids of processes that will have ended
    when the profile is served, a running service's: what they hold counts as free.
    """
    sources = read(model, head)
    limits = _without(probe_limits(), ending)
    chosen = settings(loaded.profile, shipped_features() if features is None else features)
    plan = memory.draw(sources.hyper, sources.tensors, chosen, sources.head)
    rooms = tuple(_rooms(loaded.profile, ending))
    refusals = [*_devices(plan, rooms, chosen), *_host(plan, limits, chosen)]
    least = loaded.profile.context.batch
    change = _change(sources, chosen, rooms, limits, least) if refusals else None
    return Verdict(
        plan, rooms, limits, tuple(refusals), tuple(_warnings(plan, rooms, limits, chosen)), change
    )


def read(model: Path, head: Path | None) -> Sources:
    """Headers of all shards, and of the draft head."""
    hyper, tensors = _header(model)
    own = None
    if head is not None:
        head_hyper, head_tensors = _header(head)
        own = memory.Head(head_tensors, head_hyper)
    return Sources(hyper, tensors, own)


def _header(path: Path) -> tuple[Hyper, tuple[TensorEntry, ...]]:
    found = open_set(path)
    hyper, problems = read_hyper(found.main) if found.main is not None else (None, [])
    problems = [*found.problems, *problems]
    if hyper is None or problems:
        lines = [f"[{p.id}] {p.message} ({p.hint})" for p in problems]
        raise ModelProblemsError(f"{path.name} cannot be planned for", context=lines)
    return hyper, tuple(entry for entry, _ in found.tensors())


def shipped_features() -> list[str]:
    """The ids of the package's own series."""
    lines = (paths.patches_dir() / "series").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def settings(profile: Profile, features: Collection[str]) -> Settings:
    """A profile in the words of the arithmetic, served by a build with these features."""
    # the feature keeps the stock graph for more than one stream; without flash attention nothing was compared
    tiles = TILED in features and profile.context.sequences == 1 and profile.attention.flash
    p, cuda = profile, profile.devices.kind == "cuda"
    phase = p.phase_prefill
    head_device = p.mtp.device if p.mtp is not None and p.mtp.device is not None else 0
    return Settings(
        split=p.devices.split or (1,) * p.devices.count,
        context=p.context.size,
        micro_batch=p.context.micro_batch,
        kv_type=p.context.kv_type,
        sequences=p.context.sequences,
        rules=tuple(Rule(r.tensors, r.memory == "pinned") for r in p.placement),
        slots=p.expert_cache.slots if p.expert_cache is not None else 0,
        drafts=p.mtp.depth if p.mtp is not None else 0,
        head_device=head_device,
        prefill_micro_batch=phase.micro_batch if phase is not None and phase.mode == "transaction" else None,
        releases_slots=phase is not None and phase.mode == "transaction",
        chunk=_chunk(p),
        cuda=cuda,
        tile=TILE if tiles else 0,
        device_overhead_bytes=CUDA_OVERHEAD if cuda else 0,
        prompt_cache_bytes=p.context.prompt_cache_mib * MIB,
        host_overhead_bytes=CUDA_HOST_OVERHEAD if cuda else HOST_OVERHEAD,
    )


def _chunk(profile: Profile) -> int | None:
    """Tokens of lean prefill's chunk; what `auto` needs at the least."""
    lean = profile.lean_prefill
    if lean is None:
        return None
    return min(_LEAST_CHUNK, profile.context.batch) if lean.chunk == "auto" else lean.chunk


def _without(limits: Limits, ending: Collection[int]) -> Limits:
    held = 0
    for pid in ending:
        with contextlib.suppress(psutil.Error):
            memory = psutil.Process(pid).memory_info()
            held += memory.rss - memory.shared  # pages of mapped files count as available already
    most = limits.cgroup_bytes or limits.total_bytes
    return replace(limits, available_bytes=min(most, limits.available_bytes + held))


def _rooms(profile: Profile, ending: Collection[int]) -> Iterator[Room]:
    if profile.devices.kind == "virtual":
        for index in range(profile.devices.count):
            yield Room(f"VGPU{index}", (profile.devices.memory_mib or 0) * MIB, 0)
        return
    used, who = used_bytes(), holders()
    for device in probe_gpus().devices:
        here = [h for h in who if h.uuid == device.uuid]
        leaving = sum(h.used_bytes for h in here if h.pid in ending)
        by = tuple(f"pid {h.pid} ({h.name}, {h.used_bytes // MIB} MiB)" for h in here if h.pid not in ending)
        name = f"device {device.index} ({device.name})"
        yield Room(name, device.memory_bytes, max(used.get(device.index, 0) - leaving, 0), by)


def _reserve(chosen: Settings) -> int:
    return CARD_RESERVE if chosen.cuda else 0


def _devices(plan: MemoryPlan, rooms: tuple[Room, ...], chosen: Settings) -> Iterator[str]:
    for device, room in zip(plan.devices, rooms, strict=False):
        free = room.total - room.used - _reserve(chosen)
        if device.need > free:
            by = f" by {', '.join(room.by)}" if room.by else ""
            moment = "decode" if device.decode >= device.prefill else "prefill"
            kept = mib(_reserve(chosen))
            yield (
                f"{room.name}: {mib(device.need)} needed during {moment}, {mib(max(0, free))} free "
                f"({mib(room.total)} less {mib(room.used)} in use{by} and a reserve of {kept}): "
                f"short by {mib(device.need - free)}"
            )


def _host(plan: MemoryPlan, limits: Limits, chosen: Settings) -> Iterator[str]:
    host = plan.host
    free = max(0, limits.available_bytes - (HOST_RESERVE if chosen.cuda else SMALL_RESERVE))
    if host.need > free:
        cap = f", memory cgroup of {mib(limits.cgroup_bytes)}" if limits.cgroup_bytes is not None else ""
        yield (
            f"host memory: {mib(host.need)} needed (pinned {mib(host.pinned)}, weights {mib(host.weights)}, "
            f"workspace {mib(host.workspace)}, prompt cache {mib(host.prompt_cache)}, "
            f"process {mib(host.overhead)}{f', virtual GPUs {mib(host.devices)}' if host.devices else ''}), "
            f"{mib(free)} available after the reserve{cap}: short by {mib(host.need - free)}"
        )
    if limits.wsl and host.pinned > limits.total_bytes // _WSL_SHARE:
        yield (
            f"pinned memory: {mib(host.pinned)} needed; WSL pins about half of the memory it has, "
            f"{mib(limits.total_bytes // _WSL_SHARE)} here"
        )


def _warnings(plan: MemoryPlan, rooms: tuple[Room, ...], limits: Limits, chosen: Settings) -> Iterator[str]:
    host = plan.host
    room = max(0, limits.available_bytes - host.need)
    if chosen.cuda and host.mapped > room:
        yield (
            f"the embedding table takes {mib(host.mapped)}, {mib(room)} are left for it: "
            "rows that were dropped are read from disk again"
        )
    if (
        host.pinned
        and limits.memlock_bytes is not None
        and limits.memlock_bytes < host.pinned
        and os.geteuid()
    ):
        yield (
            f"RLIMIT_MEMLOCK is {mib(limits.memlock_bytes)}, {mib(host.pinned)} are to be pinned: "
            "raise it (`ulimit -l unlimited`, or LimitMEMLOCK=infinity in a unit)"
        )
    if len(rooms) < len(plan.devices):
        yield f"{len(plan.devices)} devices planned, {len(rooms)} visible: the others were not judged"
    for device, place in zip(plan.devices, rooms, strict=False):
        margin = place.total - place.used - device.need
        if chosen.cuda and 0 <= margin - CARD_RESERVE < CARD_RESERVE:
            yield f"{place.name}: {mib(margin)} to spare; a desktop or another program takes that in a moment"


def _change(
    sources: Sources, chosen: Settings, rooms: tuple[Room, ...], limits: Limits, least_context: int
) -> str | None:
    """The first single change that makes everything fit, the mildest first; None where none does."""

    def fits(attempt: Settings, free_rooms: tuple[Room, ...] = rooms) -> bool:
        plan = memory.draw(sources.hyper, sources.tensors, attempt, sources.head)
        return not [*_devices(plan, free_rooms, attempt), *_host(plan, limits, attempt)]

    empty = tuple(replace(room, used=0) for room in rooms)
    if any(room.used for room in rooms) and fits(chosen, empty):
        held = ", ".join(f"{mib(room.used)} of {room.name}" for room in rooms if room.used)
        return f"end what else uses the cards: {held}"
    if chosen.chunk is not None:
        chunk = _largest(chosen.chunk, _LEAST_CHUNK, lambda n: fits(replace(chosen, chunk=n)))
        if chunk:
            return f"lower lean_prefill.chunk to {chunk}; it is the most that fits"
    slots = _largest(chosen.slots, 1, lambda n: fits(replace(chosen, slots=n)))
    if slots:
        return f"lower expert_cache.slots to {slots}; it is the most that fits"
    if chosen.prefill_micro_batch is not None and fits(replace(chosen, prefill_micro_batch=None)):
        return (
            "set phase_prefill.micro_batch to 512, or remove the section: the prompt's workspace does not fit"
        )
    context = _largest(chosen.context, 256, lambda n: fits(replace(chosen, context=n)))
    if context >= least_context:
        return f"lower context.size to {context}; it is the most that fits"
    for half in (chosen.micro_batch // 2, chosen.micro_batch // 4, chosen.micro_batch // 8):
        if half >= 64 and fits(replace(chosen, micro_batch=half)):
            return f"lower context.micro_batch to {half}; prompts are read more slowly then"
    cache = _largest(chosen.prompt_cache_bytes, MIB, lambda n: fits(replace(chosen, prompt_cache_bytes=n)))
    if cache or (chosen.prompt_cache_bytes and fits(replace(chosen, prompt_cache_bytes=0))):
        return f"lower context.prompt_cache_mib to {cache // MIB}"
    if chosen.cuda:
        return "no single setting is enough: this model needs a machine with more memory"
    return "no single setting is enough: raise devices.memory_mib, or use a machine with more memory"


def _largest(limit: int, step: int, fits: object) -> int:
    """The largest multiple of ``step`` below ``limit`` that fits; 0 for none."""
    assert callable(fits)
    low, high = 0, max(0, -(-limit // step) - 1)
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle * step):
            low = middle
        else:
            high = middle - 1
    return low * step


def mib(size: int) -> str:
    return f"{size / MIB:,.0f} MiB"
