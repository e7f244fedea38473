"""Fake programs for a PATH of their own: compilers and tools that say what a test wants them to say."""

from __future__ import annotations

import os
from pathlib import Path

GXX = """#!/bin/sh
echo "g++ (Debian {version}) {version}"
echo "Copyright (C) Free Software Foundation, Inc."
"""
NVCC = """#!/bin/sh
case "$1" in
--version) echo "Cuda compilation tools, release {release}, V{release}.88" ;;
--list-gpu-arch) for a in {archs}; do echo "compute_$a"; done ;;
*) exit 1 ;;
esac
"""
SMI = """#!/bin/sh
case "$1" in
--query-gpu=*) {rows} ;;
*) echo "| NVIDIA-SMI 550.1   Driver Version: 550.1   CUDA Version: {level}   |" ;;
esac
"""
ARCHS = "75 80 86 89 90"


class FakeBin:
    """A folder of fake programs, and a fake CUDA toolkit beside it."""

    def __init__(self, root: Path) -> None:
        self.bin = root / "bin"
        self.cuda = root / "cuda"
        self.bin.mkdir()

    def program(self, name: str, text: str, folder: Path | None = None) -> Path:
        path = (folder or self.bin) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def gxx(self, version: str = "12.2.0", name: str = "g++") -> Path:
        self.program(name.replace("g++", "gcc"), "#!/bin/sh\n")
        return self.program(name, GXX.format(version=version))

    def nvcc(
        self, release: str = "12.4", *, archs: str = ARCHS, root: Path | None = None, cublas: bool = True
    ) -> Path:
        """A toolkit: its compiler, its header with the newest gcc, and cuBLAS."""
        root = root or self.cuda
        (root / "include").mkdir(parents=True, exist_ok=True)
        (root / "lib64").mkdir(exist_ok=True)
        if cublas:
            (root / "include" / "cublas_v2.h").touch()
            (root / "lib64" / "libcublas.so").touch()
        return self.program("nvcc", NVCC.format(release=release, archs=archs), root / "bin")

    def newest_gcc(self, major: int) -> None:
        (self.cuda / "include" / "crt").mkdir(parents=True, exist_ok=True)
        (self.cuda / "include" / "crt" / "host_config.h").write_text(
            f"#if __GNUC__ > {major}\n#error\n#endif\n"
        )

    def smi(self, *rows: str, level: str = "12.4") -> Path:
        echo = "; ".join(f'echo "{row}"' for row in rows) or ":"
        return self.program("nvidia-smi", SMI.format(rows=echo, level=level))

    def path(self, *more: Path) -> str:
        """A PATH with the fakes, ``more``, and a shell's own programs but no compiler of the machine."""
        return os.pathsep.join(str(p) for p in (self.bin, *more))
