"""From a profile to a plan: every check before the first process, all refusals at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flashnext import paths, services
from flashnext.artefacts import state_written
from flashnext.builds import Build, get_build
from flashnext.errors import FlashnextError, HostNotQualifiedError
from flashnext.profile import command
from flashnext.profile.load import Loaded
from flashnext.serve import binary, host, keys, weights
from flashnext.serve.plan import Plan
from flashnext.serve.room import room

DRIVER_WAIT_S = 20.0


@dataclass(frozen=True)
class Options:
    """What the command line says beside the profile. ``series`` is the hash of the package's own patches.

    ``build`` is the key of an installed build whose command line is asked for; a service never has one.
    """

    series: str
    port: int | None = None
    model: Path | None = None
    head: Path | None = None
    hashes: bool = False
    build: str | None = None


def prepare(loaded: Loaded, options: Options, report: weights.Progress) -> Plan:
    """Check everything and make the synthetic model. Raises the one refusal, or one that lists them all."""
    port = choose_port(loaded, options)
    files = weights.locate(loaded, model=options.model, head=options.head)
    config_home = empty_config_home(port)
    refusals: list[FlashnextError] = [
        *host.devices(loaded, wait_s=DRIVER_WAIT_S),
        *host.stray_config(),
        *host.leftovers(port),
    ]
    refusals += host.port_taken(loaded.profile.server.host, port)
    if loaded.profile.server.control_port is not None:
        refusals += host.port_taken("127.0.0.1", loaded.profile.server.control_port)
    build = _build(loaded, options, config_home, refusals)
    if loaded.profile.model.synthetic is None or options.model is not None:
        refusals += weights.problems(loaded, files, hashes=options.hashes)
        refusals += room(loaded, files, build)[0]
    _refuse(refusals)
    assert build is not None
    weights.make_if_absent(loaded, files, report)
    plan = draw(loaded, build, files, port)
    env = command.env(loaded.profile, plan.place)
    unfit, tight = room(loaded, files, build)
    _refuse(
        [
            *unfit,
            *weights.problems(loaded, files),
            *binary.unknown_flags(build.bin / binary.SERVER, plan.server_line(("x",)), env),
        ]
    )
    return replace(plan, warnings=(*plan.warnings, *tight))


def sketch(loaded: Loaded, options: Options) -> Plan:
    """The plan of `--print-command`: it needs a build, and checks neither host nor files."""
    build = get_build(options.build) if options.build is not None else binary.choose(loaded, options.series)
    port = choose_port(loaded, options)
    files = weights.locate(loaded, model=options.model, head=options.head)
    plan = draw(loaded, build, files, port)
    if plan.vgpu is not None and not Path(plan.vgpu).exists():  # a build without features has none to lend
        return replace(plan, vgpu=str(binary.vgpu(loaded, options.series)))
    return plan


def draw(loaded: Loaded, build: Build, files: weights.Weights, port: int) -> Plan:
    """Put the pieces together. Reads host facts (cores, NUMA nodes) and the key file, launches nothing."""
    interleave, warning = host.interleave(loaded)
    warnings = [warning] if warning is not None else []
    if build.tests:
        warnings.append("a build for tests is served (--tests): it has switches that make it fail on purpose")
    server_threads, vgpu_threads = host.threads(loaded)
    key_file = loaded.profile.server.api_key_file
    key, told = keys.first_key(loaded) if key_file is not None else (None, ())
    warnings += told
    place = command.Place(
        server=str(build.bin / binary.SERVER),
        model=str(files.model),
        head=str(files.head) if files.head is not None else None,
        port=port,
        threads=server_threads,
        interleave=interleave,
        config_home=str(config_home_path(port)),
        api_key_file=str(Path(key_file).expanduser()) if key_file is not None else None,
    )
    virtual = loaded.profile.devices.kind == "virtual"
    return Plan(
        loaded=loaded,
        place=place,
        vgpu=str(build.bin / binary.VGPU) if virtual else None,
        vgpu_threads=vgpu_threads,
        build_key=build.key,
        build_features=tuple(build.features),
        log=paths.logs_dir() / f"serve-{port}.log",
        api_key=key,
        warnings=tuple(warnings),
    )


def choose_port(loaded: Loaded, options: Options) -> int:
    """The port to serve on; 0 on the command line means any free one."""
    if options.port == 0:
        return host.free_port(loaded.profile.server.host)
    return options.port or loaded.profile.server.port


def config_home_path(port: int) -> Path:
    return services.folder(port) / "empty-config"


def empty_config_home(port: int) -> Path:
    """An empty XDG_CONFIG_HOME for the children, so that no config.ini of upstream is read."""
    path = config_home_path(port)
    with state_written(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


def _build(
    loaded: Loaded, options: Options, config_home: Path, refusals: list[FlashnextError]
) -> Build | None:
    try:
        build = binary.choose(loaded, options.series)
    except FlashnextError as error:
        refusals.append(error)
        return None
    refusals += binary.problems(loaded, build, options.series, {"XDG_CONFIG_HOME": str(config_home)})
    return build


def _refuse(refusals: Sequence[FlashnextError]) -> None:
    """Raise the only refusal as it is, several as one that lists each with its id, context and hint."""
    if not refusals:
        return
    if len(refusals) == 1:
        raise refusals[0]
    raise HostNotQualifiedError(
        f"{len(refusals)} reasons not to start", context=list(_lines(refusals)), hint="mend each of them"
    )


def _lines(refusals: Sequence[FlashnextError]) -> Iterator[str]:
    for error in refusals:
        yield f"[{error.id}] {error.message}"
        yield from (f"    {line}" for line in error.context)
        yield f"    hint: {error.advice}"
