"""The pieces of a report, each as text under the name it has in the archive."""

from __future__ import annotations

import io
import json
import platform
import sys
import tarfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from flashnext import __version__, builds, paths, services
from flashnext.doctor.facts import gather
from flashnext.doctor.judge import judge
from flashnext.errors import FlashnextError, ReportWriteError
from flashnext.profile import fit
from flashnext.profile.load import Loaded
from flashnext.report.redact import Redactor, for_this_machine

LOG_LINES = 400
_READ_BYTES = 512 * 1024


def pieces(loaded: Loaded, model: Path | None, head: Path | None) -> dict[str, str]:
    """Name to redacted text. A piece that cannot be made says why, instead of being absent."""
    past = services.every()
    redactor = for_this_machine(_keys(loaded, past))
    found: dict[str, str] = {}
    for name, make in (
        ("versions.json", lambda: _versions()),
        ("builds.json", lambda: [b.model_dump(mode="json") for b in builds.list_builds()]),
        ("profile.json", lambda: _profile(loaded)),
        ("plan.json", lambda: _plan(loaded, model, head)),
        ("doctor.json", lambda: [f.model_dump(mode="json") for f in judge(gather(loaded, model, head))]),
    ):
        try:
            value: Any = make()
        except (FlashnextError, OSError) as error:
            value = {"not made": type(error).__name__, "reason": str(error)}
        found[name] = redactor.text(json.dumps(value, indent=2, default=str))
    for service in past:
        found[f"services/{service.port}/state.json"] = _state(service, redactor)
        found[f"services/{service.port}/log.txt"] = "\n".join(redactor.log(_tail(Path(service.log)))) + "\n"
    return found


def write(file: Path, found: dict[str, str]) -> Path:
    """One .tar.gz with plain owners and times. Raises ReportWriteError."""
    now = int(time.time())
    try:
        with tarfile.open(file, "x:gz") as archive:
            for name, text in found.items():
                raw = text.encode()
                entry = tarfile.TarInfo(f"flashnext-report/{name}")
                entry.size, entry.mtime, entry.mode = len(raw), now, 0o644
                archive.addfile(entry, io.BytesIO(raw))
    except OSError as error:
        raise ReportWriteError(f"cannot write {file}: {error.strerror or error}") from None
    return file


def _versions() -> dict[str, Any]:
    return {
        "flashnext": __version__,
        "python": sys.version,
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "pin": paths.pin_file().read_text(encoding="utf-8"),
        "series": (paths.patches_dir() / "series").read_text(encoding="utf-8").splitlines(),
    }


def _profile(loaded: Loaded) -> dict[str, Any]:
    data = loaded.profile.model_dump(mode="json", exclude_none=True)
    return {"file": loaded.file.name, "deviations": [d.text() for d in loaded.deviations], "profile": data}


def _plan(loaded: Loaded, model: Path | None, head: Path | None) -> dict[str, Any]:
    if model is None or not model.is_file():
        return {"not made": "the model file is not there"}
    verdict = fit.judge(loaded, model, head)
    return {
        "plan": verdict.plan.model_dump(mode="json"),
        "refusals": verdict.refusals,
        "warnings": verdict.warnings,
        "change": verdict.change,
    }


def _state(service: services.Service, redactor: Redactor) -> str:
    data = service.model_dump(mode="json")
    data["last_lines"] = redactor.log(service.last_lines)
    data["reason"] = _reason(service.reason)
    for entry in data["transitions"]:
        entry["reason"] = _reason(entry["reason"])
    return redactor.text(json.dumps(data, indent=2))


def _reason(text: str) -> str:
    """Reasons are ours, but one may quote what the model said."""
    return text.split("'", 1)[0].split('"', 1)[0].rstrip()


def _keys(loaded: Loaded, past: list[services.Service]) -> Iterator[str]:
    """Every API key in the files that profile and services name, so that no line can show one."""
    names = [loaded.profile.server.api_key_file]
    for service in past:
        words = list(service.argv)
        names += [b for a, b in pairwise(words) if a == "--api-key-file"]
    for name in names:
        if name is None:
            continue
        try:
            lines = Path(name).expanduser().read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        yield from (line.strip() for line in lines if line.strip())


def _tail(log: Path) -> list[str]:
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - _READ_BYTES))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return []
    return text.splitlines()[-LOG_LINES:]
