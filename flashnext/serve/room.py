"""Is there room for the profile? Said before the launch, with the numbers."""

from __future__ import annotations

from flashnext.builds import Build
from flashnext.errors import FlashnextError, MemoryUnfitError, ModelError
from flashnext.profile.fit import check_fits
from flashnext.profile.load import Loaded
from flashnext.serve.weights import Weights


def room(loaded: Loaded, files: Weights, build: Build | None) -> tuple[list[FlashnextError], tuple[str, ...]]:
    """(refusals, warnings). Broken or absent files are said elsewhere, and so is that there is no build."""
    if not files.model.is_file() or (files.head is not None and not files.head.is_file()):
        return [], ()
    try:
        features = build.features if build is not None else None
        return [], check_fits(loaded, files.model, files.head, features=features)
    except MemoryUnfitError as error:
        return [error], ()
    except ModelError:
        return [], ()
