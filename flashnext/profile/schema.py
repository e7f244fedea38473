"""The closed model of a profile: every key there is, with its unit, its default and what it means."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Tokens = Annotated[int, Field(ge=1, le=1_048_576)]
Seconds = Annotated[int, Field(ge=0, le=86_400)]
Slug = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]


class Section(BaseModel):
    """Frozen, closed, and without conversions: `"5"` is no number and `1` is no truth value."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelFile(Section):
    """One file of the qualified model."""

    name: str
    size_bytes: Annotated[int, Field(ge=1)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ModelSection(Section):
    """Which weights. Exactly one of `path` and `synthetic`."""

    path: str | None = Field(
        None, description="First (or only) GGUF file; relative paths start at flashnext's models folder."
    )
    synthetic: Literal["tiny", "demo"] | None = Field(
        None, description="A random-weight model of ours, written on first use."
    )
    files: tuple[ModelFile, ...] = Field((), description="The files it must consist of, to the byte.")


class DevicesSection(Section):
    """Where layers, KV cache and workspace live."""

    kind: Literal["virtual", "cuda"] = Field(
        description="virtual: processes of ours on loopback; cuda: GPUs."
    )
    count: Annotated[int, Field(ge=1, le=16)]
    memory_mib: Annotated[int, Field(ge=64)] | None = Field(
        None, description="virtual: memory limit of each device."
    )
    name: str | None = Field(None, description="cuda: text that each device's name must contain.")
    usable_mib: Annotated[int, Field(ge=1)] | None = Field(
        None, description="cuda: memory each device must report in total."
    )
    used_mib_max: Annotated[int, Field(ge=0)] | None = Field(
        None, description="cuda: most memory others may hold on each device before launch."
    )
    split: tuple[Annotated[int, Field(ge=0, le=1000)], ...] | None = Field(
        None, description="Share of the layers per device; default: even."
    )


class ContextSection(Section):
    """Sizes of the context and of the batches, in tokens."""

    size: Tokens
    batch: Tokens
    micro_batch: Tokens
    sequences: Annotated[int, Field(ge=1, le=64)] = 1
    kv_type: Literal["f32", "f16", "bf16", "q8_0"] = "f16"
    checkpoints: Annotated[int, Field(ge=0, le=256)] = Field(
        32, description="Saved states of the recurrent layers, for follow-ups."
    )
    checkpoint_step: Annotated[int, Field(ge=0)] = Field(8192, description="Least distance between them.")
    prompt_cache_mib: Annotated[int, Field(ge=0, le=65_536)] = Field(
        0, description="Host memory for prompts of other conversations. Upstream's own default is 8192."
    )


class AttentionSection(Section):
    flash: bool = True
    rotation: bool = Field(False, description="false sets LLAMA_ATTN_ROT_DISABLE=1.")


class PlacementRule(Section):
    """Tensors that leave their layer's device."""

    tensors: Annotated[str, Field(min_length=1, pattern=r"^[^,=]+$")] = Field(
        description="Regular expression over tensor names; it must match at least one."
    )
    memory: Literal["host", "pinned"] = Field(description="host: plain memory; pinned: page-locked by CUDA.")


class LoadSection(Section):
    mode: Literal["auto", "none", "mmap", "dio"] = "auto"
    lazy: bool = Field(False, description="Read rows of the large embedding table on demand.")
    pin_host: bool = Field(False, description="Sets LLAMA_MMAP_PIN_HOST=1.")


class ExpertCacheSection(Section):
    """Hot experts on the devices during decode (feature expert-cache)."""

    slots: Annotated[int, Field(ge=1, le=1024)] = Field(description="Slots per layer.")
    inserts: Annotated[int, Field(ge=0, le=64)] = Field(2, description="Uploads per layer and step.")


class MtpSection(Section):
    """The model's own draft head (feature mtp-qwen4exp)."""

    head: str | None = Field(None, description="GGUF file of the head; absent: embedded in the model file.")
    synthetic: bool = Field(False, description="A head written together with the synthetic model.")
    files: tuple[ModelFile, ...] = ()
    depth: Annotated[int, Field(ge=1, le=16)] = 3
    device: Annotated[int, Field(ge=0, le=15)] | None = Field(None, description="Device of the head.")


class PhasePrefillSection(Section):
    """The memory transaction around a long prompt (feature phase-prefill)."""

    micro_batch: Literal[512, 2048] = 2048
    mode: Literal["transaction", "bypass"] = "transaction"
    min_tokens: Annotated[int, Field(ge=0, le=1_048_576)] = 2048
    verify: bool = False


class LeanPrefillSection(Section):
    """Experts uploaded under compute (feature lean-prefill): an alternative to the transaction."""

    chunk: Annotated[int, Field(ge=32, le=24_576)] | Literal["auto"] = Field(
        description="Tokens per upload of all experts; auto: the largest of 512, 1024, ... 16384 that fits."
    )


class ServerSection(Section):
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65_535)] = 8080
    control_port: Annotated[int, Field(ge=1, le=65_535)] | None = Field(
        None, description="Loopback port of status, metrics and page, for Prometheus; absent: any free one."
    )
    alias: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    threads: Annotated[int, Field(ge=1, le=512)] | None = Field(
        None, description="CPU threads of llama-server; absent: physical cores, shared with virtual GPUs."
    )
    timeout_s: Annotated[int, Field(ge=3600, le=86_400)] = Field(
        3600, description="Read and write timeout; a long prompt is silent for many minutes."
    )
    api_key_file: str | None = Field(None, description="One key a line. Required for a host beyond loopback.")


