"""Facts about CUDA devices, from the driver's own nvidia-smi. No judgement."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from flashnext.proc import environment, run

_FIELDS = "index,uuid,name,compute_cap,memory.total,driver_version"
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class CudaDevice:
    """One device. ``compute_capability`` is (8, 6) for an RTX 3090, None where the driver does not say."""

    index: int
    uuid: str
    name: str
    compute_capability: tuple[int, int] | None
    memory_bytes: int
    driver: str

    @property
    def arch(self) -> str | None:
        """``86`` for compute capability 8.6."""
        if self.compute_capability is None:
            return None
        return f"{self.compute_capability[0]}{self.compute_capability[1]}"


@dataclass(frozen=True)
class GpuFacts:
    """Devices that this process may use, and why there are none where there are none."""

    devices: tuple[CudaDevice, ...]
    smi: Path | None
    failure: str | None = None


def probe_gpus() -> GpuFacts:
    """Ask nvidia-smi for the devices and keep those that CUDA_VISIBLE_DEVICES allows."""
    found = shutil.which("nvidia-smi")
    if found is None:
        return GpuFacts((), None, "nvidia-smi is not on PATH")
    smi = Path(found)
    done = run(
        [smi, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"],
        env=environment(),
        timeout_s=_TIMEOUT_S,
    )
    if not done.ok:
        lines = (done.err + done.out).strip().splitlines()
        return GpuFacts((), smi, f"{smi} failed with code {done.code}: {lines[0] if lines else 'no output'}")
    devices = [device for line in done.out.splitlines() if (device := _device(line)) is not None]
    visible = _visible(devices, os.environ.get("CUDA_VISIBLE_DEVICES"))
    failure = None
    if not visible:
        failure = "CUDA_VISIBLE_DEVICES hides every device" if devices else f"{smi} lists no device"
    return GpuFacts(tuple(visible), smi, failure)


def driver_cuda_level(smi: Path) -> tuple[int, int] | None:
    """The highest CUDA version that the installed driver supports, from nvidia-smi's head."""
    done = run([smi], env=environment(), timeout_s=_TIMEOUT_S)
    match = re.search(r"CUDA(?: UMD)? Version\s*:\s*(\d+)\.(\d+)", done.out)
    return (int(match[1]), int(match[2])) if done.ok and match else None


def _device(line: str) -> CudaDevice | None:
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(_FIELDS.split(",")) or not cells[0].isdigit():
        return None
    index, uuid, name, capability, memory_mib, driver = cells
    match = re.fullmatch(r"(\d+)\.(\d+)", capability)
    return CudaDevice(
        index=int(index),
        uuid=uuid,
        name=name,
        compute_capability=(int(match[1]), int(match[2])) if match else None,
        memory_bytes=int(memory_mib) * 1024 * 1024 if memory_mib.isdigit() else 0,
        driver=driver,
    )


def _visible(devices: list[CudaDevice], wanted: str | None) -> list[CudaDevice]:
    """CUDA's rule: take entries in order and stop at the first that names no device."""
    if wanted is None:
        return devices
    kept: list[CudaDevice] = []
    for entry in (part.strip() for part in wanted.split(",")):
        hits = [d for d in devices if entry and (entry == str(d.index) or d.uuid.startswith(entry))]
        if len(hits) != 1:
            break
        kept.append(hits[0])
    return kept
