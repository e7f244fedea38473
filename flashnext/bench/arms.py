"""Arms: a build and a profile (or a command) under a name, and what a process of the arm must look like."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from flashnext import builds, paths
from flashnext.artefacts import state_written, write_atomic
from flashnext.errors import ArmUnknownError
from flashnext.profile import command
from flashnext.profile.load import load
from flashnext.profile.schema import PhasePrefillSection, Profile

WITHOUT = "without:"
MICRO_BATCH = "ubatch:"
SECTION_OF = {
    "expert-cache": "expert_cache",
    "mtp-qwen4exp": "mtp",
    "phase-prefill": "phase_prefill",
    "lean-prefill": "lean_prefill",
}
# Names whose presence or absence changes what a server does.
WATCHED = ("LLAMA_", "GGML_", "FN_")
# The supervisor's ready check takes the rehearsal; without a supervisor it would be a prompt of the run.
REHEARSAL = "LLAMA_PHASE_PREFILL_REHEARSE"
TIMES = {"FN_PREFILL_TIMES": "1"}
_SWITCH = re.compile(r"\b(FN_[A-Z_]+)=0\b")
_AN_EXPERT_TENSOR = "blk.0.ffn_gate_exps.weight"


@dataclass(frozen=True)
class Arm:
    """One arm. Exactly one of ``profile`` (started by `flashnext serve`), ``command`` and ``url`` is set.

    ``environment``: the watched variables that its process must have, and no others of their kind.
    ``switches``: those of them that no profile sets, the features' kill switches.
    ``direct``: llama-server itself, without the supervisor (every arm of a run where one needs it: arms that
    differ in build, or in a kill switch).
    ``limited``: a limit on the devices' memory holds for it.
    ``min_tokens``: prompts of at least so many new tokens make one transition; None where there is none.
    """

    name: str
    profile: Path | None = None
    command: str | None = None
    url: str | None = None
    build: str | None = None
    direct: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    switches: Mapping[str, str] = field(default_factory=dict)
    limited: bool = True
    min_tokens: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Configured:
    """The arms of a run, the context that its prompts must fit in, and remarks for the report."""

    arms: tuple[Arm, ...]
    context: int | None
    remarks: tuple[str, ...] = ()
    profile_facts: Mapping[str, Any] = field(default_factory=dict)
    texts: Mapping[Path, str] = field(default_factory=dict)

    def write(self) -> None:
        """Write the arms' own profiles, which their servers are started from."""
        for path, text in self.texts.items():
            with state_written(path):
                write_atomic(path, text)


def timed(arm: Arm) -> Arm:
    """The arm with the times of its prompts taken by kind of work, without the supervisor: no profile has it.

    A build without prefill-times passes the switch over; a server that somebody else runs stays as it is.
    """
    if arm.url is not None:
        return arm
    environment = {k: v for k, v in arm.environment.items() if k != REHEARSAL or arm.command is not None}
    return replace(
        arm,
        direct=arm.command is None,
        environment={**environment, **TIMES},
        switches={**arm.switches, **TIMES},
    )


