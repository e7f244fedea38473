"""CMake: the cache file that makes a configuration repeatable by hand, the features file, and the run."""

from __future__ import annotations

import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from flashnext import __version__, proc
from flashnext.artefacts import write_atomic
from flashnext.build.series import Feature, Program
from flashnext.build.toolchain import Tools
from flashnext.build.workspace import WorkLock, Workspace
from flashnext.builds import digest
from flashnext.errors import ConfigureFailedError

_SHOWN_LINES = 25
TARGET = "flashnext-all"


def build_flags(backend: str, archs: Sequence[str], upstream_commit: str) -> dict[str, str]:
    """The CMake variables that decide what is built; no paths, so they are the same in every folder.

    Everything upstream would guess from the machine or the network is chosen here.
    """
    flags = {
        "CMAKE_BUILD_TYPE": "Release",
        "BUILD_SHARED_LIBS": "ON",
        "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
        "CMAKE_INSTALL_RPATH": "$ORIGIN",
        "GGML_NATIVE": "OFF",
        "GGML_OPENMP": "ON",
        "GGML_RPC": "ON",
        "GGML_RPC_RDMA": "OFF",
        "GGML_CCACHE": "OFF",  # ours is set as the launcher, with its own settings
        "LLAMA_BUILD_COMMIT": upstream_commit,
        "LLAMA_BUILD_NUMBER": "0",
        "LLAMA_BUILD_APP": "OFF",
        "LLAMA_BUILD_EXAMPLES": "OFF",
        "LLAMA_BUILD_SERVER": "ON",
        "LLAMA_BUILD_TESTS": "OFF",
        "LLAMA_BUILD_TOOLS": "ON",
        "LLAMA_BUILD_UI": "OFF",
        "LLAMA_LLGUIDANCE": "OFF",
        "LLAMA_OPENSSL": "OFF",
        "LLAMA_TOOLS_INSTALL": "OFF",
        "LLAMA_USE_PREBUILT_UI": "OFF",  # it would download from a model hub
    }
    if platform.machine().lower() in ("x86_64", "amd64"):
        flags |= dict.fromkeys(("GGML_AVX", "GGML_AVX2", "GGML_BMI2", "GGML_F16C", "GGML_FMA"), "ON")
    if backend == "cuda":
        flags |= {
            "GGML_CUDA": "ON",
            "GGML_CUDA_NCCL": "OFF",  # else it depends on what the machine happens to have
            "CMAKE_CUDA_ARCHITECTURES": ";".join(archs),
        }
    return flags


def tool_settings(tools: Tools) -> dict[str, str]:
    """The CMake variables that name the programs which were checked."""
    settings = {
        "CMAKE_MAKE_PROGRAM": str(tools.ninja.path),
        "CMAKE_C_COMPILER": str(tools.host.cc),
        "CMAKE_CXX_COMPILER": str(tools.host.cxx),
    }
    languages = ["C", "CXX"]
    if tools.nvcc is not None:
        languages.append("CUDA")
        settings["CMAKE_CUDA_COMPILER"] = str(tools.nvcc.path)
        settings["CMAKE_CUDA_HOST_COMPILER"] = str(tools.cuda_host.cxx)
        settings["CUDAToolkit_ROOT"] = str(tools.nvcc.root)
    if tools.ccache is not None:
        settings |= {f"CMAKE_{name}_COMPILER_LAUNCHER": str(tools.ccache.path) for name in languages}
    return settings


def feature_settings(
    work: Workspace, features: Sequence[Feature], series_hash: str, *, vanilla: bool, tests: bool
) -> dict[str, str]:
    """The CMake variables that cmake/flashnext.cmake reads."""
    settings = {"CMAKE_PROJECT_llama.cpp_INCLUDE": str(work.cmake / "flashnext.cmake")}
    if not vanilla:
        settings |= {
            "FLASHNEXT_FEATURES_FILE": str(work.features_file),
            "FLASHNEXT_FEATURES": ",".join(feature.id for feature in features),
            "FLASHNEXT_SERIES_HASH": series_hash,
            "FLASHNEXT_VERSION": __version__,
            "FLASHNEXT_TESTS": "ON" if tests else "OFF",
        }
    return settings


def presets_text(settings: Mapping[str, str]) -> str:
    """A file for ``cmake -C``: one cache entry per setting."""
    lines = ["# Written by `flashnext build`; command.txt beside it repeats the build by hand."]
    for name, value in sorted(settings.items()):
        kind = "BOOL" if value in ("ON", "OFF") else "FILEPATH" if value.startswith("/") else "STRING"
        lines.append(f'set({name} {_quoted(value)} CACHE {kind} "" FORCE)')
    return "\n".join(lines) + "\n"


