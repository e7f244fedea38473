"""Facts about compilers and build tools: where they are and what they say of themselves. No judgement."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from flashnext.proc import ALLOWED_BUILD, environment, run

Version = tuple[int, ...]

DEFAULT_CUDA_ROOT = Path("/usr/local/cuda")
NO_PROGRAM = "CUDACXX names no program"
_TIMEOUT_S = 30.0


def version_text(version: Sequence[int]) -> str:
    return ".".join(str(part) for part in version)


def parse_version(text: str) -> Version | None:
    """The first dotted number in a text, as a tuple."""
    match = re.search(r"(\d+(?:\.\d+)+|\d+)", text)
    return tuple(int(part) for part in match[1].split(".")) if match else None


def _say(argv: Sequence[str | Path]) -> tuple[int, str]:
    done = run(argv, env=environment({"LC_ALL": "C"}, also=ALLOWED_BUILD), timeout_s=_TIMEOUT_S)
    return done.code, done.out if done.ok else (done.err + done.out)


def _which(name: str) -> Path | None:
    found = shutil.which(name)
    return Path(found) if found else None


# --- C and C++ -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostCompiler:
    """A C++ compiler that answered ``--version``, and the C compiler beside it."""

    cxx: Path
    cc: Path
    kind: str  # gcc, clang or unknown
    version: Version
    text: str

    @property
    def identity(self) -> list[str]:
        """What makes two compilers the same for objects and builds."""
        return [str(self.cxx.resolve()), str(self.cc.resolve()), self.text]


def named_compiler(variable: str) -> str | None:
    """The program that an environment variable such as CXX names, without the arguments behind it."""
    words = os.environ.get(variable, "").split()
    return words[0] if words else None


def probe_host_compiler(names: Sequence[str] = ()) -> tuple[HostCompiler | None, list[str]]:
    """The first of ``names`` (default: CXX, else c++, g++, clang++) that works; and what failed before it."""
    named = named_compiler("CXX")
    tried: list[str] = []
    for name in names or ([named] if named else ["c++", "g++", "clang++"]):
        cxx = _which(name)
        if cxx is None:
            tried.append(f"{name}: not found on PATH")
            continue
        code, out = _say([cxx, "--version"])
        text = out.strip().splitlines()[0] if out.strip() else ""
        if code != 0 or not text:
            tried.append(f"{cxx}: `--version` failed with code {code}")
            continue
        kind = "clang" if "clang" in text else "gcc" if "Free Software Foundation" in out else "unknown"
        # "g++ (Debian 12.2.0-14) 12.2.0": the version stands last; clang's stands after the word
        number = text.split(" version ")[-1] if kind == "clang" else text.split(")")[-1]
        version = parse_version(number) or parse_version(text)
        cc = _c_compiler(cxx)
        if version is None or cc is None:
            tried.append(f"{cxx}: " + ("no C compiler beside it" if version else f"unclear version: {text}"))
            continue
        return HostCompiler(cxx, cc, kind, version, text), tried
    return None, tried


def _c_compiler(cxx: Path) -> Path | None:
    if named := named_compiler("CC"):
        return _which(named)
    beside = cxx.with_name(cxx.name.replace("clang++", "clang").replace("g++", "gcc").replace("c++", "cc"))
    return beside if beside.exists() else _which("cc") or _which("gcc") or _which("clang")


# --- CUDA ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Nvcc:
    """An nvcc that was found. ``failure`` says why it does not work; then the version may be missing."""

    path: Path
    found_by: str  # CUDACXX, PATH or a folder
    version: Version | None
    failure: str | None

    @property
    def root(self) -> Path:
        """The toolkit's folder (Debian's package has a wrapper in /usr/bin: its root is /usr)."""
        resolved = self.path.resolve()
        return resolved.parent.parent if resolved.parent.name == "bin" else self.path.parent.parent

    @cached_property
    def archs(self) -> tuple[str, ...]:
        """Architectures this nvcc compiles for: ``("75", "80", "86", ...)``; empty when it will not say."""
        code, out = _say([self.path, "--list-gpu-arch"])
        return tuple(re.findall(r"compute_(\d+[a-z]?)", out)) if code == 0 else ()

    @cached_property
    def newest_hosts(self) -> dict[str, int]:
        """Highest major version of gcc and clang that this toolkit's own header accepts; may be empty."""
        for folder in self.include_dirs():
            header = folder / "crt" / "host_config.h"
            if header.is_file():
                return _host_limits(header.read_text(errors="replace"))
        return {}

    def include_dirs(self) -> list[Path]:
        roots = self._roots()
        return [p for r in roots for p in (r / "include", *sorted(r.glob("targets/*-linux/include")))]

    def library_dirs(self) -> list[Path]:
        dirs = [
            p for r in self._roots() for p in (r / "lib64", *sorted(r.glob("targets/*-linux/lib")), r / "lib")
        ]
        if Path("/usr") in self._roots():
            dirs += sorted(Path("/usr/lib").glob("*-linux-gnu"))
        return dirs

    def _roots(self) -> list[Path]:
        # Debian and Ubuntu: the compiler in /usr/lib/nvidia-cuda-toolkit, headers and libraries in /usr
        split = self.root.name == "nvidia-cuda-toolkit"
        return [self.root, Path("/usr")] if split else [self.root]


