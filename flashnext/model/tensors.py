"""The tensors that the loader demands for given hyperparameters, and what a file has instead."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod
from pathlib import Path

from flashnext.model.header import TensorEntry
from flashnext.model.hyper import Hyper
from flashnext.model.problems import Problem, listed, problem

Shapes = dict[str, tuple[int, ...]]

# Loaded as [E, hc] with reshape allowed: the element count is what counts.
_RESHAPED = (
    "output_hc_norm.weight",
    "hc_attn_norm.weight",
    "hc_ffn_norm.weight",
    "ple_norm_key.weight",
    "ple_norm_query.weight",
    "ple_norm_conv.weight",
    "nextn.hc_head_norm.weight",
    "nextn.hnorm.weight",
)
# Matrices that may carry a `.scale` and an `.input_scale`.
_SCALED = re.compile(
    r"(^output|\.(attn_(q|k|v|output|qkv|gate)|ffn_(gate|up|down)_(exps|shexp)|ssm_(out|alpha|beta)|nextn\.eh_proj))"
    r"\.(scale|input_scale)$"
)
_BIAS = re.compile(r"\.attn_[qkv]\.bias$")
# Used in element-wise operations and kernels that take F32 alone.
_F32_ONLY = re.compile(r"(norm(_key|_query|_conv)?\.weight|ssm_a|ssm_dt\.bias|ssm_conv1d\.weight)$")
_NO_WEIGHTS = frozenset({"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"})


def trunk_shapes(hyper: Hyper) -> Shapes:
    """Name to shape of every tensor of the trunk (`output.weight` included, though it is optional)."""
    embd, wide, rank = hyper.embd, hyper.wide, hyper.low_rank
    shapes: Shapes = {
        "token_embd.weight": (embd, hyper.vocab),
        "output.weight": (embd, hyper.vocab),
        "output_hc_norm.weight": (wide,),
        "output_hc_down.weight": (wide, rank),
        "output_hc_up.weight": (rank, wide),
    }
    if hyper.ple is not None:
        shapes["per_layer_token_embd.weight"] = (hyper.ple.dim, hyper.ple.rows)
    for layer in range(hyper.layers):
        blk = f"blk.{layer}."
        parts = [_mixers(hyper), _experts(hyper)]
        parts.append(_linear(hyper) if hyper.recurrent[layer] else _full(hyper, layer))
        if hyper.ple is not None and hyper.ple.layer == layer:
            parts.append(_ple(hyper))
        shapes.update({blk + name: shape for part in parts for name, shape in part.items()})
    return shapes


def head_shapes(hyper: Hyper) -> Shapes:
    """Name to shape of the prediction block's 32 tensors."""
    embd, wide, rank = hyper.embd, hyper.wide, hyper.low_rank
    block = hyper.layers
    own: Shapes = {
        "nextn.eh_proj.weight": (2 * embd, embd),
        "nextn.enorm.weight": (embd,),
        "nextn.hnorm.weight": (wide,),
        "nextn.hc_head_norm.weight": (wide,),
        "nextn.hc_head_down.weight": (wide, rank),
        "nextn.hc_head_up.weight": (rank, wide),
    }
    parts = (_mixers(hyper), _full(hyper, block), _experts(hyper), own)
    return {f"blk.{block}.{name}": shape for part in parts for name, shape in part.items()}


def _mixers(hyper: Hyper) -> Shapes:
    shapes: Shapes = {}
    for site in ("attn", "ffn"):
        shapes[f"hc_{site}_norm.weight"] = (hyper.wide,)
        shapes[f"hc_{site}_down.weight"] = (hyper.wide, hyper.low_rank)
        shapes[f"hc_{site}_up.weight"] = (hyper.low_rank, hyper.wide)
        shapes[f"hc_{site}_inject.weight"] = (hyper.wide, hyper.hc)
    return shapes


def _full(hyper: Hyper, layer: int) -> Shapes:
    inner = hyper.heads[layer] * hyper.head_dim
    kv = hyper.kv_heads[layer] * hyper.head_dim
    embd, index = hyper.embd, hyper.index_dim
    return {
        "attn_q.weight": (embd, 2 * inner),
        "attn_k.weight": (embd, kv),
        "attn_v.weight": (embd, kv),
        "attn_output.weight": (inner, embd),
        "attn_q_norm.weight": (hyper.head_dim,),
        "attn_k_norm.weight": (hyper.head_dim,),
        "indexer.q_proj.weight": (embd, hyper.index_heads * index),
        "indexer.k_proj.weight": (embd, index),
        "indexer.q_norm.weight": (index,),
        "indexer.k_norm.weight": (index,),
    }


def _linear(hyper: Hyper) -> Shapes:
    value = hyper.ssm_state * hyper.ssm_rank
    mixed = 2 * hyper.ssm_state * hyper.ssm_groups + value
    embd, rank = hyper.embd, hyper.ssm_rank
    return {
        "attn_qkv.weight": (embd, mixed),
        "attn_gate.weight": (embd, value),
        "ssm_conv1d.weight": (hyper.ssm_conv, mixed),
        "ssm_dt.bias": (rank,),
        "ssm_a": (rank,),
        "ssm_alpha.weight": (embd, rank),
        "ssm_beta.weight": (embd, rank),
        "ssm_norm.weight": (hyper.ssm_state,),
        "ssm_out.weight": (value, embd),
    }


