"""Does host memory hold what a profile puts there? Counted from the tensor table, before any launch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flashnext.errors import FlashnextError, HostMemoryError
from flashnext.model.inspect import Tensor
from flashnext.probe.host import probe_host
from flashnext.profile.load import Loaded
from flashnext.profile.schema import Profile

_GIB = 1024**3
# What a process with two CUDA contexts was seen to take beside its weights (public reports: 8 to 9 GB).
_CUDA_PROCESS_BYTES = 8 * _GIB
_CPU_PROCESS_BYTES = _GIB // 2


@dataclass(frozen=True)
class Share:
    """One use of host memory; ``locked`` cannot be paged out."""

    name: str
    size_bytes: int
    locked: bool


def shares(profile: Profile, tensors: Sequence[Tensor]) -> list[Share]:
    """Everything the profile keeps in host memory. Weights on virtual GPUs are host memory, too."""
    found = []
    left = list(tensors)
    for rule in profile.placement:
        hit = [t for t in left if re.search(rule.tensors, t.name)]
        gone = {t.name for t in hit}
        left = [t for t in left if t.name not in gone]
        locked = rule.memory == "pinned"
        found.append(Share(f"tensors {rule.tensors}", sum(t.size_bytes for t in hit), locked))
    virtual = profile.devices.kind == "virtual"
    if virtual:
        found.append(Share("weights on virtual GPUs", sum(t.size_bytes for t in left), True))
    found.append(Share("prompt cache", profile.context.prompt_cache_mib * 1024**2, True))
    overhead = _CPU_PROCESS_BYTES if virtual else _CUDA_PROCESS_BYTES
    found.append(Share("the process itself", overhead, True))
    return found


def problems(loaded: Loaded, tensors: Sequence[Tensor]) -> Iterator[FlashnextError]:
    """A refusal with all numbers where what cannot be paged out is more than the kernel can give."""
    parts = shares(loaded.profile, tensors)
    need = sum(s.size_bytes for s in parts if s.locked)
    available = probe_host().available_bytes
    if need <= available:
        return
    lines = [
        f"{s.size_bytes / _GIB:8.2f} GiB  {s.name}{'' if s.locked else ' (can be paged out)'}" for s in parts
    ]
    short = (need - available) / _GIB
    lines.append(f"{need / _GIB:8.2f} GiB  needed, {available / _GIB:.2f} available, {short:.2f} short")
    helps = max((s for s in parts if s.locked), key=lambda s: s.size_bytes)
    yield HostMemoryError(
        "host memory does not hold what the profile keeps there",
        context=lines,
        hint=f"the largest part is {helps.name}; end other programs, or serve on a machine with more memory",
    )
