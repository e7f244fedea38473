"""The facts of a run's header: what was measured with what, on what."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashnext import __version__, builds, paths
from flashnext.bench.arms import Arm
from flashnext.errors import FlashnextError
from flashnext.model.header import read_header
from flashnext.probe.gpu import driver_cuda_level, probe_gpus
from flashnext.probe.host import probe_host
from flashnext.proc import run

_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
_EXPERTS = re.compile(r"\.ffn_(gate|up|down|gate_up)_exps\.")


def collect(arms: Sequence[Arm], remarks: Sequence[str], profile: Mapping[str, Any]) -> dict[str, Any]:
    """Facts known before the first server starts."""
    return {
        "flashnext": __version__,
        "git": git_state(paths.data_root()),
        "profile_facts": dict(profile),
        "arms": {arm.name: dict(arm.facts) for arm in arms},
        "remarks": list(remarks),
        "host": host(),
        "gpu": gpus(),
    }


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit and whether anything differs from it; None outside a checkout."""
    commit = run(["git", "-C", folder, "rev-parse", "HEAD"], timeout_s=10.0)
    if not commit.ok:
        return None
    status = run(["git", "-C", folder, "status", "--porcelain"], timeout_s=20.0)
    changed = [line for line in status.out.splitlines() if line.strip()]
    return {"commit": commit.out.strip(), "changed_files": len(changed)}


def host() -> dict[str, Any]:
    found = probe_host()
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    return {
        "cpu": cpu_name(),
        "cores": found.cores,
        "memory_total_bytes": found.total_bytes,
        "memory_available_bytes": found.available_bytes,
        "numa_nodes": len(nodes) or None,
        "kernel": platform.release().partition("-")[0],  # the number; what follows names whoever built it
        "python": platform.python_version(),
    }


def cpu_name() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return None
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else None


def gpus() -> dict[str, Any]:
    found = probe_gpus()
    if not found.devices:
        return {"devices": 0, "why": found.failure}
    level = driver_cuda_level(found.smi) if found.smi is not None else None
    return {
        "driver": found.devices[0].driver,
        "driver_cuda": ".".join(map(str, level)) if level else None,
        "cards": [{"name": d.name, "arch": d.arch, "memory_bytes": d.memory_bytes} for d in found.devices],
    }


def build_facts(key: str) -> dict[str, Any]:
    """What an installed build was made from; only its key where its record is gone."""
    try:
        build = builds.get_build(key)
    except FlashnextError:
        return {"key": key}
    return {
        "key": build.key,
        "imported": build.imported,
        "series_hash": build.series_hash,
        "without": ", ".join(build.without) or "nothing",
        "pin": f"{build.pin.name} {build.pin.version}",
        "upstream_commit": build.pin.upstream_commit,
        "backend": build.backend,
        "archs": ", ".join(build.archs),
        "compiler": f"{build.compiler.kind} {build.compiler.version}",
        "cuda": build.cuda.version if build.cuda else None,
    }


def model_facts(path: Path) -> dict[str, Any]:
    """Bytes of a model file (all shards) and of its experts, from the headers."""
    total = experts = 0
    for shard in shards(path):
        header = read_header(shard)
        total += header.file_bytes
        experts += sum(t.size_bytes for t in header.tensors if _EXPERTS.search(t.name))
    return {"file": path.name, "size_bytes": total, "expert_bytes": experts}


def shards(path: Path) -> list[Path]:
    match = _SHARD.search(path.name)
    if match is None:
        return [path]
    stem = path.name[: match.start()]
    return [path.with_name(f"{stem}-{n:05}-of-{match[1]}.gguf") for n in range(1, int(match[1]) + 1)]
