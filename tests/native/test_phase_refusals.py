"""What the transaction refuses at startup: before anything is loaded, and every value at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import NativeBuild
from phase_server import PhaseServer

pytestmark = pytest.mark.native

ON = {"UBATCH": "2048"}


def refusal(
    build: NativeBuild,
    tmp_path: Path,
    phase: dict[str, str],
    *options: str,
    numbers: dict[str, str] | None = None,
) -> list[str]:
    """Sentences of the refusal, or nothing when the checks passed (the files are not there: it ends then)."""
    files = (tmp_path / "none.gguf", tmp_path / "none-head.gguf")
    server = PhaseServer(build.bin, files, tmp_path, (), *options, phase=phase, numbers=numbers, ready=False)
    assert server.ended(timeout_s=30) == 1
    markers = server.markers("refused")
    assert len(markers) <= 1
    for sentence in markers[0]["wrong"] if markers else []:
        assert f"error: phase-prefill: {sentence}" in server.text
    return list(markers[0]["wrong"]) if markers else []


@pytest.mark.parametrize("value", ["2k", "-1", "1e9", "", " 5", "5 ", "0x10", "12345678901"])
@pytest.mark.parametrize("key", ["UBATCH", "MIN_TOKENS"])
def test_malformed_numbers(native_build: NativeBuild, tmp_path: Path, key: str, value: str) -> None:
    (sentence,) = refusal(native_build, tmp_path, {**ON, key: value})
    assert f'LLAMA_PHASE_PREFILL_{key} is "{value}"' in sentence


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("UBATCH", "1024"),
        ("UBATCH", "0"),
        ("MODE", "transact"),
        ("MODE", ""),
        ("VERIFY", "yes"),
        ("VERIFY", ""),
        ("REHEARSE", "2"),
        ("QUALIFIED", "false"),
        ("LOGIT_DUMP", "/nonexistent"),
        ("FAULT", "begin"),
        ("FAULT", "explode:1"),
        ("FAULT", "begin:0"),
    ],
)
def test_wrong_values(native_build: NativeBuild, tmp_path: Path, key: str, value: str) -> None:
    (sentence,) = refusal(native_build, tmp_path, {**ON, key: value})
    assert sentence.startswith(f'LLAMA_PHASE_PREFILL_{key} is "{value}"')


@pytest.mark.parametrize("value", ["512", "2048"])
def test_the_qualified_numbers_pass(native_build: NativeBuild, tmp_path: Path, value: str) -> None:
    assert refusal(native_build, tmp_path, {"UBATCH": value}) == []


def test_every_value_that_is_off_is_named(native_build: NativeBuild, tmp_path: Path) -> None:
    sentences = refusal(
        native_build, tmp_path, {"UBATCH": "4096", "MODE": "fast", "MIN_TOKENS": "2k"},
        "--embeddings", "--mmproj", "x.gguf", "--spec-type", "ngram-simple", "--sleep-idle-seconds", "60",
        numbers={"-ub": "256", "-b": "1024", "-np": "2", "--moe-expert-cache": "100"},
    )  # fmt: skip
    text = "\n".join(sentences)
    for part in (
        "UBATCH is", "MODE is", "MIN_TOKENS is", "micro-batch (-ub) is", "batch (-b) is",
        "slots (--moe-expert-cache) is 100, expected 150", "sequences (-np) is 2, expected 1", "draft-mtp",
        "embeddings", "projector", "sleep-idle",
    ):  # fmt: skip
        assert part in text, part


def test_settings_without_the_switch_are_refused(native_build: NativeBuild, tmp_path: Path) -> None:
    sentences = refusal(native_build, tmp_path, {"MODE": "bypass", "VERIFY": "1"})
    assert len(sentences) == 2


STRUCTURAL: list[tuple[dict[str, str], tuple[str, ...], str]] = [
    ({"-np": "2"}, (), "sequences"),
    ({"--moe-expert-cache": "0"}, (), "the expert cache is off"),
    ({"--spec-type": "none"}, (), "draft-mtp"),
    ({}, ("--embeddings",), "embeddings"),
    ({}, ("--mmproj", "x.gguf"), "projector"),
]


@pytest.mark.parametrize(("numbers", "options", "part"), STRUCTURAL)
@pytest.mark.parametrize("qualified", ["0", "1"])
def test_structure_is_demanded_always(
    native_build: NativeBuild,
    tmp_path: Path,
    numbers: dict[str, str],
    options: Any,
    part: str,
    qualified: str,
) -> None:
    phase = {**ON, "QUALIFIED": qualified}
    sentences = refusal(native_build, tmp_path, phase, *options, numbers=numbers)
    assert any(part in sentence for sentence in sentences)


def test_unqualified_lifts_the_numbers_alone(native_build: NativeBuild, tmp_path: Path) -> None:
    numbers = {"-ub": "64", "-b": "1024", "--moe-expert-cache": "24"}
    assert refusal(native_build, tmp_path, {"UBATCH": "256", "QUALIFIED": "0"}, numbers=numbers) == []
    assert len(refusal(native_build, tmp_path, {"UBATCH": "2048"}, numbers=numbers)) >= 3
    (sentence,) = refusal(native_build, tmp_path, {"UBATCH": "2048", "QUALIFIED": "0"}, numbers=numbers)
    assert "from the micro-batch (64) to the batch (1024)" in sentence
