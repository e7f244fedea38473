"""The model files of a profile: found, made where they are synthetic, inspected before any launch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashnext import paths
from flashnext.builds import file_sha256
from flashnext.errors import (
    ContextTooLongError,
    FlashnextError,
    ModelFilesError,
    ModelProblemsError,
    PlacementError,
)
from flashnext.model.inspect import inspect_model
from flashnext.profile.load import Loaded
from flashnext.profile.schema import ModelFile
from flashnext.serve import memory


@dataclass(frozen=True)
class Weights:
    """Paths for the command line. ``head`` is None without a draft head, or with an embedded one."""

    model: Path
    head: Path | None


Progress = Callable[[int | None, int], None]
"""Called with (total bytes or None, bytes written since the last call) while a model is made."""


def locate(loaded: Loaded, *, model: Path | None = None, head: Path | None = None) -> Weights:
    """Where the files are or will be; ``model`` and ``head`` replace the profile's own paths."""
    profile = loaded.profile
    folder = paths.models_dir()
    if profile.model.synthetic is not None and model is None:
        name = f"flashnext-{profile.model.synthetic}"
        made_head = folder / f"mtp-{name}-shared-Q8_0.gguf" if profile.mtp and profile.mtp.synthetic else None
        return Weights(folder / f"{name}.gguf", head or made_head)
    own = folder / Path(profile.model.path).expanduser() if profile.model.path else None
    target = model or own
    assert target is not None
    if head is None and profile.mtp is not None and profile.mtp.head is not None:
        head = folder / Path(profile.mtp.head).expanduser()
        if not head.exists() and (target.parent / head.name).exists():
            head = target.parent / head.name
    return Weights(target, head)


def make_if_absent(loaded: Loaded, weights: Weights, report: Progress) -> bool:
    """Write the synthetic model where it is missing or damaged. Returns whether something was written."""
    kind = loaded.profile.model.synthetic
    wanted = [p for p in (weights.model, weights.head) if p is not None]
    if kind is None or (all(p.exists() for p in wanted) and not _ours_is_damaged(loaded, weights)):
        return False
    from flashnext.model.synth import SynthRequest, synthesise

    request = SynthRequest(kind=kind, out=paths.models_dir(), mtp="shared" if weights.head else None)
    paths.models_dir().mkdir(parents=True, exist_ok=True)
    synthesise(request, lambda total: report(total, 0), lambda count: report(None, count))
    return True


def _ours_is_damaged(loaded: Loaded, weights: Weights) -> bool:
    """Whether files at the places of the synthetic model cannot be loaded. Others are never written over."""
    return weights == locate(loaded) and not inspect_model(weights.model, weights.head).ok


def problems(loaded: Loaded, weights: Weights, *, hashes: bool = False) -> Iterator[FlashnextError]:
    """What is wrong with the files: missing, of another identity, or such that llama-server would abort.

    ``hashes`` also reads every file that the profile names and compares its sha256: minutes for a real one.
    """
    profile = loaded.profile
    lines = list(_identity(weights.model.parent, profile.model.files, hashes=hashes))
    if profile.mtp is not None:
        folder = (weights.head or weights.model).parent
        lines += _identity(folder, profile.mtp.files, hashes=hashes)
    if lines:
        yield ModelFilesError("the model files are not those of the profile", context=lines)
        if not weights.model.exists():
            return
    found = inspect_model(weights.model, weights.head)
    try:
        found.raise_for_problems()
    except ModelProblemsError as error:
        yield error
        return
    if profile.mtp is not None and found.head.form == "none":
        place = loaded.place(("mtp",))
        yield ModelFilesError(
            "the profile drafts with MTP, and there is no head", context=[f"{place}: mtp.head"]
        )
    trained = found.hyper.get("context_length")
    if isinstance(trained, int) and profile.context.size > trained:
        place = loaded.place(("context", "size"))
        text = f"{place}: {profile.context.size} tokens, the model has {trained}: upstream cuts it silently"
        yield ContextTooLongError("the context is longer than the model's", context=[text])
    yield from _placement(loaded, [tensor.name for tensor in found.tensors])
    yield from memory.problems(loaded, found.tensors)


def _placement(loaded: Loaded, names: Sequence[str]) -> Iterator[FlashnextError]:
    """Every rule must match a tensor, and the experts of every layer a rule: llama-server says neither."""
    rules = loaded.profile.placement
    lines = []
    for index, rule in enumerate(rules):
        if not any(re.search(rule.tensors, name) for name in names):
            near = difflib.get_close_matches(_plain(rule.tensors), names, n=2, cutoff=0.3)
            place = loaded.place(("placement", index, "tensors"))
            guess = f"; the model has {', '.join(near)}" if near else ""
            lines.append(f"{place}: {rule.tensors} matches no tensor of the model{guess}")
    if rules or loaded.profile.expert_cache is not None:
        bare = [n for n in names if "_exps." in n and not any(re.search(r.tensors, n) for r in rules)]
        if bare:
            place = loaded.place(("placement",))
            lines.append(f"{place}: {len(bare)} expert tensors are covered by no rule, e.g. {bare[0]}")
    if lines:
        yield PlacementError("the placement rules do not fit the model", context=lines)


def _plain(pattern: str) -> str:
    """A regular expression as the text it most likely stands for, to look for near names."""
    return re.sub(r"\\d\+?", "0", re.sub(r"\(([^|)]*)[^)]*\)", r"\1", pattern)).replace("\\", "")


def _identity(folder: Path, files: Sequence[ModelFile], *, hashes: bool) -> Iterator[str]:
    """Missing files, files of another size and, with ``hashes``, of another content."""
    for file in files:
        path = folder / file.name
        parts = (
            [p.name for p in folder.glob(f"{file.name}*") if p.name != file.name] if folder.is_dir() else []
        )
        if path.is_file():
            found = path.stat().st_size
            if found != file.size_bytes:
                yield f"{path}: {found:,} bytes, the profile's file has {file.size_bytes:,}"
            elif hashes and (digest := file_sha256(path)) != file.sha256:
                yield f"{path}: sha256 {digest}, the profile's file has {file.sha256}"
        elif parts:
            yield f"{path}: only a partial download is there ({', '.join(sorted(parts))})"
        else:
            yield f"{path}: no such file"
