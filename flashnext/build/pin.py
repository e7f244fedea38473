"""The pin: which sdist is built, by name, size and hash."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from flashnext import paths
from flashnext.errors import PinInvalidError

_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")]
_Folder = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*$")
]


class Pin(BaseModel):
    """``vendor/pin.toml``: the sdist, and where in it the llama.cpp tree lies."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: _Name
    version: _Name
    filename: _Name
    size_bytes: Annotated[int, Field(gt=0)]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    source_dir: _Folder
    upstream_commit: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{7,40}$")]
    licence: str


def load_pin(path: Path | None = None) -> Pin:
    """Read a pin file (the shipped one by default). Raises PinInvalidError with every problem."""
    path = path or paths.pin_file()
    try:
        return Pin.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        problems = [
            f"{path}: {'.'.join(str(step) for step in item['loc'])}: {item['msg']}" for item in error.errors()
        ]
        raise PinInvalidError("the pin has errors", context=problems) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PinInvalidError("the pin cannot be read", context=[f"{path}: {error}"]) from None
