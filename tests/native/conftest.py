"""Fixtures of the tests that run the real patched binaries."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mtp_models import Models
from native_servers import LlamaServer, VirtualGpu
from phase_child import Child
from phase_server import PhaseServer

from flashnext.build import pipeline
from flashnext.model.synth import SynthRequest, synthesise


@dataclass(frozen=True)
class NativeBuild:
    """The build of the full series that every native test shares.

    ``bin``: executables, libraries and the features' C++ tests. ``root``: the installed build.
    ``build_json``: its record. ``objects``: CMake's build folder, for ctest; None with FLASHNEXT_TEST_BIN.
    """

    bin: Path
    build_json: Path
    root: Path
    objects: Path | None


@pytest.fixture(scope="session")
def native_build() -> NativeBuild:
    """Builds the full series with its tests once, in the user's own cache; a second run compiles nothing.

    FLASHNEXT_TEST_BIN may name a folder with finished binaries: nothing is built then. It is an aid while
    developing a feature, where the binaries come from the developer's own tree; CI does not set it.
    """
    folder = os.environ.get("FLASHNEXT_TEST_BIN")
    if folder:
        return NativeBuild(Path(folder), Path(folder).parent / "build.json", Path(folder).parent, None)
    result = pipeline.build(pipeline.Request(backend="cpu", tests=True))
    root = result.build.folder
    work = result.plan.work
    return NativeBuild(work.bin, root / "build.json", root, work.build)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    request = SynthRequest(kind="tiny", out=tmp_path_factory.mktemp("tiny"))
    return synthesise(request, lambda _total: None, lambda _bytes: None).model


@pytest.fixture(scope="session")
def mtp_models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Tiny trunks and heads of all forms, each written when a test first asks for it."""
    return Models(tmp_path_factory.mktemp("mtp-models"))


@pytest.fixture
def vgpu(native_build: NativeBuild, tmp_path: Path) -> Iterator[Callable[..., VirtualGpu]]:
    """Starts virtual GPUs with the given options; ends those that the test left running."""
    with ExitStack() as stack:

        def start(*options: str) -> VirtualGpu:
            return stack.enter_context(VirtualGpu(native_build.bin, tmp_path, *options))

        yield start


@pytest.fixture
def llama_server(
    native_build: NativeBuild, tiny_model: Path, tmp_path: Path
) -> Iterator[Callable[..., LlamaServer]]:
    """Starts llama-server on the tiny model and these virtual GPUs; ends what the test left running."""
    with ExitStack() as stack:

        def start(*options: str, on: tuple[VirtualGpu, ...] = (), **kwargs: Any) -> LlamaServer:
            server = LlamaServer(native_build.bin, tiny_model, tmp_path, *options, on=on, **kwargs)
            return stack.enter_context(server)

        yield start


@pytest.fixture
def phase_gpus(vgpu: Callable[..., VirtualGpu]) -> tuple[VirtualGpu, VirtualGpu]:
    return vgpu("--memory", "2GiB"), vgpu("--memory", "2GiB")


@pytest.fixture
def phase_child(
    native_build: NativeBuild, mtp_models: Models, phase_gpus: tuple[VirtualGpu, ...], tmp_path: Path
) -> Iterator[Callable[..., Child]]:
    """Starts a session on the tiny model with an embedded head, on two virtual GPUs."""
    with ExitStack() as stack:

        def start(env: dict[str, str] | None = None) -> Child:
            endpoints = [gpu.endpoint for gpu in phase_gpus]
            return stack.enter_context(
                Child(native_build.bin, mtp_models.embedded(), endpoints, tmp_path, env)
            )

        yield start


@pytest.fixture(scope="session")
def phase_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The demo model with fewer layers, and its head."""
    out = tmp_path_factory.mktemp("phase-demo")
    request = SynthRequest(kind="demo", out=out, mtp="shared", layers=2)
    made = synthesise(request, lambda _total: None, lambda _bytes: None)
    assert made.head is not None
    return made.model, made.head


@pytest.fixture(scope="session")
def six_layers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The demo model and its head: on two devices three layers each, full and linear attention on both."""
    request = SynthRequest(kind="demo", out=tmp_path_factory.mktemp("six-layers"), mtp="shared", layers=6)
    made = synthesise(request, lambda _total: None, lambda _bytes: None)
    assert made.head is not None
    return made.model, made.head


@pytest.fixture
def phase_server(
    native_build: NativeBuild,
    phase_files: tuple[Path, Path],
    phase_gpus: tuple[VirtualGpu, ...],
    tmp_path: Path,
) -> Iterator[Callable[..., PhaseServer]]:
    """Starts the server; the one before is ended first, since a virtual GPU serves one client."""
    with ExitStack() as stack:

        def start(*options: str, **kwargs: Any) -> PhaseServer:
            stack.pop_all().close()
            started = PhaseServer(native_build.bin, phase_files, tmp_path, phase_gpus, *options, **kwargs)
            return stack.enter_context(started)

        yield start
