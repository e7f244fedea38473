"""Scenarios as data: bench/scenarios/<id>.yaml, one per verb, with settings per profile."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from flashnext import paths
from flashnext.artefacts import Artefact
from flashnext.errors import ScenarioInvalidError

Kind = Literal["speed", "logits", "quality", "soak", "times"]
ModelT = TypeVar("ModelT", bound=BaseModel)

# What a request asks of the sampler. `production` is what people serve this model with.
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "top_k": 1, "samplers": ["top_k"]},
    "production": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.0},
}


class Cell(Artefact):
    """One depth: prompts of exactly ``depth`` tokens, ``requests`` of them with seeds of their own."""

    depth: int = Field(gt=0)
    requests: int = Field(1, gt=0)
    generate: int = Field(8, gt=0)


class Settings(Artefact):
    """How much a scenario does under one profile."""

    processes: int = Field(4, gt=1, description="server processes per arm; even, since blocks are mirrored")
    warm_up: int = Field(1, ge=0, description="requests per process that are sent and not recorded")
    cells: tuple[Cell, ...] = ()
    duration_s: float = Field(0, ge=0, description="soak only")
    in_all: bool = Field(True, description="part of `bench all`; otherwise it runs by its own verb alone")

    @model_validator(mode="after")
    def _even(self) -> Settings:
        if self.processes % 2:
            raise ValueError("processes must be even: each block runs the arms forwards and then backwards")
        return self


class Scenario(Artefact):
    """One scenario file. ``settings`` has an entry ``default`` and one per profile that differs."""

    id: str
    title: str
    kind: Kind
    cell_by: Literal["depth", "depth-and-seed"] = "depth"
    sampling: tuple[Literal["greedy", "production"], ...] = ("greedy",)
    top: int = Field(0, ge=0, description="log probabilities of the first token to keep")
    spread: int = Field(
        0, ge=0, description="about so many more tokens over the whole vocabulary, the same ones everywhere"
    )
    own_process: bool = Field(False, description="not in the same processes as the other scenarios")
    settings: dict[str, Settings]

    @model_validator(mode="after")
    def _default(self) -> Scenario:
        if "default" not in self.settings:
            raise ValueError("settings need an entry `default`")
        return self

    def for_profile(self, profile: str) -> Settings:
        return self.settings.get(profile, self.settings["default"])


class Pace(Artefact):
    """A guess of the speed under a profile, for `--plan` before anything was measured. Never reported."""

    start_s: float
    prefill_tps: float
    decode_tps: float


def load_yaml(path: Path, model: type[ModelT]) -> ModelT:
    """A YAML file as a model; every problem of the file in one error."""
    try:
        return model.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError) as error:
        raise ScenarioInvalidError(f"cannot read {path}", context=str(error).splitlines()) from error
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ScenarioInvalidError(f"{path} is not valid", context=lines) from error


def load_scenarios(folder: Path | None = None) -> dict[str, Scenario]:
    """Every scenario, by id, in the order of their files."""
    found: dict[str, Scenario] = {}
    for path in sorted((folder or paths.bench_dir() / "scenarios").glob("*.yaml")):
        scenario = load_yaml(path, Scenario)
        if scenario.id != path.stem:
            raise ScenarioInvalidError(f"{path}: the id {scenario.id!r} is not the name of the file")
        found[scenario.id] = scenario
    return found


class _Paces(Artefact):
    paces: dict[str, Pace]


def settings_names(scenarios: Iterable[Scenario], gates: Iterable[str]) -> list[str]:
    """Every name that scenarios have settings for, or that gates are declared for."""
    return sorted({*(name for scenario in scenarios for name in scenario.settings), *gates})


def load_pace(profile: str, path: Path | None = None) -> Pace:
    paces = load_yaml(path or paths.bench_dir() / "pace.yaml", _Paces).paces
    return paces.get(profile, paces["default"])
