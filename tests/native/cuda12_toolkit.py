"""Puts a CUDA 12.0 toolkit together from wheels: headers, libdevice, ptxas. No nvcc is among them.

python tests/native/cuda12_toolkit.py FOLDER      # 400 MB to download, most of it cuBLAS
FLASHNEXT_CUDA12=FOLDER pytest tests/native/test_cuda12_compile.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

WHEELS = {
    "nvidia-cuda-runtime-cu12": "12.0.146",
    "nvidia-cuda-nvcc-cu12": "12.0.140",
    "nvidia-cublas-cu12": "12.0.2.224",
}


def assemble(folder: Path) -> None:
    """``folder`` looks like a toolkit's afterwards: include, bin/ptxas, nvvm/libdevice."""
    with tempfile.TemporaryDirectory() as download:
        wanted = [f"{name}=={version}" for name, version in WHEELS.items()]
        argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", download, *wanted]
        subprocess.run(argv, check=True)
        for wheel in sorted(Path(download).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    _, _, *rest = PurePosixPath(name).parts[:-1] or ("", "")
                    if name.startswith("nvidia/") and rest and rest[0] in ("include", "bin", "nvvm"):
                        target = folder.joinpath(*PurePosixPath(name).parts[2:])
                        target.parent.mkdir(parents=True, exist_ok=True)
                        target.write_bytes(archive.read(name))
    (folder / "bin/ptxas").chmod(0o755)


if __name__ == "__main__":
    assemble(Path(sys.argv[1]))
