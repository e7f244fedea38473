"""Fixtures of the tests that run the real patched binaries."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from native_servers import LlamaServer, VirtualGpu

from flashnext.model.synth import SynthRequest, synthesise


@dataclass(frozen=True)
class NativeBuild:
    """A finished build of the full series; ``bin`` has the executables and the libraries."""

    bin: Path


@pytest.fixture(scope="session")
def native_build() -> NativeBuild:
    folder = os.environ.get("FLASHNEXT_TEST_BIN")
    if not folder:
        pytest.fail("FLASHNEXT_TEST_BIN must name the folder with llama-server, fn-vgpu and the libraries")
    return NativeBuild(Path(folder))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    request = SynthRequest(kind="tiny", out=tmp_path_factory.mktemp("tiny"))
    return synthesise(request, lambda _total: None, lambda _bytes: None).model


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