def from_profile(
    name: str, arms: Sequence[str], folder: Path, *, named: Mapping[str, str] | None = None
) -> Configured:
    """Derive the arms of a profile; each one's profile becomes ``folder``/<arm>.yaml by `Configured.write`.

    - ``candidate``: the profile as it is;
    - ``control``: the same build without the transaction;
    - ``vanilla``: no feature of ours (kill switches off, or a vanilla build where ``named`` has one);
    - ``without:<feature>``: one feature off (its switch, or a build without it);
    - ``transaction``, ``bypass``: prompts by the transaction, or by its own control mode, also where the
      profile has lean prefill: beside ``candidate`` one run measures both;
    - ``ubatch:<tokens>``: the control with that micro-batch all the time: what the micro-batch alone changes;
    - ``resident``: every expert on the devices, no cache and no head: the kernels' own time. No memory limit.
    """
    base, named = load(name).profile, named or {}
    unused = sorted(set(named) - set(arms))
    if unused:
        raise ArmUnknownError(f"--build names no arm of this run: {', '.join(unused)}", context=list(arms))
    switches = {arm: _switches(arm, named.get(arm)) for arm in arms}
    direct = bool(named) or any(switches.values())
    # an arm is asked on loopback without a key, and may run beside the service whose profile it is
    private = {"host": "127.0.0.1", "api_key_file": None, "control_port": None}
    base = base.model_copy(update={"server": base.server.model_copy(update=private)})
    made, texts = [], {}
    for arm in arms:
        profile = base if arm == "candidate" else _derived(base, arm)
        path = folder / f"{arm.replace(':', '-')}.yaml"
        texts[path] = _text(profile)
        made.append(_arm(arm, profile, path, named.get(arm), switches[arm], direct=direct))
    remarks = []
    if "resident" in arms:
        remarks.append("the arm resident runs without a limit on the devices' memory")
    plain = base.phase_prefill is None and base.lean_prefill is None
    if plain and {"control", "candidate"} <= set(arms):
        remarks.append(
            f"the profile {base.name} has no transaction: control and candidate are the same, "
            "and every difference between them is noise"
        )
    facts = {"name": base.name, "kind": base.kind, "devices": f"{base.devices.count} {base.devices.kind}"}
    return Configured(tuple(made), base.context.size, tuple(remarks), facts, texts)


def from_commands(commands: Sequence[str]) -> Configured:
    """Arms given as ``name=command`` or ``name=http://host:port``.

    A command may begin with NAME=VALUE words, which become its environment, and holds ``{port}`` where the
    port goes. Where they switch the transaction on, prompts of LLAMA_PHASE_PREFILL_MIN_TOKENS new tokens and
    more must make one; ``FN_BENCH_MIN_TOKENS=N`` (not passed on) says so for any other server.
    """
    made = []
    for entry in commands:
        name, found, text = entry.partition("=")
        if not found or not text:
            raise ArmUnknownError(
                f"{entry!r} is not name=command", context=["for example: control='server --port {port}'"]
            )
        if text.startswith("http://"):
            made.append(Arm(name=name, url=_checked(name, text.rstrip("/"))))
            continue
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise ArmUnknownError(
                f"the command of arm {name} cannot be read: {error}", context=[text]
            ) from None
        environment: dict[str, str] = {}
        while words and "=" in words[0] and words[0].split("=")[0].isidentifier():
            key, _, value = words.pop(0).partition("=")
            environment[key] = value
        if not words or not any("{port}" in w for w in words):
            raise ArmUnknownError(f"the command of arm {name} has no {{port}}", context=[text])
        minimum = environment.pop("FN_BENCH_MIN_TOKENS", None)
        if minimum is None and "LLAMA_PHASE_PREFILL_UBATCH" in environment:
            minimum = environment.get("LLAMA_PHASE_PREFILL_MIN_TOKENS", "0")
        if minimum is not None and not minimum.isdecimal():
            raise ArmUnknownError(f"arm {name}: {minimum!r} is no number of tokens", context=[text])
        made.append(
            Arm(
                name=name,
                command=shlex.join(words),
                environment=environment,
                min_tokens=int(minimum) if minimum is not None else None,
                facts={"command": text},
            )
        )
    return Configured(tuple(made), None)


def _checked(name: str, url: str) -> str:
    try:
        parts = urlsplit(url)
        whole = parts.hostname is not None and parts.port != 0
    except ValueError:  # the port is no number
        whole = False
    if not whole:
        raise ArmUnknownError(f"the address of arm {name} is no http://host:port", context=[url])
    return url


