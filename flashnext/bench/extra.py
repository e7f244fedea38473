"""Packages of the extra ``bench``, imported when they are used; without them the error names the extra."""

from __future__ import annotations

import importlib
from typing import Any

from flashnext.errors import BenchExtraMissingError


def need(module: str, purpose: str) -> Any:
    """Import ``module`` of the extra, or say what it was wanted for and how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise BenchExtraMissingError(
            f"{purpose} needs the package {package}, which is not installed", context=[str(error)]
        ) from error
