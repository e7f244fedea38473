"""Files that pass between stages: frozen models, read with a reason when broken, written atomically."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from flashnext.errors import StateNotWritableError


class Artefact(BaseModel):
    """Base of every artefact: frozen, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@contextmanager
def state_written(path: Path) -> Iterator[None]:
    """Around writes of state to ``path``: an OSError inside becomes a StateNotWritableError."""
    try:
        yield
    except OSError as error:
        raise StateNotWritableError(f"cannot write {path}: {error.strerror or error}") from error


def write_atomic(path: Path, text: str) -> None:
    """Write text so that a reader sees the old file or the new one, never a part. Parents are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Artefact | dict[str, Any] | list[Any]) -> None:
    """Write an artefact (or plain JSON data) as indented JSON, atomically."""
    data = value.model_dump(mode="json") if isinstance(value, Artefact) else value
    write_atomic(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")
