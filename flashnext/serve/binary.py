"""The installed server: found by series, checked by its own words (stamp and flags)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from flashnext import builds
from flashnext.errors import BuildUnfitError, FlashnextError, NoBuildError, ProfileFlagsError
from flashnext.proc import environment, run
from flashnext.profile import command
from flashnext.profile.load import Loaded

SERVER = "llama-server"
VGPU = "fn-vgpu"
_FLAG = re.compile(r"(?<![\w-])--?[a-zA-Z][a-zA-Z0-9-]*")
_HEAD = re.compile(rf"{_FLAG.pattern}(,\s+{_FLAG.pattern})*")


def choose(loaded: Loaded, series: str) -> builds.Build:
    """The newest installed build that fits the profile's backend. Raises NoBuildError with what there is."""
    virtual = loaded.profile.devices.kind == "virtual"
    found = builds.find_build(series, backend="cpu" if virtual else "cuda")
    if found is None and virtual:
        found = builds.find_build(series)
    if found is not None:
        return found
    others = [
        f"installed: {b.key[:12]}  backend {b.backend}, series {b.series_hash[:12]}"
        for b in builds.list_builds()
    ]
    backend = "" if virtual else " --backend cuda"
    raise NoBuildError(
        f"no {'' if virtual else 'cuda '}build of this package's series ({series[:12]}) is installed",
        context=others[:5],
        hint=f"run `flashnext build{backend}`",
    )


def problems(
    loaded: Loaded, build: builds.Build, series: str, env: dict[str, str]
) -> Iterator[FlashnextError]:
    """What is wrong with a build for this profile: stamp, series, features, programs, damaged files."""
    unfit = [f"{build.folder}: {line}" for line in builds.damage(build)]
    if not unfit:  # a damaged program is not run, not even for its stamp
        unfit += _stamp_problems(build.bin / SERVER, series, env)
    for feature, path in command.features(loaded.profile).items():
        if feature not in build.features:
            place = loaded.place(path)
            wants = f"{place} ({'.'.join(map(str, path))})" if path else "flashnext"
            unfit.append(f"the build lacks the feature {feature}, which {wants} needs")
    if build.tests and loaded.profile.kind == "qualified":
        unfit.append("it was built with --tests: it has switches that make it fail on purpose")
    for program in (SERVER, VGPU) if loaded.profile.devices.kind == "virtual" else (SERVER,):
        if not (build.bin / program).is_file():
            unfit.append(f"the build lacks the program {program}")
    if unfit:
        yield BuildUnfitError(f"the build {build.key[:12]} does not fit", context=unfit)


def _stamp_problems(server: Path, series: str, env: dict[str, str]) -> list[str]:
    done = run([server, "--version"], env=environment(env), timeout_s=30.0)
    if not done.ok:
        lines = (done.err + done.out).strip().splitlines()
        return [f"{server} --version ended with {done.code}: {lines[-1] if lines else 'no output'}"]
    stamp = builds.parse_stamp(done.out + "\n" + done.err)
    if stamp is None:
        return [f"{server} carries no stamp of flashnext: it was built elsewhere, or with --vanilla"]
    if stamp.series != series:
        return [f"{server} was built from series {stamp.series[:12]}, this package has {series[:12]}"]
    return []


def unknown_flags(server: Path, argv: Sequence[str], env: dict[str, str]) -> Iterator[FlashnextError]:
    """Flags of a command line that the server's own --help does not list, or lists as removed."""
    done = run([server, "--help"], env=environment(env), timeout_s=30.0)
    if not done.ok:
        yield BuildUnfitError(f"{server} --help ended with {done.code}", context=done.err.splitlines()[-3:])
        return
    known = known_flags(done.out)
    unknown = [word for word in argv[1:] if re.fullmatch(_FLAG, word) and word not in known]
    if unknown:
        yield ProfileFlagsError(
            f"the installed server does not know {', '.join(unknown)}", context=[f"asked {server} --help"]
        )


def known_flags(text: str) -> set[str]:
    """Every flag that a --help text defines: those at the start of an entry, removed ones left out."""
    flags: set[str] = set()
    entry: set[str] = set()
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head is not None:
            flags |= entry
            entry = set(_FLAG.findall(head[0]))
        if "has been removed" in line:
            entry = set()
    return flags | entry