def features_text(features: Sequence[Feature], patches: Path) -> str:
    """The calls for cmake/flashnext.cmake, in the order of the series; absolute paths below ``patches``."""
    lines = ["# Written by `flashnext build` from patches/*/feature.toml."]
    for feature in features:
        folder = patches / feature.id
        lines.append(f"fn_feature({feature.id} {_quoted(str(folder))})")
        if feature.hooks_patch:
            lines.append(f"fn_feature_hooks({feature.id})")
        for source in feature.sources:
            files = _files(folder, source.files)
            lines.append(f"fn_feature_sources({feature.id} {_quoted(source.target)} {files})")
        for call, programs in (
            ("fn_feature_executable", feature.executables),
            ("fn_feature_test", feature.tests),
        ):
            lines += [_program(call, feature.id, folder, program) for program in programs]
    return "\n".join(lines) + "\n"


def _program(call: str, feature_id: str, folder: Path, program: Program) -> str:
    link = " LINK " + " ".join(_quoted(name) for name in program.link) if program.link else ""
    return f"{call}({feature_id} {_quoted(program.name)} FILES {_files(folder, program.files)}{link})"


def _files(folder: Path, names: Sequence[str]) -> str:
    return " ".join(_quoted(str(folder / name)) for name in names)


def _quoted(text: str) -> str:
    return '"' + re.sub(r'([\\"$])', r"\\\1", text) + '"'


def tool_environment(work: Workspace) -> dict[str, str]:
    """What the tools see: an allowlist, ccache's sharing between folders, no foreign git repository."""
    root = str(work.root.resolve())
    return proc.environment(
        {
            "CCACHE_BASEDIR": root,
            "CCACHE_NOHASHDIR": "1",
            "GIT_CEILING_DIRECTORIES": root,
            "NINJA_STATUS": "[%f/%t] ",
            "LC_ALL": "C",
        },
        also=proc.ALLOWED_BUILD,
    )


def configure(work: Workspace, lock: WorkLock, tools: Tools, settings: Mapping[str, str]) -> bool:
    """Configure where the settings, the features or CMake moved since the last success; says whether it ran.

    Raises ConfigureFailedError with CMake's own words.
    """
    text = presets_text(settings)
    features = work.features_file.read_text() if work.features_file.exists() else ""
    stamp = digest([text, features, str(tools.cmake.path), tools.cmake.version])
    if work.configured.exists() and work.configured.read_text() == stamp and work.ninja_file.exists():
        return False
    # Without its stamp a cache is of a run that failed or was killed: start from none, objects stay.
    fresh = ["--fresh"] if work.cache_file.exists() and not work.configured.exists() else []
    work.configured.unlink(missing_ok=True)
    write_atomic(work.presets, text)
    argv = [
        str(tools.cmake.path),
        "-S", str(work.tree),
        "-B", str(work.build),
        "-G", "Ninja",
        "-C", str(work.presets),
    ]  # fmt: skip
    env = tool_environment(work)
    _write_command(work, tools, argv, env)
    log = work.log / "configure.log"
    code = _run([*argv, *fresh], work, lock, env, log)
    if code != 0:
        words = _cmake_errors(log.read_text(errors="replace"))
        raise ConfigureFailedError(f"CMake failed with code {code}", context=[f"log {log}", *words])
    write_atomic(work.configured, stamp)
    return True


def _run(argv: Sequence[str], work: Workspace, lock: WorkLock, env: Mapping[str, str], log: Path) -> int:
    """As a child that dies with us and holds the lock: a killed run's CMake never meets the next one's."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as stream:
        child = proc.start(argv, env=env, cwd=work.root, stdout=stream, pass_fds=(lock.handle,))
        try:
            lock.note_session(child.pid)
            return child.wait()
        finally:
            proc.stop(child)


def _cmake_errors(output: str) -> list[str]:
    """The blocks that begin with ``CMake Error``, else the last lines."""
    lines = output.strip().splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith("CMake Error")), None)
    return lines[first : first + _SHOWN_LINES] if first is not None else lines[-_SHOWN_LINES:]


def _write_command(work: Workspace, tools: Tools, argv: Sequence[str], env: Mapping[str, str]) -> None:
    ninja = [str(tools.ninja.path), "-C", str(work.build), TARGET]
    ours = [f"{name}={shlex.quote(env[name])}" for name in sorted(env) if name.startswith(("CCACHE", "GIT"))]
    lines = [
        "# Repeats this configuration by hand; `flashnext build` takes the result up again.",
        *(f"export {line}" for line in ours),
        shlex.join(argv),
        shlex.join(ninja),
    ]
    write_atomic(work.command, "\n".join(lines) + "\n")
