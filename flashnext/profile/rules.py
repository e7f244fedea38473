"""Rules between values: the structural ones that no profile may break, and the qualified set.

Both work on whatever sections could be read, so that they speak in the same list as a typo elsewhere.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flashnext.profile.strict_yaml import Path

# Field name of the profile -> validated value; a section that did not validate is missing.
Sections = Mapping[str, Any]
Finding = tuple[Path, str]


@dataclass(frozen=True)
class Requirement:
    """One value of the qualified set: where, what, and the reason a person gets to read."""

    path: Path
    required: Any
    why: str


@dataclass(frozen=True)
class Deviation:
    """A value that is not the qualified one."""

    path: Path
    found: Any
    required: Any
    why: str

    def text(self) -> str:
        return f"found {_shown(self.found)}, qualified is {_shown(self.required)}: {self.why}"


EXPERTS_RULE = r"blk\.\d+\.ffn_(gate|up|down)_exps\.weight"
TABLE_RULE = r"per_layer_token_embd\.weight"

# The configuration whose numbers are published and were reproduced; see the README, "The 2x3090 profile".
QUALIFIED: tuple[Requirement, ...] = (
    Requirement(
        ("context", "micro_batch"), 512, "decode graphs and the cache's admission were measured with it"
    ),
    Requirement(("context", "batch"), 4096, "it bounds the prompt's larger micro-batch and the checkpoints"),
    Requirement(
        ("context", "size"),
        261_888,
        "the context that was measured; llama.cpp rounds up to a multiple of 256, so 261,889 and more become "
        "262,144, where older trees failed in a norm's launch grid; the pinned one was not tried there",
    ),
    Requirement(("context", "sequences"), 1, "the transaction and the recurrent state's rollback know one"),
    Requirement(("context", "kv_type"), "f16", "a quantised cache changes the text and was not measured"),
    Requirement(("attention", "flash"), True, "the workspace was planned with it"),
    Requirement(("attention", "rotation"), False, "LLAMA_ATTN_ROT_DISABLE=1 belongs to the published recipe"),
    Requirement(("load", "lazy"), False, "lazy reads of the table gave runs of slashes in a public report"),
    Requirement(("load", "pin_host"), True, "LLAMA_MMAP_PIN_HOST=1: pageable uploads are four times slower"),
    Requirement(("devices", "kind"), "cuda", "the numbers are a GPU's"),
    Requirement(("devices", "count"), 2, "one card holds neither the slots nor the workspace"),
    Requirement(("devices", "name"), "RTX 3090", "slots and margins were measured on this class"),
    Requirement(("expert_cache", "slots"), 150, "what fits beside the decode workspace on 24 GB cards"),
    Requirement(("expert_cache", "inserts"), 2, "more uploads per step slow decode down"),
    Requirement(("mtp", "depth"), 3, "acceptance and rollback planes were measured at three drafts"),
    Requirement(("phase_prefill", "micro_batch"), 2048, "the published prompt speed"),
    Requirement(("phase_prefill", "mode"), "transaction", "bypass is the control arm of the bench"),
    Requirement(("phase_prefill", "min_tokens"), 2048, "below it the transaction costs more than it gains"),
    Requirement(("phase_prefill", "verify"), False, "hashing the state at each boundary is a test's tool"),
)

# What the numbers were measured with, by hash: the four shards, and the shared head.
QUALIFIED_MODEL = frozenset(
    {
        "4448186216b3af4cc558bbce2c3213f01608f8f8b2e5267a9767971dd3ec8082",
        "3f342f1c1580473f1ee94ddd5b28206e8c07a70fa1a366f59d1d6c922919a6c9",
        "56758f40269cad5cd9b0d3d6fbae0f40f6d5be6de49e4ab392dbe83157d9cbd3",
        "753bda48b98ba4f1636134a90a967de1b2d3908a236c026e464777342e53510a",
    }
)
QUALIFIED_HEAD = frozenset({"5ff54097406a905cf3a724c709124ceb0e3e10235ee862298969e91c96fa96e6"})


def deviations(sections: Sections) -> list[Deviation]:
    """Every value that differs from the qualified set, among the sections that could be read."""
    found = []
    for need in QUALIFIED:
        known, value = lookup(sections, need.path)
        if known and (type(value) is not type(need.required) or value != need.required):
            found.append(Deviation(need.path, value, need.required, need.why))
    known, rules = lookup(sections, ("placement",))
    wanted = {EXPERTS_RULE: "pinned", TABLE_RULE: "host"}
    if known and {r.tensors: r.memory for r in rules} != wanted:
        shown = ", ".join(f"{r.tensors} -> {r.memory}" for r in rules) or "none"
        required = ", ".join(f"{k} -> {v}" for k, v in wanted.items())
        why = "experts of every layer in pinned memory, the embedding table in plain memory, nothing else"
        found.append(Deviation(("placement",), shown, required, why))
    for section, wanted_files in (("model", QUALIFIED_MODEL), ("mtp", QUALIFIED_HEAD)):
        known, files = lookup(sections, (section, "files"))
        if known and {f.sha256 for f in files or ()} != wanted_files:
            why = "another file is another model, however it is called"
            shown = f"{len(files or ())} files of other hashes"
            found.append(Deviation((section, "files"), shown, f"the {len(wanted_files)} published ones", why))
    return found


def lookup(sections: Sections, path: Path) -> tuple[bool, Any]:
    """(known, value) of a dotted path; a section that is absent by choice is known and None."""
    value: Any = sections
    for part in path:
        if value is None:
            return True, None
        if isinstance(value, Mapping):
            if part not in value:
                return False, None
            value = value[part]
        else:
            value = getattr(value, str(part))
    return True, value


# --- structure: what cannot work, whatever the kind -------------------------------------------------------


def structural(sections: Sections) -> list[Finding]:
    """What no profile may break, with the key it hangs on."""
    return [finding for rule in _RULES for finding in rule(sections)]


def _context(s: Sections) -> Iterator[Finding]:
    context = s.get("context")
    if context is None:
        return
    if context.micro_batch > context.batch:
        text = (
            f"{context.micro_batch} is above context.batch ({context.batch}); llama.cpp would cut it silently"
        )
        yield ("context", "micro_batch"), text
    if context.size % 256:
        up = (context.size + 255) // 256 * 256
        yield ("context", "size"), f"{context.size} is no multiple of 256; llama.cpp would make it {up}"
    if context.batch > context.size:
        yield ("context", "batch"), f"{context.batch} is above context.size ({context.size})"


def _model(s: Sections) -> Iterator[Finding]:
    model = s.get("model")
    if model is not None and (model.path is None) == (model.synthetic is None):
        yield ("model",), "give exactly one of `path` and `synthetic`"


def _devices(s: Sections) -> Iterator[Finding]:
    devices = s.get("devices")
    if devices is None:
        return
    if devices.kind == "virtual":
        if devices.memory_mib is None:
            yield ("devices", "memory_mib"), "virtual devices need a memory limit"
        for key in ("name", "usable_mib", "used_mib_max"):
            if getattr(devices, key) is not None:
                yield ("devices", key), "has a meaning for cuda devices only"
    elif devices.memory_mib is not None:
        yield ("devices", "memory_mib"), "has a meaning for virtual devices only"
    if devices.split is not None:
        if len(devices.split) != devices.count:
            yield ("devices", "split"), f"{len(devices.split)} shares for {devices.count} devices"
        if 0 in devices.split:
            yield ("devices", "split"), "a device with a zero share would idle: lower devices.count instead"


def _placement(s: Sections) -> Iterator[Finding]:
    rules = s.get("placement")
    devices = s.get("devices")
    for index, rule in enumerate(rules or ()):
        try:
            re.compile(rule.tensors)
        except (re.error, RecursionError, OverflowError) as error:
            yield ("placement", index, "tensors"), f"no regular expression: {error}"
        if rule.memory == "pinned" and devices is not None and devices.kind != "cuda":
            yield ("placement", index, "memory"), "pinned memory needs cuda devices; write host"


def _lean(s: Sections) -> Iterator[Finding]:
    lean, context = s.get("lean_prefill"), s.get("context")
    if lean is None:
        return
    if s.get("phase_prefill") is not None:
        yield ("lean_prefill",), "an alternative to phase_prefill: keep one of them"
    if context is not None and lean.chunk != "auto" and lean.chunk > context.batch:
        yield ("lean_prefill", "chunk"), f"above context.batch ({context.batch})"
    if "placement" in s and not any("exps" in rule.tensors for rule in s["placement"]):
        yield ("lean_prefill",), "needs the experts in host memory: a placement rule for ffn_..._exps"


def _features(s: Sections) -> Iterator[Finding]:
    context, mtp, phase = s.get("context"), s.get("mtp"), s.get("phase_prefill")
    devices, cache = s.get("devices"), s.get("expert_cache")
    if context is not None and context.sequences != 1:
        for name in ("mtp", "phase_prefill", "expert_cache"):
            if s.get(name) is not None:
                yield ("context", "sequences"), f"{name} works with one sequence"
    if phase is not None:
        if "expert_cache" in s and cache is None:
            yield ("phase_prefill",), "needs expert_cache: without slots there is nothing to lend"
        if "mtp" in s and mtp is None:
            yield ("phase_prefill",), "needs mtp: the transaction was built for the MTP drafter alone"
        if context is not None and phase.micro_batch > context.batch:
            yield ("phase_prefill", "micro_batch"), f"above context.batch ({context.batch})"
    if mtp is not None:
        if mtp.head is not None and mtp.synthetic:
            yield ("mtp",), "give one of `head` and `synthetic`"
        if devices is not None and mtp.device is not None and mtp.device >= devices.count:
            yield ("mtp", "device"), f"device {mtp.device} of {devices.count} (they count from 0)"
        if mtp.synthetic and s.get("model") is not None and s["model"].synthetic is None:
            yield ("mtp", "synthetic"), "a synthetic head fits a synthetic model only"


def _server(s: Sections) -> Iterator[Finding]:
    server = s.get("server")
    if server is None:
        return
    if server.control_port == server.port:
        yield ("server", "control_port"), f"{server.port} is server.port already"
    try:
        local = ipaddress.ip_address(server.host).is_loopback
    except ValueError:
        local = server.host == "localhost"
        if not local:
            yield (
                ("server", "host"),
                f"{server.host!r} is no IP address; names other than localhost are refused",
            )
            return
    if not local and server.api_key_file is None:
        yield ("server", "host"), "reachable from other machines, so server.api_key_file is required"


_RULES: tuple[Callable[[Sections], Iterator[Finding]], ...] = (
    _model,
    _context,
    _devices,
    _placement,
    _features,
    _lean,
    _server,
)


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:,}" if isinstance(value, int) else str(value)
