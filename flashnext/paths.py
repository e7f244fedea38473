"""Where things are: XDG folders and the data shipped with the package. Nothing else computes a path."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

_PACKAGE = Path(__file__).resolve().parent


def data_root() -> Path:
    """The folder that holds patches/, cmake/, vendor/, launch/ and bench/: of the checkout or the wheel."""
    packaged = _PACKAGE / "_data"
    return packaged if packaged.is_dir() else _PACKAGE.parent


def patches_dir() -> Path:
    return data_root() / "patches"


def cmake_include() -> Path:
    return data_root() / "cmake" / "flashnext.cmake"


def pin_file() -> Path:
    return data_root() / "vendor" / "pin.toml"


def profiles_dir() -> Path:
    return data_root() / "launch" / "profiles"


def bench_dir() -> Path:
    """Data of the bench: scenarios, gates, the frozen key of the quality screen."""
    return data_root() / "bench"


def cache_dir() -> Path:
    """Re-creatable: downloads, work trees with their objects. ``$XDG_CACHE_HOME/flashnext``."""
    return platformdirs.user_cache_path("flashnext")


def downloads_dir() -> Path:
    return cache_dir() / "downloads"


def work_dir() -> Path:
    """Source trees and object files of builds, one folder per configuration."""
    return cache_dir() / "work"


def share_dir() -> Path:
    """Kept: installed builds and models. ``$XDG_DATA_HOME/flashnext``."""
    return platformdirs.user_data_path("flashnext")


def builds_dir() -> Path:
    return share_dir() / "builds"


def models_dir() -> Path:
    return share_dir() / "models"


def state_dir() -> Path:
    """Logs and the state of runs. ``$XDG_STATE_HOME/flashnext``."""
    return platformdirs.user_state_path("flashnext")


def logs_dir() -> Path:
    return state_dir() / "logs"


def bench_runs_dir() -> Path:
    """Where a bench run without ``--out`` keeps its samples and report."""
    return state_dir() / "bench"


def account_dirs(home: Path) -> list[Path]:
    """Data, cache and state folder of another account's service: systemd sets none of the XDG variables."""
    return [home / part / "flashnext" for part in (".local/share", ".cache", ".local/state")]


def run_dir() -> Path:
    """Locks and sockets of running services; ``$XDG_RUNTIME_DIR/flashnext``, else under the state folder."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "flashnext" if runtime and Path(runtime).is_dir() else state_dir() / "run"
