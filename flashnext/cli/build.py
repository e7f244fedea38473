"""`flashnext build`: fetch, patch and compile; list, remove, verify and prune what is there."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashnext import console
from flashnext.errors import BuildOptionsError

if TYPE_CHECKING:
    from flashnext.build.pipeline import Plan, Request
    from flashnext.builds import Build

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def build(
    backend: Annotated[
        str, typer.Option(help="auto, cpu or cuda; auto takes cuda only where a device is visible.")
    ] = "auto",
    cuda_arch: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="CUDA architectures, e.g. 86 or 86,89. Default: those seen, else 86."
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Compilers at once. Default: by cores and memory.")
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(metavar="FEATURE", help="Leave a feature out; may be repeated.")
    ] = None,
    vanilla: Annotated[bool, typer.Option("--vanilla", help="The pinned tree without any feature.")] = False,
    sdist: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take the pinned sdist from a file; nothing is fetched."),
    ] = None,
    tests: Annotated[bool, typer.Option("--tests", help="Also compile the features' C++ tests.")] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Say what would be built, with what, and stop.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    import_: Annotated[
        Path | None,
        typer.Option("--import", metavar="FOLDER", help="Install binaries that were compiled elsewhere."),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List installed builds, the newest first.")] = False,
    remove: Annotated[str | None, typer.Option(metavar="KEY", help="Remove an installed build.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check installed builds, or that of KEY, byte by byte.")
    ] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove work folders of other configurations than the last.")
    ] = False,
    key: Annotated[str | None, typer.Argument(help="Which build --verify checks. Default: all.")] = None,
) -> None:
    """Fetch, patch and compile the pinned llama.cpp, and install it. An unchanged build does nothing."""
    from flashnext.build import pipeline, toolchain

    if sum((list_, remove is not None, verify, plan, prune, import_ is not None)) > 1:
        raise BuildOptionsError("--plan, --import, --list, --remove, --verify and --prune exclude each other")
    if key is not None and not verify:
        raise BuildOptionsError(f"a KEY ({key}) goes with --verify or --remove")
    if import_ is not None:
        _import(import_, vanilla=vanilla, as_json=as_json)
    elif list_:
        _list(as_json)
    elif remove is not None:
        _remove(remove, as_json)
    elif verify:
        _verify(key, as_json)
    elif prune:
        _prune(as_json)
    else:
        request = pipeline.Request(
            backend=backend,
            archs=toolchain.parse_archs(cuda_arch) if cuda_arch is not None else (),
            without=tuple(sorted(set(without or ()))),
            vanilla=vanilla,
            tests=tests,
            jobs=jobs,
            sdist=sdist,
        )
        _plan(request, as_json) if plan else _build(request, as_json)


def _build(request: Request, as_json: bool) -> None:
    from flashnext.build import pipeline

    # As for Ctrl-C: unwind, so that the compilers end and nothing half-written stays.
    signal.signal(signal.SIGTERM, lambda number, frame: _terminated())
    result = pipeline.build(request)
    made = result.build
    if as_json:
        console.print_json(
            {
                **_row(made),
                "compiled": result.compiled,
                "elapsed_s": round(result.elapsed_s, 3),
                "work": str(result.plan.work.root),
                "log": str(result.log) if result.log else None,
            }
        )
        return
    if result.log is None:
        console.say(f"nothing to do: build {made.key} is installed")
    else:
        console.say(f"build {made.key} installed after {result.elapsed_s:.0f} s, log {result.log}")
    console.print_data(str(made.bin))


def _import(folder: Path, *, vanilla: bool, as_json: bool) -> None:
    from flashnext.build import importing

    made = importing.import_folder(folder, vanilla=vanilla)
    if as_json:
        console.print_json(_row(made))
        return
    console.say(
        f"build {made.key} imported: backend {made.backend}, series {made.series_hash[:12]}, "
        f"features {', '.join(made.features) or 'none'}"
    )
    console.print_data(str(made.bin))


def _terminated() -> None:
    raise SystemExit(128 + signal.SIGTERM)


def _plan(request: Request, as_json: bool) -> None:
    from flashnext.build import pipeline, toolchain

    plan = pipeline.make_plan(request)
    tools = toolchain.check_toolchain(plan.toolchain, work=plan.work.root)
    value = _plan_value(plan, tools)
    if as_json:
        console.print_json(value)
        return
    for name, entry in value.items():
        if isinstance(entry, dict):
            console.print_data(f"{name}:")
            for key, item in entry.items():
                console.print_data(f"  {key} = {item}")
        else:
            text = ", ".join(str(item) for item in entry) if isinstance(entry, list) else entry
            console.print_data(f"{name}: {text}")


def _plan_value(plan: Plan, tools: Any) -> dict[str, Any]:
    from flashnext.probe.toolchain import version_text

    gpus = plan.toolchain.gpus
    programs = {"cmake": tools.cmake, "ninja": tools.ninja, "ccache": tools.ccache, "nvcc": tools.nvcc}
    return {
        "key": plan.key,
        "installed": plan.done is not None,
        "pin": f"{plan.pin.name} {plan.pin.version} (llama.cpp {plan.pin.upstream_commit})",
        "series_hash": plan.series_hash,
        "features": [feature.id for feature in plan.features],
        "backend": plan.toolchain.backend,
        "archs": list(plan.toolchain.archs),
        "devices": [device.name for device in gpus.devices] if gpus else [],
        "jobs": plan.jobs,
        "work": str(plan.work.root),
        "tools": {
            "c++": f"{tools.host.cxx} ({tools.host.text})",
            **{n: f"{t.path} {version_text(t.version or ())}" for n, t in programs.items() if t is not None},
        },
        "flags": plan.flags,
        "warnings": list(tools.warnings),
    }


def _row(build: Build) -> dict[str, Any]:
    return {**build.model_dump(mode="json"), "folder": str(build.folder), "bin": str(build.bin)}


def _list(as_json: bool) -> None:
    from flashnext import builds

    found = builds.list_builds()
    if as_json:
        console.print_json([_row(build) for build in found])
        return
    for build in found:
        size = sum(binary.size_bytes for binary in build.binaries.values())
        series = build.series_hash[:12]
        left_out = f" without {','.join(build.without)}" if build.without else ""
        archs = f" {','.join(build.archs)}" if build.archs else ""
        console.print_data(
            f"{build.key}  {build.created:%Y-%m-%d %H:%M}  {build.backend}{archs}  "
            f"series {series}{left_out}  {size / 2**20:.0f} MiB{'  imported' if build.imported else ''}"
        )
    if not found:
        console.say("no build is installed")


def _remove(key: str, as_json: bool) -> None:
    from flashnext.build import store

    removed = store.remove(key)
    if as_json:
        console.print_json({"removed": removed})
    else:
        console.say(f"removed build {removed}")


def _verify(key: str | None, as_json: bool) -> None:
    from flashnext.build import store

    checked = store.verify([key] if key else [])
    if as_json:
        console.print_json({"verified": [build.key for build in checked]})
    else:
        console.say(
            f"{len(checked)} builds verified" if len(checked) != 1 else f"build {checked[0].key} verified"
        )


def _prune(as_json: bool) -> None:
    from flashnext.build.prune import prune

    done = prune()
    if as_json:
        rows = [{"folder": str(p.folder), "size_bytes": p.size_bytes, "kept": p.kept} for p in done]
        console.print_json(rows)
        return
    for one in done:
        size = f"{one.size_bytes / 2**20:,.0f} MiB"
        console.print_data(f"kept {one.folder}: {one.kept}" if one.kept else f"removed {one.folder} ({size})")
    if not done:
        console.say("nothing to remove: the last configuration's work folder stays, it makes builds quick")
