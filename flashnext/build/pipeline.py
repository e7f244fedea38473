"""From the pinned sdist and the series to an installed build; `flashnext build` is a thin layer over it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flashnext import console, paths
from flashnext.artefacts import write_atomic
from flashnext.build import cmake, manifest, ninja, store
from flashnext.build.pin import Pin, load_pin
from flashnext.build.series import Feature, load_series, select, series_hash
from flashnext.build.toolchain import Toolchain, Tools, check_toolchain, find_toolchain
from flashnext.build.workspace import Workspace, locked, sync
from flashnext.builds import VANILLA_SERIES, Build
from flashnext.errors import BuildOptionsError, ToolchainError
from flashnext.probe.host import probe_host

_OUR_CMAKE_FILES = ("flashnext.cmake", "fn-build-info.h.in")
_UPSTREAM_PROGRAMS = ("llama-server", "ggml-rpc-server", "llama-bench")


@dataclass(frozen=True)
class Request:
    """What to build. ``jobs`` None means: as many as cores and memory allow."""

    backend: str = "auto"
    archs: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    vanilla: bool = False
    tests: bool = False
    jobs: int | None = None
    sdist: Path | None = None


@dataclass(frozen=True)
class Plan:
    """A request with everything that decides its result: known before anything is fetched or compiled."""

    request: Request
    pin: Pin
    features: tuple[Feature, ...]
    series_hash: str
    toolchain: Toolchain
    flags: dict[str, str]
    key: str
    work: Workspace
    jobs: int

    @property
    def done(self) -> Build | None:
        """The installed build of this plan, where it is there already (and its tests, when asked for)."""
        build = store.installed(self.key)
        if build is not None and self.request.tests:
            tested = self.work.tested
            if not tested.exists() or tested.read_text() != self.key:
                return None
        return build


@dataclass(frozen=True)
class Result:
    """An installed build, and what it took. ``log`` is None when there was nothing to do."""

    build: Build
    plan: Plan
    compiled: bool
    log: Path | None
    elapsed_s: float


def make_plan(request: Request) -> Plan:
    """Resolve a request. Raises errors of pin, sdist, series and options; collects toolchain problems."""
    if request.vanilla and (request.without or request.tests):
        raise BuildOptionsError(
            "--vanilla is the tree without any feature", hint="drop --without and --tests"
        )
    pin = load_pin()
    if request.sdist is not None:  # also where nothing is left to be read from it
        from flashnext.build import fetch

        fetch.check_sdist(request.sdist, pin)
    features: list[Feature] = []
    if not request.vanilla:
        features = select(load_series(paths.patches_dir()), without=request.without)
    series = VANILLA_SERIES if request.vanilla else series_hash(features, paths.cmake_include())
    found = find_toolchain(request.backend, request.archs)
    flags = cmake.build_flags(found.backend, found.archs, pin.upstream_commit)
    variant = "vanilla" if request.vanilla else "without:" + ",".join(sorted(request.without))
    if not request.vanilla and not request.tests:
        # a folder of its own: the binaries of the tests, with their fault switches, stay what they are
        variant += " product"
    return Plan(
        request=request,
        pin=pin,
        features=tuple(features),
        series_hash=series,
        toolchain=found,
        flags=flags,
        key=manifest.build_key(pin, found, flags, series, _our_cmake_files(), tests=request.tests),
        work=Workspace(paths.work_dir() / manifest.configuration_key(pin, found, flags, variant)),
        jobs=ninja.jobs_for(probe_host(), found.backend, request.jobs),
    )


def _our_cmake_files() -> dict[str, Path]:
    folder = paths.cmake_include().parent
    return {name: folder / name for name in _OUR_CMAKE_FILES}


def build(request: Request) -> Result:
    """Build what is asked for and install it; nothing happens when it is installed already.

    Raises FlashnextError subclasses of every stage; the builds that were installed before stay usable.
    """
    begin = time.monotonic()
    plan = make_plan(request)
    if not plan.toolchain.problems and (done := plan.done) is not None:
        return Result(done, plan, False, None, time.monotonic() - begin)
    tools = check_toolchain(plan.toolchain, work=plan.work.root)
    for warning in tools.warnings:
        console.say(f"warning: {warning}")
    _tell(plan, tools)
    with locked(plan.work) as lock:
        plan = _settled_sources(request, plan.work)
        if (done := plan.done) is not None:
            return Result(done, plan, False, None, time.monotonic() - begin)
        settings = {
            **plan.flags,
            **cmake.tool_settings(tools),
            **cmake.feature_settings(
                plan.work, plan.features, plan.series_hash, vanilla=request.vanilla, tests=request.tests
            ),
        }
        if cmake.configure(plan.work, lock, tools, settings):
            console.say(f"configured in {plan.work.build}")
        log = plan.work.log / "compile.log"
        plan.work.tested.unlink(missing_ok=True)
        steps = ninja.compile_targets(
            plan.work,
            lock,
            ninja=tools.ninja.path,
            targets=[cmake.TARGET],
            backend=plan.toolchain.backend,
            jobs=plan.jobs,
            env=cmake.tool_environment(plan.work),
            log=log,
        )
        installed = store.installed(plan.key) or _install(plan)
        if request.tests:
            write_atomic(plan.work.tested, plan.key)
    return Result(installed, plan, steps > 0, log, time.monotonic() - begin)


def _tell(plan: Plan, tools: Tools) -> None:
    what = "vanilla" if plan.request.vanilla else f"{len(plan.features)} features"
    archs = f" for {', '.join(plan.toolchain.archs)}" if plan.toolchain.archs else ""
    console.say(
        f"building {plan.pin.name} {plan.pin.version} ({what}), backend {plan.toolchain.backend}{archs}"
    )
    console.say(f"  C++   {tools.host.cxx} ({tools.host.text})")
    if tools.nvcc is not None:
        version = ".".join(str(part) for part in tools.nvcc.version or ())
        console.say(f"  nvcc  {tools.nvcc.path} {version} (found by {tools.nvcc.found_by})")
    console.say(f"  jobs  {plan.jobs}, work folder {plan.work.root}")


def _settled_sources(request: Request, work: Workspace) -> Plan:
    """Bring the sources in and return the plan that they belong to.

    The key must name what is compiled: where somebody edits a feature meanwhile, they are brought in again.
    """
    plan = make_plan(request)
    while plan.done is None:
        if plan.work != work:
            raise ToolchainError(
                "the pin or the compiler changed while the build began", context=[str(work.root)]
            )
        _sources(plan)
        again = make_plan(request)
        if again.key == plan.key:
            break
        plan = again
    return plan


def _sources(plan: Plan) -> None:
    """Fetch, unpack and patch; then make the work folder's sources the same, file by file."""
    from flashnext.build import fetch, stage, tree

    request, work = plan.request, plan.work
    pristine = tree.pristine_tree(plan.pin, lambda: fetch.fetch_sdist(plan.pin, sdist=request.sdist))
    staged = work.root / "staged"
    names = stage.stage_tree(plan.pin, pristine, plan.features, staged)
    sync({name: staged / name for name in names}, work.tree)
    sync(_our_cmake_files(), work.cmake)
    sync(dict(_feature_files(plan.features)), work.patches)
    features = cmake.features_text(plan.features, work.patches)
    if not work.features_file.exists() or work.features_file.read_text() != features:
        write_atomic(work.features_file, features)


def _feature_files(features: tuple[Feature, ...]) -> Iterator[tuple[str, Path]]:
    for feature in features:
        for part in ("src", "tests"):
            for path in sorted((feature.folder / part).rglob("*")):
                if path.is_file():
                    yield f"{feature.id}/{path.relative_to(feature.folder).as_posix()}", path


def _install(plan: Plan) -> Build:
    """Install the shared libraries, upstream's programs that we use, and those of the features."""
    ours = [program.name for feature in plan.features for program in feature.executables]
    names = {*_UPSTREAM_PROGRAMS, *ours}
    files = [p for p in sorted(plan.work.bin.iterdir()) if p.name in names or ".so" in p.suffixes]
    return store.install(
        plan.key,
        files,
        lambda folder: manifest.make_record(
            plan.key,
            plan.pin,
            plan.toolchain,
            plan.flags,
            series_hash=plan.series_hash,
            features=plan.features,
            without=plan.request.without,
            tests=plan.request.tests,
            files=folder,
        ),
    )
