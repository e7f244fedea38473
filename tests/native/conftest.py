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
