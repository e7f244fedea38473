"""Packages of the extra ``bench``, imported where they are used; without them the error names the extra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flashnext.errors import BenchExtraMissingError


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
