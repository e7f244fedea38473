"""Is there room for the profile? Said before the launch, with the numbers."""

from __future__ import annotations

from flashnext.errors import FlashnextError, MemoryUnfitError, ModelError
from flashnext.profile.fit import check_fits
from flashnext.profile.load import Loaded
from flashnext.serve.weights import Weights


def room(loaded: Loaded, files: Weights) -> tuple[list[FlashnextError], tuple[str, ...]]:
    """(refusals, warnings). Broken or absent files are said elsewhere."""
    if not files.model.is_file() or (files.head is not None and not files.head.is_file()):
        return [], ()
    try:
        return [], check_fits(loaded, files.model, files.head)
    except MemoryUnfitError as error:
        return [error], ()
    except ModelError:
        return [], ()
