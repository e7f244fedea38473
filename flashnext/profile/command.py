"""From a profile to llama-server's command line and environment: pure functions, snapshot-tested.

What has one legal value is no key of a profile and stands here as a constant with its reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashnext.profile import strict_yaml
from flashnext.profile.schema import Profile

# Upstream asserts nothing about these; each was learnt from a report or from reading the pinned tree.
ALWAYS = (
    "--no-repack",  # a repacked expert is permuted: slots copied from it are garbage
    "--offline",  # never a download
    "--no-mmproj",  # text only
    "--no-context-shift",  # recurrent state cannot be shifted
    "--no-kv-unified",  # unified KV with sparse attention moves the logits of a second sequence
    "--metrics",
    "--slots",
    "--no-webui",
)


@dataclass(frozen=True)
class Place:
    """What a command line needs and a profile does not say: files, ports and facts of this start."""

    server: str
    model: str
    port: int
    head: str | None = None
    endpoints: tuple[str, ...] = ()
    threads: int = 1
    interleave: bool = False
    config_home: str = "/nonexistent"
    api_key_file: str | None = None


def argv(profile: Profile, place: Place) -> list[str]:
    """llama-server's whole command line, the program first (behind numactl where memory is interleaved)."""
    p = profile
    line = ["numactl", "--interleave=all"] if place.interleave else []
    line += [place.server, "--model", place.model, "--alias", p.server.alias]
    line += ["--host", p.server.host, "--port", str(place.port), "--timeout", str(p.server.timeout_s)]
    if place.api_key_file is not None:
        line += ["--api-key-file", place.api_key_file]
    line += ["--threads", str(place.threads), "--threads-batch", str(place.threads)]
    if place.interleave:
        line += ["--numa", "distribute"]
    line += _devices(p, place)
    line += ["--ctx-size", str(p.context.size), "--batch-size", str(p.context.batch)]
    line += ["--ubatch-size", str(p.context.micro_batch), "--parallel", str(p.context.sequences)]
    line += ["--cache-type-k", p.context.kv_type, "--cache-type-v", p.context.kv_type]
    line += ["--flash-attn", "on" if p.attention.flash else "off"]
    line += ["--ctx-checkpoints", str(p.context.checkpoints)]
    line += ["--checkpoint-min-step", str(p.context.checkpoint_step)]
    line += ["--cache-ram", str(p.context.prompt_cache_mib)]
    line += ["--load-mode", p.load.mode, "--lazy-mode", "on" if p.load.lazy else "off"]
    line += ["--fit", "off", *ALWAYS, "--log-colors", "off"]
    return line + _features(p, place)


def _devices(p: Profile, place: Place) -> list[str]:
    names = device_names(p)
    line = ["--rpc", ",".join(place.endpoints)] if p.devices.kind == "virtual" else []
    line += ["--device", ",".join(names), "--gpu-layers", "all", "--split-mode", "layer"]
    if p.devices.count > 1:
        line += ["--tensor-split", ",".join(str(n) for n in p.devices.split or (1,) * p.devices.count)]
    if p.placement:
        memory = {"host": "CPU", "pinned": "CUDA_Host"}
        line += ["--override-tensor", ",".join(f"{r.tensors}={memory[r.memory]}" for r in p.placement)]
    return line


def _features(p: Profile, place: Place) -> list[str]:
    line = []
    if p.expert_cache is not None:
        line += ["--moe-expert-cache", str(p.expert_cache.slots)]
        line += ["--moe-expert-cache-inserts", str(p.expert_cache.inserts)]
    if p.mtp is not None:
        if place.head is not None:
            line += ["--spec-draft-model", place.head]
        line += ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(p.mtp.depth)]
        line += ["--spec-draft-ngl", "all"]
        if p.mtp.device is not None:
            line += ["--spec-draft-device", device_names(p)[p.mtp.device]]
    if p.lean_prefill is not None:
        line += ["--lean-prefill", str(p.lean_prefill.chunk)]
    return line


def env(profile: Profile, place: Place) -> dict[str, str]:
    """What goes on top of the allowlisted environment (``proc.environment``)."""
    p = profile
    result = {
        # upstream merges config.ini from here into the command line; keep it empty
        "XDG_CONFIG_HOME": place.config_home,
        # a device that is lost must not be replaced by another one that takes its number
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    if not p.attention.rotation:
        result["LLAMA_ATTN_ROT_DISABLE"] = "1"
    if p.load.pin_host:
        result["LLAMA_MMAP_PIN_HOST"] = "1"
    if p.phase_prefill is not None:
        result["LLAMA_PHASE_PREFILL_UBATCH"] = str(p.phase_prefill.micro_batch)
        result["LLAMA_PHASE_PREFILL_MODE"] = p.phase_prefill.mode
        result["LLAMA_PHASE_PREFILL_MIN_TOKENS"] = str(p.phase_prefill.min_tokens)
        # the ready check's first prompt is short: it begins and ends one all the same, before any client does
        result["LLAMA_PHASE_PREFILL_REHEARSE"] = "1"
        if p.phase_prefill.verify:
            result["LLAMA_PHASE_PREFILL_VERIFY"] = "1"
        if not _qualified_numbers(p):
            result["LLAMA_PHASE_PREFILL_QUALIFIED"] = "0"
    return result


def _qualified_numbers(p: Profile) -> bool:
    """Are these the numbers that the transaction insists on unless it is told to let others pass?"""
    slots = p.expert_cache.slots if p.expert_cache is not None else None
    return (p.context.micro_batch, p.context.batch, slots) == (512, 4096, 150)


def vgpu_argv(profile: Profile, program: str, index: int, threads: int) -> list[str]:
    """The command line of one virtual GPU; it chooses its port and announces it."""
    memory = str((profile.devices.memory_mib or 0) * 1024 * 1024)
    return [program, "--port", "0", "--name", f"VGPU{index}", "--memory", memory, "--threads", str(threads)]


def device_names(profile: Profile) -> list[str]:
    """Names of the profile's devices as llama-server counts them."""
    prefix = "RPC" if profile.devices.kind == "virtual" else "CUDA"
    return [f"{prefix}{n}" for n in range(profile.devices.count)]


def features(profile: Profile) -> dict[str, strict_yaml.Path]:
    """The native features that a profile cannot do without, each with the key that asks for it."""
    needed: dict[str, strict_yaml.Path] = {"build-stamp": ()}
    if profile.devices.kind == "virtual":
        needed["fn-vgpu"] = ("devices", "kind")
    for index, rule in enumerate(profile.placement):
        if rule.memory == "pinned":
            needed.setdefault("host-experts", ("placement", index, "memory"))
    if profile.load.pin_host:
        needed.setdefault("host-experts", ("load", "pin_host"))
    if profile.expert_cache is not None:
        needed["expert-cache"] = ("expert_cache",)
    if profile.mtp is not None:
        needed["mtp-qwen4exp"] = ("mtp",)
    if profile.phase_prefill is not None:
        needed["phase-prefill"] = ("phase_prefill",)
    if profile.lean_prefill is not None:
        needed["lean-prefill"] = ("lean_prefill",)
        needed["tiled-qsa"] = ("lean_prefill",)
    return needed
