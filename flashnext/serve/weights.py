"""The model files of a profile: found, made where they are synthetic, inspected before any launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashnext import paths
from flashnext.errors import FlashnextError, ModelFilesError
from flashnext.profile.load import Loaded
from flashnext.profile.schema import ModelFile


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
    """Write the synthetic model where it is missing. Returns whether something was written."""
    kind = loaded.profile.model.synthetic
    wanted = [p for p in (weights.model, weights.head) if p is not None]
    if kind is None or all(p.exists() for p in wanted):
        return False
    from flashnext.model.synth import SynthRequest, synthesise

    request = SynthRequest(kind=kind, out=paths.models_dir(), mtp="shared" if weights.head else None)
    paths.models_dir().mkdir(parents=True, exist_ok=True)
    synthesise(request, lambda total: report(total, 0), lambda count: report(None, count))
    return True


def problems(loaded: Loaded, weights: Weights) -> Iterator[FlashnextError]:
    """What is wrong with the files: missing, of another identity, or such that llama-server would abort."""
    profile = loaded.profile
    lines = list(_identity(weights.model.parent, profile.model.files))
    if weights.head is not None and profile.mtp is not None:
        lines += _identity(weights.head.parent, profile.mtp.files)
    for path, key in ((weights.model, ("model",)), (weights.head, ("mtp",))):
        if path is not None and not path.is_file() and not any(path.name in line for line in lines):
            lines.append(f"{loaded.place(key)}: {path}: no such file")
    if lines:
        yield ModelFilesError("the model files are not those of the profile", context=lines)


def _identity(folder: Path, files: Sequence[ModelFile]) -> Iterator[str]:
    """Missing files and files of another size; hashes are compared by `flashnext model inspect --sha256`."""
    for file in files:
        path = folder / file.name
        parts = (
            [p.name for p in folder.glob(f"{file.name}*") if p.name != file.name] if folder.is_dir() else []
        )
        if path.is_file():
            found = path.stat().st_size
            if found != file.size_bytes:
                yield f"{path}: {found:,} bytes, the profile's file has {file.size_bytes:,}"
        elif parts:
            yield f"{path}: only a partial download is there ({', '.join(sorted(parts))})"
        else:
            yield f"{path}: no such file"
