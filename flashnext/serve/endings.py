"""How a service came to its end, as the error that a person reads."""

from __future__ import annotations

from dataclasses import dataclass

from flashnext.errors import (
    DeviceLostError,
    FlashnextError,
    HostNotQualifiedError,
    InsaneTextError,
    PortInUseError,
    ProfileFlagsError,
    ServerDiedError,
    ServerError,
    ServerStartError,
)
from flashnext.serve.plan import Plan

# Kinds after which a restart would do harm, or meet the same again.
# A port that was taken is none: it was ours before, and a restart waits for it and names the holder.
_FINAL = frozenset({"device-lost", "no-gpu", "host-memory", "argument", "cannot-start"})

_HINTS = {
    "vram": "lower expert_cache.slots, or free the devices of other processes",
    "host-memory": "free host memory: experts, the embedding table and the prompt cache stay there",
    "no-gpu": "see that `nvidia-smi` works for this user, then start again",
    "cache-refused": "lower expert_cache.slots to what fits (`flashnext plan`), or free the devices",
    "host-refused": "see the limits named above; `flashnext doctor` shows what this machine allows",
    "mtp-refused": "give the head that was made for this model (mtp.head)",
    "phase-refused": "set phase_prefill and what it is checked against to the values named above",
    "not-rehearsed": "the build's phase-prefill does not do what this version expects: `flashnext build`",
    "lean-refused": "lower lean_prefill.chunk or expert_cache.slots, or free the devices",
    "load-late": "raise life.load_limit_s, or look at the speed of the model's disk",
    "no-progress": "the log named above ends where the server stood still",
    "virtual-gpu-lost": "raise devices.memory_mib if a virtual GPU refused memory; see the log",
}


@dataclass(frozen=True)
class Trouble:
    """Why the children cannot go on: a kind for decisions, a text for people, the line that told."""

    kind: str
    text: str
    line: str = ""
    code: int | None = None

    @property
    def final(self) -> bool:
        return self.kind in _FINAL or self.refused

    @property
    def refused(self) -> bool:
        """The native code says that it cannot work as it is configured."""
        return self.kind.endswith("-refused")


def error_for(trouble: Trouble, plan: Plan, lines: list[str], *, was_ready: bool) -> FlashnextError:
    """The error to end with: its class fixes the exit code, its context has the last lines and the log."""
    cls: type[FlashnextError]
    if trouble.kind == "device-lost":
        cls = DeviceLostError
    elif trouble.kind == "insane-text":
        cls = InsaneTextError
    elif trouble.kind == "port":
        cls = PortInUseError
    elif trouble.refused:
        cls = HostNotQualifiedError
    elif trouble.kind == "argument":
        cls = ProfileFlagsError
    else:
        cls = ServerDiedError if was_ready else ServerStartError
    context = [trouble.line] if trouble.line else []
    if not trouble.line and issubclass(cls, ServerError):
        context += lines[-8:]
    context.append(f"log: {plan.log}")
    return cls(trouble.text, context=context, hint=_HINTS.get(trouble.kind))
