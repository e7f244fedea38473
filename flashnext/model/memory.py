"""The memory plan: what a model takes on each device and in host memory. Pure arithmetic over headers."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from struct import pack, unpack

from flashnext.artefacts import Artefact
from flashnext.model import memory_workspace as workspace
from flashnext.model.gguf_format import TYPE_BY_NAME
from flashnext.model.header import TensorEntry
from flashnext.model.hyper import Hyper

MIB = 1024 * 1024
_BLOCK = re.compile(r"^blk\.(\d+)\.")
_EXPERTS = re.compile(r"\.ffn_(gate|up|gate_up|down)_exps\.weight$")
_RING = 2  # layers of experts in staging memory
_CONTEXT_STEP = 256  # llama.cpp rounds a context up to a multiple of this
_INPUT = ("token_embd.weight", "per_layer_token_embd.weight")  # stay in host memory whatever is asked


@dataclass(frozen=True)
class Rule:
    """A placement rule: tensors that leave their layer's device for pinned or plain host memory."""

    pattern: str
    pinned: bool


@dataclass(frozen=True)
class Settings:
    """What a profile decides. ``prefill_micro_batch`` (tokens) is None without the transaction,
    ``chunk`` (tokens) without lean prefill.

    ``tile``: tokens of a tile of the sparse attention (feature tiled-qsa), 0 for the stock graph.
    """

    split: tuple[int, ...]
    context: int
    micro_batch: int
    kv_type: str = "f16"
    sequences: int = 1
    rules: tuple[Rule, ...] = ()
    slots: int = 0
    drafts: int = 0
    head_device: int = 0
    prefill_micro_batch: int | None = None
    releases_slots: bool = False
    chunk: int | None = None
    cuda: bool = False
    tile: int = 0
    device_overhead_bytes: int = 0
    prompt_cache_bytes: int = 0
    host_overhead_bytes: int = 0

    @property
    def cells(self) -> int:
        return -(-self.context // _CONTEXT_STEP) * _CONTEXT_STEP


class DevicePlan(Artefact):
    """Bytes on one device. ``need`` is the wider of two moments: decode with slots, prefill without.

    ``staging``: layers of experts for lean prefill; 0 where the slots are large enough to be lent for them.

    The workspaces are those of the model and, on the head's device, of the draft context.
    """

    index: int
    layers: int
    weights: int
    kv: int
    indexer: int
    recurrent: int
    head: int
    slots: int
    workspace: int
    workspace_prefill: int
    overhead: int
    slots_during_prefill: int
    staging: int = 0

    @property
    def fixed(self) -> int:
        parts = self.weights + self.kv + self.indexer + self.recurrent + self.head
        return parts + self.overhead + self.staging

    @property
    def decode(self) -> int:
        return self.fixed + self.slots + self.workspace

    @property
    def prefill(self) -> int:
        return self.fixed + self.slots_during_prefill + self.workspace_prefill

    @property
    def need(self) -> int:
        return max(self.decode, self.prefill)


class HostPlan(Artefact):
    """Bytes of host memory. ``mapped`` can be dropped by the kernel and read again, the rest cannot."""

    pinned: int
    weights: int
    mapped: int
    workspace: int
    prompt_cache: int
    overhead: int
    devices: int

    @property
    def need(self) -> int:
        return self.pinned + self.weights + self.workspace + self.prompt_cache + self.overhead + self.devices


class MemoryPlan(Artefact):
    devices: tuple[DevicePlan, ...]
    host: HostPlan
    context: int
    micro_batch: int
    prefill_micro_batch: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Head:
    """A draft head in a file of its own: its tensors and hyperparameters."""

    tensors: tuple[TensorEntry, ...]
    hyper: Hyper


def layer_devices(layers: int, split: Sequence[int]) -> list[int]:
    """The device of each layer and, last, of the output: llama.cpp's own rule, in single precision."""
    total = float(sum(split))
    bounds = [_single(n / total) for n in accumulate(split)]
    count = layers + 1
    return [min(bisect_right(bounds, _single(i / count)), len(split) - 1) for i in range(count)]


def _single(value: float) -> float:
    rounded: float = unpack("<f", pack("<f", value))[0]
    return rounded


def draw(
    hyper: Hyper, tensors: Sequence[TensorEntry], settings: Settings, head: Head | None = None
) -> MemoryPlan:
    """The plan of a whole model. ``tensors`` are those of all its shards."""
    where = layer_devices(hyper.layers, settings.split)
    weights, pinned, plain, mapped = _weights(tensors, settings, where, hyper.layers)
    experts = _experts(tensors, settings)
    staging = _staging(tensors, settings, where)
    devices = [
        _device(index, hyper, settings, where, weights[index], experts, head, staging[index])
        for index in range(len(settings.split))
    ]
    batch = workspace.Batch(
        settings.cells,
        min(settings.prefill_micro_batch or settings.micro_batch, settings.cells),
        settings.tile,
    )
    draft = workspace.draft_bytes(head.hyper, batch)[1] if head is not None else 0
    host = HostPlan(
        pinned=pinned,
        weights=plain,
        mapped=mapped,
        workspace=workspace.host_bytes(hyper, batch) + draft,
        prompt_cache=settings.prompt_cache_bytes,
        overhead=settings.host_overhead_bytes,
        devices=0 if settings.cuda else sum(d.need for d in devices),
    )
    return MemoryPlan(
        devices=tuple(devices),
        host=host,
        context=settings.cells,
        micro_batch=settings.micro_batch,
        prefill_micro_batch=settings.prefill_micro_batch or settings.micro_batch,
    )


def _weights(
    tensors: Iterable[TensorEntry], settings: Settings, where: list[int], layers: int
) -> tuple[list[int], int, int, int]:
    """Bytes on each device, pinned, in plain host memory, and mapped from the file."""
    rules = [(re.compile(rule.pattern), rule.pinned) for rule in settings.rules]
    devices, pinned, plain, mapped = [0] * len(settings.split), 0, 0, 0
    for tensor in tensors:
        match = _BLOCK.match(tensor.name)
        rule = next((rule for rule in rules if rule[0].search(tensor.name)), None)
        if match is not None and int(match[1]) >= layers:
            continue  # a prediction layer: not loaded as part of the trunk
        if tensor.name.startswith("per_layer_token_embd"):
            mapped += tensor.size_bytes
        elif rule is not None and rule[1]:
            pinned += tensor.size_bytes
        elif rule is not None or tensor.name in _INPUT:
            plain += tensor.size_bytes
        else:
            devices[where[int(match[1]) if match else layers]] += tensor.size_bytes
    if not any(t.name == "output.weight" for t in tensors):  # tied: a second copy for the output
        devices[where[layers]] += sum(t.size_bytes for t in tensors if t.name == "token_embd.weight")
    return devices, pinned, plain, mapped


def _experts(tensors: Iterable[TensorEntry], settings: Settings) -> dict[int, tuple[int, int]]:
    """Per layer with experts in host memory: bytes of one expert, and of its largest whole tensor."""
    rules = [re.compile(rule.pattern) for rule in settings.rules]
    found: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        match = _BLOCK.match(tensor.name)
        if match is None or not _EXPERTS.search(tensor.name) or len(tensor.shape) != 3:
            continue
        if any(rule.search(tensor.name) for rule in rules):
            one, largest = found.get(int(match[1]), (0, 0))
            one += tensor.size_bytes // tensor.shape[2]
            found[int(match[1])] = (one, max(largest, tensor.size_bytes))
    return found


def _staging(tensors: Iterable[TensorEntry], settings: Settings, where: list[int]) -> list[int]:
    """Per device: lean prefill's ring, whose places hold the largest gate, up and down of its layers."""
    rules = [re.compile(rule.pattern) for rule in settings.rules]
    largest: list[dict[str, int]] = [{} for _ in settings.split]
    for tensor in tensors if settings.chunk is not None else ():
        match, expert = _BLOCK.match(tensor.name), _EXPERTS.search(tensor.name)
        if match is None or expert is None or int(match[1]) >= len(where) - 1:
            continue
        if any(rule.search(tensor.name) for rule in rules):
            parts = largest[where[int(match[1])]]
            parts[expert[1]] = max(parts.get(expert[1], 0), tensor.size_bytes)
    return [_RING * sum(parts.values()) for parts in largest]


def _device(
    index: int,
    hyper: Hyper,
    settings: Settings,
    where: list[int],
    weights: int,
    experts: dict[int, tuple[int, int]],
    head: Head | None,
    staging: int,
) -> DevicePlan:
    own = [layer for layer in range(hyper.layers) if where[layer] == index]
    full = [layer for layer in own if not hyper.recurrent[layer]]
    sparse = sum(1 for layer in full if hyper.ratios[layer] > 0)
    element = TYPE_BY_NAME[settings.kv_type.upper()]
    cells = settings.cells
    slots = sum(experts[layer][0] for layer in own if layer in experts) * settings.slots
    copies = settings.cuda and settings.chunk is None  # lean prefill has staging memory instead
    copied = max((largest for _, largest in experts.values()), default=0) if copies else 0

    def room(tokens: int) -> int:
        batch = workspace.Batch(cells, min(settings.chunk or tokens, cells), settings.tile)
        return workspace.device_bytes(
            hyper, batch, sparse_layers=sparse, first=index == 0, copied_bytes=copied
        )

    drafting = head if index == settings.head_device else None

    def draft_room(tokens: int) -> int:
        batch = workspace.Batch(cells, min(tokens, cells))
        return workspace.draft_bytes(drafting.hyper, batch)[0] if drafting is not None else 0

    decode = room(settings.micro_batch) + draft_room(settings.micro_batch)
    prefill = settings.prefill_micro_batch
    return DevicePlan(
        index=index,
        layers=len(own),
        weights=weights,
        kv=sum(2 * element.row_bytes(hyper.kv_heads[i] * hyper.head_dim) for i in full) * cells,
        indexer=sparse * element.row_bytes(hyper.index_dim) * cells,
        recurrent=_recurrent(hyper, own) * settings.sequences * (1 + settings.drafts),
        head=_head(drafting, settings) if drafting is not None else 0,
        slots=slots,
        workspace=decode,
        workspace_prefill=room(prefill) + draft_room(prefill) if prefill else decode,
        overhead=settings.device_overhead_bytes,
        slots_during_prefill=0 if settings.releases_slots else slots,
        staging=staging if slots < staging else 0,
    )


def _recurrent(hyper: Hyper, layers: Iterable[int]) -> int:
    """One plane of one sequence: convolution, state, and the PLE layer's own rows, in f32."""
    value = hyper.ssm_state * hyper.ssm_rank
    conv = (hyper.ssm_conv - 1) * (2 * hyper.ssm_state * hyper.ssm_groups + value)
    state = hyper.ssm_state * value
    total = 0
    for layer in layers:
        if hyper.recurrent[layer]:
            total += conv + state
            if hyper.ple is not None and hyper.ple.layer == layer:
                total += (hyper.ple.conv - 1) * hyper.ple.ngram * hyper.wide
    return 4 * total


def _head(head: Head, settings: Settings) -> int:
    """Weights and the dense KV of one layer."""
    hyper, cells = head.hyper, settings.cells
    element = TYPE_BY_NAME[settings.kv_type.upper()]
    weights = sum(t.size_bytes for t in head.tensors if not t.name.startswith(_INPUT))
    last = hyper.layers  # the prediction block comes after the trunk's
    kv = 2 * element.row_bytes(hyper.kv_heads[last] * hyper.head_dim) * cells
    return weights + kv
