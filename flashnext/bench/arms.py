"""Arms: a build and a profile (or a command) under a name, and what a process of the arm must look like."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from flashnext.artefacts import state_written, write_atomic
from flashnext.errors import ArmUnknownError
from flashnext.profile import command
from flashnext.profile.load import load
from flashnext.profile.schema import PhasePrefillSection, Profile

WITHOUT = "without:"
SECTION_OF = {
    "expert-cache": "expert_cache",
    "mtp-qwen4exp": "mtp",
    "phase-prefill": "phase_prefill",
    "lean-prefill": "lean_prefill",
}
# Names whose presence or absence changes what a server does.
WATCHED = ("LLAMA_", "GGML_")


@dataclass(frozen=True)
class Arm:
    """One arm. Exactly one of ``profile`` (started by `flashnext serve`), ``command`` and ``url`` is set.

    ``environment``: the watched variables that its process must have, and no others of their kind.
    ``direct``: llama-server itself, without the supervisor (every arm of a run whose arms differ in build).
    ``min_tokens``: prompts of at least so many new tokens make one transition; None where there is none.
    """

    name: str
    profile: Path | None = None
    command: str | None = None
    url: str | None = None
    build: str | None = None
    direct: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    min_tokens: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Configured:
    """The arms of a run, the context that its prompts must fit in, and remarks for the report."""

    arms: tuple[Arm, ...]
    context: int | None
    remarks: tuple[str, ...] = ()
    profile_facts: Mapping[str, Any] = field(default_factory=dict)


def from_profile(
    name: str, arms: Sequence[str], folder: Path, *, builds: Mapping[str, str] | None = None
) -> Configured:
    """Derive the arms of a profile; each one's own profile is written to ``folder``/<arm>.yaml.

    - ``candidate``: the profile as it is;
    - ``control``: the same build without the transaction;
    - ``vanilla``: no feature of ours (kill switches off, or a vanilla build where ``builds`` names one);
    - ``without:<feature>``: one feature off (its switch, or a build without it);
    - ``bypass``: the transaction's own control mode;
    - ``resident``: vanilla with every expert on the devices, where they fit: the kernels' own time.
    """
    base = load(name).profile
    made = []
    for arm in arms:
        profile = base if arm == "candidate" else _derived(base, arm)
        path = folder / f"{arm.replace(':', '-')}.yaml"
        with state_written(path):
            write_atomic(path, _text(profile))
        made.append(_arm(arm, profile, path, (builds or {}).get(arm), direct=bool(builds)))
    remarks = []
    if base.phase_prefill is None and {"control", "candidate"} <= set(arms):
        remarks.append(
            f"the profile {base.name} has no transaction: control and candidate are the same, "
            "and every difference between them is noise"
        )
    facts = {"name": base.name, "kind": base.kind, "devices": f"{base.devices.count} {base.devices.kind}"}
    return Configured(tuple(made), base.context.size, tuple(remarks), facts)


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
            made.append(Arm(name=name, url=text.rstrip("/")))
            continue
        words = shlex.split(text)
        environment: dict[str, str] = {}
        while words and "=" in words[0] and words[0].split("=")[0].isidentifier():
            key, _, value = words.pop(0).partition("=")
            environment[key] = value
        if not words or not any("{port}" in w for w in words):
            raise ArmUnknownError(f"the command of arm {name} has no {{port}}", context=[text])
        minimum = environment.pop("FN_BENCH_MIN_TOKENS", None)
        if minimum is None and "LLAMA_PHASE_PREFILL_UBATCH" in environment:
            minimum = environment.get("LLAMA_PHASE_PREFILL_MIN_TOKENS", "0")
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


def _derived(base: Profile, arm: str) -> Profile:
    changes: dict[str, Any] = {"phase_prefill": None, "lean_prefill": None}
    if arm in ("vanilla", "resident"):
        changes |= {"expert_cache": None, "mtp": None}
        changes["load"] = base.load.model_copy(update={"pin_host": False})
        changes["placement"] = tuple(r.model_copy(update={"memory": "host"}) for r in base.placement)
        if arm == "resident":
            changes["placement"] = ()
            size = base.phase_prefill.micro_batch if base.phase_prefill else base.context.micro_batch
            changes["context"] = base.context.model_copy(update={"micro_batch": size})
    elif arm.startswith(WITHOUT):
        feature = arm.removeprefix(WITHOUT)
        changes = {SECTION_OF[feature]: None} if feature in SECTION_OF else {}
        if feature in ("expert-cache", "mtp-qwen4exp"):
            changes["phase_prefill"] = None  # it needs both
    elif arm == "bypass":
        section = base.phase_prefill or PhasePrefillSection()
        changes = {"lean_prefill": None, "phase_prefill": section.model_copy(update={"mode": "bypass"})}
    elif arm != "control":
        raise ArmUnknownError(f"no arm is called {arm!r}")
    kind = "experimental" if base.kind == "qualified" else base.kind
    suffix = arm.replace(":", "-")
    return base.model_copy(update={**changes, "kind": kind, "name": f"{base.name}-{suffix}"[:40]})


def _arm(name: str, profile: Profile, path: Path, build: str | None, *, direct: bool) -> Arm:
    place = command.Place(server="llama-server", model="model", port=1)
    environment = {k: v for k, v in command.env(profile, place).items() if k.startswith(WATCHED)}
    phase = profile.phase_prefill
    transacts = phase is not None and phase.mode == "transaction"
    micro_batch = phase.micro_batch if phase is not None and transacts else profile.context.micro_batch
    return Arm(
        name=name,
        profile=path,
        build=build,
        direct=direct,
        environment=environment,
        min_tokens=phase.min_tokens if phase is not None else None,
        facts={
            "profile": profile.name,
            "prefill_micro_batch": micro_batch,
            "features": ", ".join(command.features(profile)),
            **({"build_asked_for": build} if build else {}),
        },
    )


def _text(profile: Profile) -> str:
    data = profile.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    text: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)
    return f"# Derived by flashnext bench; what is not written has its default.\n{text}"