def _derived(base: Profile, arm: str) -> Profile:
    changes: dict[str, Any] = {"phase_prefill": None, "lean_prefill": None}
    if arm == "vanilla":
        changes |= {"expert_cache": None, "mtp": None}
        # stock's faster way: prompts whose experts are in the mapped file are read several times slower
        changes["load"] = base.load.model_copy(update={"pin_host": False, "mode": "none"})
        changes["placement"] = tuple(r.model_copy(update={"memory": "host"}) for r in base.placement)
    elif arm == "resident":
        size = _tokens_per_upload(base) or base.context.batch
        changes |= {"expert_cache": None, "mtp": None}
        changes["placement"] = tuple(r for r in base.placement if not re.search(r.tensors, _AN_EXPERT_TENSOR))
        changes["context"] = base.context.model_copy(update={"micro_batch": size})
    elif arm.startswith(MICRO_BATCH):
        size = _micro_batch(base, arm)
        changes["context"] = base.context.model_copy(update={"micro_batch": size})
    elif arm.startswith(WITHOUT):
        feature = arm.removeprefix(WITHOUT)
        changes = {SECTION_OF[feature]: None} if feature in SECTION_OF else {}
        if feature in ("expert-cache", "mtp-qwen4exp"):
            changes["phase_prefill"] = None  # it needs both
    elif arm in ("transaction", "bypass"):
        section = base.phase_prefill or PhasePrefillSection()
        changes = {"lean_prefill": None, "phase_prefill": section.model_copy(update={"mode": arm})}
    elif arm != "control":
        raise ArmUnknownError(f"no arm is called {arm!r}")
    kind = "experimental" if base.kind == "qualified" else base.kind
    suffix = arm.replace(":", "-")
    return base.model_copy(update={**changes, "kind": kind, "name": f"{base.name}-{suffix}"[:40]})


def _micro_batch(base: Profile, arm: str) -> int:
    text = arm.removeprefix(MICRO_BATCH)
    if not text.isdecimal() or not 0 < int(text) <= base.context.batch:
        raise ArmUnknownError(
            f"{arm!r} names no micro-batch",
            context=[f"1 to {base.context.batch} tokens, the profile's batch"],
        )
    return int(text)


def kill_switches() -> dict[str, str]:
    """Feature -> the variable whose 0 turns it off, of those features that no profile turns off."""
    found = {}
    for path in sorted(paths.patches_dir().glob("*/feature.toml")):
        match = _SWITCH.search(str(tomllib.loads(path.read_text(encoding="utf-8")).get("kill_switch", "")))
        if match is not None:
            found[path.parent.name] = match[1]
    return found


def _switches(arm: str, build: str | None) -> dict[str, str]:
    """The kill switches that an arm needs beside its profile: none where its build lacks the features."""
    known = kill_switches()
    there = builds.get_build(build).features if build is not None else None
    if arm == "vanilla":
        return {name: "0" for feature, name in known.items() if there is None or feature in there}
    if not arm.startswith(WITHOUT):
        return {}
    feature = arm.removeprefix(WITHOUT)
    if feature in SECTION_OF or (there is not None and feature not in there):
        return {}
    if feature in known:
        return {known[feature]: "0"}
    raise ArmUnknownError(
        f"nothing turns {feature} off in a run",
        context=[f"features with a switch: {', '.join(sorted({*SECTION_OF, *known}))}"],
        hint=f"`flashnext build --without {feature}`, then --build {arm}=KEY",
    )


def _arm(
    name: str, profile: Profile, path: Path, build: str | None, switches: Mapping[str, str], *, direct: bool
) -> Arm:
    place = command.Place(server="llama-server", model="model", port=1)
    environment = {k: v for k, v in command.env(profile, place).items() if k.startswith(WATCHED)}
    if direct:
        environment.pop(REHEARSAL, None)
    phase = profile.phase_prefill
    return Arm(
        name=name,
        profile=path,
        build=build,
        direct=direct,
        environment={**environment, **switches},
        switches=switches,
        limited=name != "resident",
        min_tokens=phase.min_tokens if phase is not None else None,
        facts={
            "profile": profile.name,
            "prefill_micro_batch": _tokens_per_upload(profile),
            "features": ", ".join(command.features(profile)),
            **({"switches": " ".join(f"{k}={v}" for k, v in switches.items())} if switches else {}),
            **({"build_asked_for": build} if build else {}),
        },
    )


def _tokens_per_upload(profile: Profile) -> int | None:
    """Tokens of a long prompt for which the experts cross the link once; None where the server chooses."""
    if profile.lean_prefill is not None:
        return profile.lean_prefill.chunk if profile.lean_prefill.chunk != "auto" else None
    phase = profile.phase_prefill
    return phase.micro_batch if phase and phase.mode == "transaction" else profile.context.micro_batch


def _text(profile: Profile) -> str:
    data = profile.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    text: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)
    return f"# Derived by flashnext bench; what is not written has its default.\n{text}"
