"""What a line of the server's log or its way of ending means, and what follows from it."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from enum import StrEnum

from flashnext.markers import Marker


class Action(StrEnum):
    """What a finding asks of the supervisor."""

    COUNT = "count"  # worth a number, nothing else
    WARN = "warn"  # shown in status
    RESTART = "restart"  # the process cannot be trusted any more
    GIVE_UP = "give-up"  # a restart would do harm, or the same again


@dataclass(frozen=True)
class Finding:
    """A line that means something."""

    kind: str
    action: Action
    text: str
    line: str


_PATTERNS: tuple[tuple[str, Action, str, re.Pattern[str]], ...] = tuple(
    (kind, action, text, re.compile(pattern, re.IGNORECASE))
    for kind, action, text, pattern in (
        (
            "device-lost",
            Action.GIVE_UP,
            "a GPU fell off the bus",
            r"fallen off the bus|\bXid\b.{0,40}\b79\b|device is lost|CUDA_ERROR_DEVICE_UNAVAILABLE",
        ),
        (
            "no-gpu",
            Action.GIVE_UP,
            "the server sees no usable GPU and would run on the CPU",
            r"no usable GPU|no CUDA-capable device is detected|failed to initialize CUDA",
        ),
        (
            "prompt-memory",
            Action.WARN,
            "the device had no memory left for the scratch space of a prompt, which was refused; "
            "set fewer expert_cache.slots or a smaller context.size",
            r"phase-prefill: \S+: no memory for the scratch space of the prompt",
        ),
        (
            "vram",
            Action.RESTART,
            "device memory ran out",
            r"CUDA error: out of memory|cudaMalloc failed: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
            r"|CUBLAS_STATUS_NOT_INITIALIZED|an unsupported value or parameter was passed"
            r"|failed to allocate \S+ buffer of size|CUDA_ERROR_OUT_OF_MEMORY",
        ),
        ("gpu-fault", Action.RESTART, "a CUDA call failed", r"CUDA error[: ]|illegal memory access"),
        (
            "virtual-gpu-lost",
            Action.RESTART,
            "a virtual GPU does not answer",
            r"Remote RPC server crashed|RPC transport initialization failed|RPC handshake failed",
        ),
        (
            "abort",
            Action.RESTART,
            "llama-server hit an assertion",
            r"GGML_ASSERT\(|GGML_ABORT|terminate called",
        ),
        (
            "host-memory",
            Action.GIVE_UP,
            "host memory ran out",
            r"std::bad_alloc|failed to allocate .{0,40}host|cudaMallocHost.{0,60}fail",
        ),
        (
            "port",
            Action.GIVE_UP,
            "the port was taken while the server started",
            r"couldn't bind HTTP server socket",
        ),
        (
            "argument",
            Action.GIVE_UP,
            "llama-server rejects its command line",
            r"(^| )error: (invalid|unknown|unrecognized) argument|argument has been removed"
            r"|error while handling argument",
        ),
        (
            "parse-failure",
            Action.COUNT,
            "an answer did not fit the expected format",
            r"does not match the expected format|failed to parse tool call",
        ),
    )
)


# No pattern above can match a line without one of these; looking for them costs a hundredth of the patterns.
_NEEDLES = (
    *("error", "fail", "assert", "abort", "terminate", "memory", "alloc", "argument", "lost", "bus", "xid"),
    *("gpu", "device", "cublas", "unsupported value", "crashed", "bind", "expected format"),
)


def worth_reading(block: str) -> bool:
    """Can any line of this block mean something? A cheap test that lets a flood of output pass quickly."""
    lower = block.lower()
    return any(needle in lower for needle in _NEEDLES)


def classify(line: str) -> Finding | None:
    """The meaning of one log line, None for the many that have none. The first rule that fits counts."""
    line = line[:4096]
    if not worth_reading(line):
        return None
    for kind, action, text, pattern in _PATTERNS:
        if pattern.search(line):
            return Finding(kind, action, text, line.strip()[:400])
    return None


# What refuses, for people. Each of them speaks while the server starts, so the same start would refuse again.
_REFUSALS = {
    "host": "the experts cannot be held as the profile places them",
    "cache": "the expert cache cannot be had",
    "mtp": "the draft head and the model do not go together",
    "phase": "the settings are not those of the memory transaction",
}


def refusal(marker: Marker) -> Finding | None:
    """``fn:<kind>:refused`` with the marker's own reason, None for other markers.

    A virtual GPU that refuses an allocation is none: what becomes of it is the server's to say.
    """
    if marker.event != "refused" or marker.kind == "vgpu":
        return None
    wrong = marker.data.get("wrong")
    reason = marker.data.get("reason")
    if isinstance(wrong, list) and wrong:
        reason = "; ".join(str(sentence) for sentence in wrong)
    what = _REFUSALS.get(marker.kind, f"the native code refuses ({marker.kind})")
    text = f"{what}: {reason or json.dumps(dict(marker.data))}"
    return Finding(f"{marker.kind}-refused", Action.GIVE_UP, text, _line(marker))


def failure(marker: Marker) -> Finding | None:
    """``fn:<kind>:failed``: the process has lost a state that it cannot mend. None for other markers."""
    if marker.event != "failed":
        return None
    detail = [str(marker.data[key]) for key in ("check", "detail", "reason") if marker.data.get(key)]
    what = "the memory transaction failed" if marker.kind == "phase" else f"{marker.kind} failed"
    text = ": ".join([what, *(detail or [json.dumps(dict(marker.data))])])
    return Finding(f"{marker.kind}-failed", Action.RESTART, text, _line(marker))


def _line(marker: Marker) -> str:
    return f"fn:{marker.name} {json.dumps(dict(marker.data))}"[:400]


# Exit codes that the native code chooses itself (EX_TEMPFAIL: the next process may well succeed).
PHASE_FAILED = 75
_CODES = {PHASE_FAILED: "ended itself after a failed transition of the memory transaction"}

_ENDINGS = {
    signal.SIGABRT: "aborted itself (an assertion or a failed check)",
    signal.SIGKILL: "was killed from outside (by a person, or by the kernel for memory)",
    signal.SIGTERM: "was asked to stop",
    signal.SIGINT: "was asked to stop",
    signal.SIGSEGV: "crashed (segmentation fault)",
    signal.SIGBUS: "crashed (bus error: a mapped file shrank, or its disk failed)",
    signal.SIGILL: "met an instruction this processor does not have",
}


def ending(code: int) -> str:
    """How a process ended, in words; ``code`` as subprocess reports it or as a shell does (128 + signal)."""
    number = -code if code < 0 else code - 128 if 128 < code < 128 + signal.NSIG else 0
    if number:
        try:
            sig = signal.Signals(number)
        except ValueError:
            return f"ended by signal {number}"
        return f"{_ENDINGS.get(sig, 'ended')} ({sig.name}, {128 + number})"
    if code in _CODES:
        return f"{_CODES[code]} (exit code {code})"
    return "ended by itself without an error" if code == 0 else f"gave up with code {code}"