@dataclass(frozen=True)
class Cublas:
    """Where the toolkit's cuBLAS is; None for a part that is missing."""

    header: Path | None
    library: Path | None


def probe_nvcc(default_root: Path | None = None) -> list[Nvcc]:
    """Every nvcc by preference: CUDACXX alone when it is set; else PATH, then the default folder.

    With CUDACXX set to something that is no program the one entry has a failure.
    """
    named = os.environ.get("CUDACXX", "").strip()
    if named:
        path = _which(named)
        if path is None:
            return [Nvcc(Path(named), "CUDACXX", None, NO_PROGRAM)]
        return [_ask_nvcc(path, "CUDACXX")]
    places: list[tuple[Path, str]] = []
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        if folder:
            places.append((Path(folder) / "nvcc", "PATH"))
    root = default_root if default_root is not None else DEFAULT_CUDA_ROOT
    places.append((root / "bin" / "nvcc", str(root)))
    found: list[Nvcc] = []
    for path, how in places:
        if (
            os.access(path, os.X_OK)
            and path.is_file()
            and all(n.path.resolve() != path.resolve() for n in found)
        ):
            found.append(_ask_nvcc(path, how))
    return found


def probe_cublas(nvcc: Nvcc) -> Cublas:
    """cuBLAS of this nvcc's toolkit: the header and the library that a link takes."""
    headers = (folder / "cublas_v2.h" for folder in nvcc.include_dirs())
    libraries = (folder / "libcublas.so" for folder in nvcc.library_dirs())
    return Cublas(
        next((p for p in headers if p.is_file()), None), next((p for p in libraries if p.exists()), None)
    )


def _ask_nvcc(path: Path, how: str) -> Nvcc:
    code, out = _say([path, "--version"])
    match = re.search(r"release (\d+)\.(\d+)(?:, V(\d+)\.(\d+)\.(\d+))?", out)
    if code != 0:
        words = out.strip().splitlines()
        return Nvcc(
            path, how, None, f"`--version` failed with code {code}: {words[0] if words else 'no output'}"
        )
    if match is None:
        return Nvcc(path, how, None, "`--version` names no release")
    full = match.groups()[2:] if match[3] else match.groups()[:2]
    return Nvcc(path, how, tuple(int(part) for part in full), None)


def _host_limits(header: str) -> dict[str, int]:
    limits: dict[str, int] = {}
    gcc = re.search(r"#if __GNUC__ > (\d+)", header)
    clang = re.search(r"#if \(__clang_major__ >= (\d+)\)", header)
    if gcc:
        limits["gcc"] = int(gcc[1])
    if clang:
        limits["clang"] = int(clang[1]) - 1
    return limits


# --- build tools -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tool:
    """A build tool that was found, with its version (None when it does not say)."""

    path: Path
    version: Version | None


def probe_cmake() -> Tool | None:
    """CMake of the Python package; where that has no binary (a distribution's), the one on PATH."""
    packaged = _package_dir("cmake")
    inside = packaged / "data" / "bin" / "cmake" if packaged else None
    return _tool(inside, "cmake")


def probe_ninja() -> Tool | None:
    """Ninja of the Python package (in the environment's scripts), else the one on PATH."""
    packaged = _package_dir("ninja")
    folders = [sysconfig.get_path("scripts"), sysconfig.get_path("scripts", scheme="posix_user")]
    places = [Path(folder) / "ninja" for folder in (*folders, str(Path(sys.executable).parent))]
    if packaged:
        places.insert(0, packaged / "data" / "bin" / "ninja")
    inside = next((p for p in places if p.is_file()), None) if packaged else None
    return _tool(inside, "ninja")


def probe_ccache() -> Tool | None:
    """ccache on PATH; None when there is none or CCACHE_DISABLE is set."""
    if os.environ.get("CCACHE_DISABLE"):
        return None
    path = _which("ccache")
    return Tool(path, parse_version(_say([path, "--version"])[1])) if path else None


def _tool(inside: Path | None, name: str) -> Tool | None:
    path = inside if inside is not None and inside.is_file() else _which(name)
    if path is None:
        return None
    code, out = _say([path, "--version"])
    return Tool(path, parse_version(out) if code == 0 else None)


def _package_dir(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    folders = list(spec.submodule_search_locations or []) if spec else []
    return Path(folders[0]) if folders else None
