"""`flashnext plan`: what a profile takes on each device and in host memory, before anything is launched."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashnext.console import print_data, print_json, say

if TYPE_CHECKING:
    from flashnext.model.memory import DevicePlan, HostPlan
    from flashnext.profile.fit import Verdict
    from flashnext.profile.load import Loaded

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_BAR = 60
_DEVICE_ROWS = (
    ("weights", "w", "weights"),
    ("kv", "k", "KV cache"),
    ("indexer", "i", "indexer cache"),
    ("recurrent", "r", "recurrent state"),
    ("head", "h", "draft head"),
    ("overhead", "o", "CUDA overhead"),
    ("slots", "s", "expert slots"),
    ("workspace", "x", "workspace"),
    ("staging", "t", "staged experts"),
    ("workspace_prefill", "", "workspace, prefill"),
)
_HOST_ROWS = (
    ("pinned", "p", "pinned experts"),
    ("weights", "w", "other weights"),
    ("workspace", "x", "workspace"),
    ("prompt_cache", "c", "prompt cache"),
    ("overhead", "o", "process overhead"),
    ("devices", "v", "virtual GPUs"),
    ("mapped", "", "mapped table (evictable)"),
)


@app.command()
def plan(
    profile: Annotated[
        str, typer.Option(metavar="NAME", help="A shipped profile, or a .yaml file.")
    ] = "demo",
    model: Annotated[Path | None, typer.Option(help="Model file, instead of the profile's path.")] = None,
    head: Annotated[Path | None, typer.Option(help="Draft head, instead of the profile's path.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Print the memory plan of a profile. Launches nothing; exit code 4 where it does not fit."""
    from flashnext.errors import MemoryUnfitError
    from flashnext.profile.fit import judge
    from flashnext.profile.load import load
    from flashnext.serve import weights

    loaded = load(profile)
    files = weights.locate(loaded, model=model, head=head)
    if loaded.profile.model.synthetic is not None and model is None and not files.model.exists():
        say(f"writing the synthetic model {files.model.name}")
        weights.make_if_absent(loaded, files, lambda _total, _more: None)
    verdict = judge(loaded, files.model, files.head, features=_features(loaded))
    if as_json:
        print_json(as_data(verdict))
        raise typer.Exit(MemoryUnfitError.exit_code if verdict.refusals else 0)
    print_data("\n".join(table(verdict)))
    for text in verdict.warnings:
        say(f"warning: {text}")
    if verdict.refusals:
        hint = verdict.change or MemoryUnfitError.hint
        raise MemoryUnfitError(
            f"{loaded.profile.name} does not fit this machine", context=list(verdict.refusals), hint=hint
        )
    say(f"{loaded.profile.name} fits")


def _features(loaded: Loaded) -> list[str] | None:
    """Those of the build that would serve; None where there is none yet."""
    from flashnext.cli.serve import package_series
    from flashnext.errors import NoBuildError
    from flashnext.serve import binary

    try:
        return list(binary.choose(loaded, package_series()).features)
    except NoBuildError:
        return None


def as_data(verdict: Verdict) -> dict[str, Any]:
    """The machine form; bytes throughout."""
    from dataclasses import asdict

    data = verdict.plan.model_dump(mode="json")
    for entry, device in zip(data["devices"], verdict.plan.devices, strict=True):
        entry |= {"decode": device.decode, "prefill": device.prefill, "need": device.need}
    data["host"]["need"] = verdict.plan.host.need
    data["rooms"] = [asdict(room) for room in verdict.rooms]
    data["limits"] = asdict(verdict.limits)
    data["fits"] = not verdict.refusals
    return data | {
        "refusals": list(verdict.refusals),
        "warnings": list(verdict.warnings),
        "change": verdict.change,
    }


def table(verdict: Verdict) -> list[str]:
    """Rows in MiB, one column per device and one bar each; then the host."""
    found = verdict.plan
    names = [_name(verdict, index) for index in range(len(found.devices))]
    width = max(12, *(len(name) + 2 for name in names))
    lines = [
        f"context {found.context:,}, micro-batch {found.micro_batch}/{found.prefill_micro_batch}, in MiB"
    ]
    lines.append(f"{'':<26}" + "".join(f"{name:>{width}}" for name in names))
    lines.append(f"{'layers':<26}" + "".join(f"{d.layers:>{width},}" for d in found.devices))
    for field, _, label in _DEVICE_ROWS:
        cells = [getattr(device, field) for device in found.devices]
        if any(cells):
            lines.append(f"{label:<26}" + "".join(f"{_mib(cell):>{width},}" for cell in cells))
    for label in ("decode", "prefill"):
        lines.append(
            f"{'= during ' + label:<26}"
            + "".join(f"{_mib(getattr(d, label)):>{width},}" for d in found.devices)
        )
    if verdict.rooms:
        lines.append(f"{'total':<26}" + "".join(f"{_mib(r.total):>{width},}" for r in verdict.rooms))
        lines.append(
            f"{'in use by others':<26}" + "".join(f"{_mib(r.used):>{width},}" for r in verdict.rooms)
        )
    lines += ["", f"{'host':<26}{'':>{width}}"]
    for field, _, label in _HOST_ROWS:
        value = getattr(found.host, field)
        if value:
            lines.append(f"{label:<26}{_mib(value):>{width},}")
    lines.append(f"{'= needed':<26}{_mib(found.host.need):>{width},}")
    lines.append(f"{'available':<26}{_mib(verdict.limits.available_bytes):>{width},}")
    lines.append("")
    for index, device in enumerate(found.devices):
        room = verdict.rooms[index] if index < len(verdict.rooms) else None
        total, used = (room.total, room.used) if room else (device.need, 0)
        lines.append(f"{names[index]:<14} {_bar(device, _DEVICE_ROWS, total, used)}")
    lines.append(f"{'host':<14} {_bar(found.host, _HOST_ROWS, verdict.limits.available_bytes, 0)}")
    keys: dict[str, str] = {"#": "in use by others", "!": "does not fit", "o": "overhead"}
    for _, key, label in (*_DEVICE_ROWS, *_HOST_ROWS):
        keys.setdefault(key, label)
    keys.pop("")
    drawn = "".join(line[15:] for line in lines[-len(found.devices) - 1 :])
    lines.append(", ".join(f"{key} {label}" for key, label in keys.items() if key in drawn))
    return lines


def _name(verdict: Verdict, index: int) -> str:
    return verdict.rooms[index].name.split(" (")[0] if index < len(verdict.rooms) else f"device {index}"


def _bar(value: DevicePlan | HostPlan, rows: tuple[tuple[str, str, str], ...], total: int, used: int) -> str:
    """One letter per share of what there is; `#` is used by others, `!` is what does not fit."""
    scale = max(total, 1) / _BAR
    text = "#" * round(used / scale)
    reached = float(used)
    for field, key, _ in rows:
        reached += getattr(value, field) if key else 0
        text += key * (round(reached / scale) - len(text)) if key else ""
    over = text[_BAR:]
    return f"|{text[:_BAR]:<{_BAR}}|" + ("!" * min(len(over), 12))


def _mib(size: int) -> int:
    return round(size / (1024 * 1024))
