"""Packages of the extra ``bench``, imported where they are used; without them the error names the extra."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from flashnext.errors import BenchExtraMissingError

PACKAGES = ("scipy", "matplotlib", "jinja2")


def check_extra() -> None:
    """Whether a run could be reported at all. Raises BenchExtraMissingError; imports nothing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise BenchExtraMissingError(
            f"the report at the end needs {', '.join(missing)}, which is not installed",
            context=["nothing was started"],
        )


@contextmanager
def needed_for(purpose: str) -> Iterator[None]:
    """Around an import of the extra: a missing package is an error that says what it was wanted for."""
    try:
        yield
    except ImportError as error:
        raise BenchExtraMissingError(
            f"{purpose} needs the package {error.name or 'of the extra'}, which is not installed",
            context=[str(error)],
        ) from error