class LifeSection(Section):
    """Limits of the supervisor."""

    load_limit_s: Annotated[int, Field(ge=1, le=86_400)] = Field(
        900, description="Time without any sign of progress while loading."
    )
    check_limit_s: Annotated[int, Field(ge=1, le=3600)] = Field(120, description="Time for one ready check.")
    no_progress_s: Annotated[int, Field(ge=1, le=86_400)] = Field(
        180, description="A busy server without a new token and without prompt progress for so long hangs."
    )
    restarts: Annotated[int, Field(ge=0, le=10)] = Field(3, description="Restarts in a row after ready.")
    backoff_s: Annotated[int, Field(ge=0, le=3600)] = Field(2, description="First pause; it doubles.")
    quiet_s: Annotated[int, Field(ge=1)] = Field(600, description="Ready for so long forgets old restarts.")
    text_check_s: Seconds = Field(
        0, description="Check an idle server's text every so often; 0: never. It takes the one sequence."
    )
    stop_limit_s: Annotated[int, Field(ge=1, le=600)] = Field(15, description="From stop to SIGKILL.")


class NumaSection(Section):
    interleave: Literal["auto", "never"] = Field(
        "auto", description="auto: numactl --interleave=all where there are two or more nodes."
    )


class Profile(Section):
    """One way to serve one model. Sections that name a feature need a build that has it."""

    name: Slug
    summary: Annotated[str, Field(min_length=1, max_length=200)]
    kind: Literal["demo", "qualified", "experimental"] = Field(
        description="qualified: every value of the qualified set is required; "
        "experimental: deviations are shown everywhere instead; demo: no claim is made."
    )
    model: ModelSection
    devices: DevicesSection
    context: ContextSection
    server: ServerSection
    attention: AttentionSection = AttentionSection()
    placement: tuple[PlacementRule, ...] = ()
    load: LoadSection = LoadSection()
    numa: NumaSection = NumaSection()
    expert_cache: ExpertCacheSection | None = None
    mtp: MtpSection | None = None
    phase_prefill: PhasePrefillSection | None = None
    lean_prefill: LeanPrefillSection | None = None
    life: LifeSection = LifeSection()


def json_schema() -> dict[str, Any]:
    """The JSON schema of a profile, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Profile.model_json_schema(),
    }


def differences(left: Profile, right: Profile) -> list[tuple[str, Any, Any]]:
    """(dotted key, value of the left, value of the right) wherever two profiles differ; absent is None."""
    flat = [_flat(p.model_dump(mode="json"), "") for p in (left, right)]
    keys = [*flat[0], *(key for key in flat[1] if key not in flat[0])]
    pairs = [(key, flat[0].get(key), flat[1].get(key)) for key in keys]
    return [pair for pair in pairs if pair[1] != pair[2]]


def _flat(value: Any, key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {key: value} if value is not None else {}
    found: dict[str, Any] = {}
    for name, item in value.items():
        found |= _flat(item, f"{key}.{name}" if key else name)
    return found


# Keys that people bring along from other launchers, and why there is no such key here.
NO_SUCH_KEY = {
    "mmproj": "flashnext serves text only; a projector is refused whatever it fits",
    "hf_repo": "serving never downloads: fetch the files first and give model.path",
    "url": "serving never downloads: fetch the files first and give model.path",
    "fit": "the automatic fitter is always off: it forgets the draft head",
    "repack": "repacking is always off: a repacked expert cannot be copied to a device",
    "sleep_idle_seconds": "an idle server is never unloaded: reloading is what fails later",
    "parallel": "write context.sequences",
    "slots": "cache slots are expert_cache.slots; sequences are context.sequences",
    "ctx_size": "write context.size",
    "ubatch_size": "write context.micro_batch",
    "batch_size": "write context.batch",
    "args": "there are no free arguments: what is served is what was checked",
    "extra_args": "there are no free arguments: what is served is what was checked",
    "env": "there are no free variables: what is served is what was checked",
}
