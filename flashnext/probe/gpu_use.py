"""Facts about how CUDA devices are used and connected, from nvidia-smi. No judgement."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from flashnext.proc import environment, run

_MIB = 1024 * 1024
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Holder:
    """A process with memory on a device."""

    uuid: str
    pid: int
    name: str
    used_bytes: int


@dataclass(frozen=True)
class Link:
    """How one device is connected and limited; None where the driver does not say."""

    index: int
    pcie_gen: int | None
    pcie_gen_max: int | None
    pcie_width: int | None
    pcie_width_max: int | None
    ecc: bool | None
    power_limit_w: float | None
    power_default_w: float | None


def used_bytes() -> dict[int, int]:
    """Memory in use by device index, whoever uses it; empty without a driver."""
    rows = _ask("--query-gpu=index,memory.used")
    return {int(r[0]): int(r[1]) * _MIB for r in rows if len(r) == 2 and all(cell.isdigit() for cell in r)}


def holders() -> list[Holder]:
    rows = _ask("--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
    return [
        Holder(r[0], int(r[1]), ",".join(r[2:-1]).strip(), int(r[-1]) * _MIB if r[-1].isdigit() else 0)
        for r in rows
        if len(r) >= 4 and r[1].isdigit()
    ]


def links() -> list[Link]:
    fields = (
        "index,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max,"
        "ecc.mode.current,power.limit,power.default_limit"
    )
    return [
        Link(
            index=int(r[0]),
            pcie_gen=_int(r[1]),
            pcie_gen_max=_int(r[2]),
            pcie_width=_int(r[3]),
            pcie_width_max=_int(r[4]),
            ecc={"enabled": True, "disabled": False}.get(r[5].lower()),
            power_limit_w=_float(r[6]),
            power_default_w=_float(r[7]),
        )
        for r in _ask(f"--query-gpu={fields}")
        if len(r) == 8 and r[0].isdigit()
    ]


def _ask(query: str) -> list[list[str]]:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return []
    done = run([smi, query, "--format=csv,noheader,nounits"], env=environment(), timeout_s=_TIMEOUT_S)
    return [[cell.strip() for cell in row.split(",")] for row in done.out.splitlines()] if done.ok else []


def _int(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