def _ple(hyper: Hyper) -> Shapes:
    embd, wide = hyper.embd, hyper.wide
    taps = hyper.ple.conv if hyper.ple is not None else 0
    shapes: Shapes = {"ple_key.weight": (embd, wide), "ple_value.weight": (embd, embd)}
    shapes.update({f"ple_norm_{site}.weight": (wide,) for site in ("key", "query", "conv")})
    shapes["ple_conv1d.weight"] = (taps, wide)
    return shapes


def _experts(hyper: Hyper) -> Shapes:
    embd, wide, shared = hyper.embd, hyper.expert_ff, hyper.shared_ff
    return {
        "ffn_gate_inp.weight": (embd, hyper.experts),
        "ffn_gate_exps.weight": (embd, wide, hyper.experts),
        "ffn_up_exps.weight": (embd, wide, hyper.experts),
        "ffn_down_exps.weight": (wide, embd, hyper.experts),
        "ffn_gate_inp_shexp.weight": (embd,),
        "ffn_gate_shexp.weight": (embd, shared),
        "ffn_up_shexp.weight": (embd, shared),
        "ffn_down_shexp.weight": (shared, embd),
    }


def compare(
    file: Path, expected: Shapes, optional: frozenset[str], entries: Iterable[TensorEntry], hyper: Hyper
) -> list[Problem]:
    """Missing, extra and misshapen tensors, one problem for each of the three."""
    found = {entry.name: entry for entry in entries}
    expected = _with_fused_experts(expected, found, hyper)
    problems: list[Problem] = []
    missing = [name for name in expected if name not in found and name not in optional]
    if missing:
        message = f"{file.name}: {len(missing)} tensors missing: {listed(missing)}"
        problems.append(problem("model-tensor-missing", message, file))
    extra = [name for name in found if name not in expected and not _is_companion(name, expected)]
    if hyper.ple is None and any(".ple_" in n or n.startswith("per_layer_token_embd") for n in extra):
        message = f"{file.name}: PLE tensors, but no qwen4exp.ple.layers"
        problems.append(problem("model-ple-keys-missing", message, file))
        extra = [n for n in extra if ".ple_" not in n and not n.startswith("per_layer_token_embd")]
    if extra:
        message = f"{file.name}: {len(extra)} unexpected tensors: {listed(extra)}"
        problems.append(problem("model-tensor-extra", message, file))
    wrong = [
        f"{name} {_show(found[name].shape)} instead of {_show(shape)}"
        for name, shape in expected.items()
        if name in found and not _fits(name, found[name].shape, shape)
    ]
    if wrong:
        message = f"{file.name}: {len(wrong)} tensors of the wrong shape: {listed(wrong, 3)}"
        problems.append(problem("model-tensor-shape", message, file))
    types = [
        f"{entry.name} {entry.type.name}"
        for entry in found.values()
        if entry.type.name in _NO_WEIGHTS or (entry.type.name != "F32" and _F32_ONLY.search(entry.name))
    ]
    if types:
        message = f"{file.name}: {len(types)} tensors of a type without arithmetic: {listed(types, 3)}"
        problems.append(problem("model-tensor-type", message, file))
    table = found.get("per_layer_token_embd.weight")
    if table is not None and hyper.ple is not None and _rows(table) < hyper.ple.rows:
        message = f"{file.name}: {table.name} has {_rows(table):,} rows, needs {hyper.ple.rows:,}"
        problems.append(problem("model-ple-table-rows", message, file))
    return problems


def _rows(entry: TensorEntry) -> int:
    return entry.shape[1] if len(entry.shape) > 1 else 1


def _show(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(str(n) for n in shape) + "]"


def _fits(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    if name == "per_layer_token_embd.weight":  # its rows may be padded; too few is a problem of its own
        return shape[:1] == expected[:1] and len(shape) <= 2
    if name.endswith(_RESHAPED):
        return prod(shape) == prod(expected)
    return _trimmed(shape) == _trimmed(expected)


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Trailing ones mean nothing in ggml."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _is_companion(name: str, expected: Shapes) -> bool:
    known = _SCALED.search(name) or _BIAS.search(name)
    return bool(known) and f"{name.rpartition('.')[0]}.weight" in expected


def _with_fused_experts(expected: Shapes, found: dict[str, TensorEntry], hyper: Hyper) -> Shapes:
    """A layer may store gate and up in one tensor; the loader takes that form first."""
    shapes = dict(expected)
    for name in found:
        if name.endswith(".ffn_gate_up_exps.weight"):
            blk = name.removesuffix("ffn_gate_up_exps.weight")
            if shapes.pop(f"{blk}ffn_gate_exps.weight", None) is not None:
                shapes.pop(f"{blk}ffn_up_exps.weight", None)
                shapes[name] = (hyper.embd, 2 * hyper.expert_ff, hyper.experts)
    return shapes
