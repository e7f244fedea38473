"""Draft heads: the form is recognised; what does not belong to the target is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from model_variants import ARCH, MICRO, Draft, draft

from flashnext.model.gguf_format import ValueType
from flashnext.model.inspect import inspect_model


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return draft().write(tmp_path / "model.gguf")


def _ids(target: Path, head: Draft) -> list[str]:
    path = head.write(target.with_name("mtp-model.gguf"))
    return [problem.id for problem in inspect_model(target, path).problems]


@pytest.mark.parametrize(("part", "tensors"), [("shared", 32), ("standalone", 34)])
@pytest.mark.parametrize("ratio", [0, 4])
def test_a_fitting_head(target: Path, part: str, tensors: int, ratio: int) -> None:
    path = draft(part, ratio=ratio).write(target.with_name("mtp-model.gguf"))  # type: ignore[arg-type]
    found = inspect_model(target, path)
    assert found.ok
    head = found.head
    assert (head.form, head.tensors, head.layer, head.ratio) == (part, tensors, 4, ratio)
    assert head.type == "Q8_0"


def test_an_embedded_head(tmp_path: Path) -> None:
    found = inspect_model(draft("embedded").write(tmp_path / "model.gguf"))
    assert found.ok
    assert (found.head.form, found.head.tensors) == ("embedded", 32)


def test_a_model_without_head(target: Path) -> None:
    assert inspect_model(target).head.form == "none"


@pytest.mark.parametrize("part", ["shared", "standalone"])
def test_a_head_is_no_model(tmp_path: Path, part: str) -> None:
    found = inspect_model(draft(part).write(tmp_path / "mtp.gguf"))  # type: ignore[arg-type]
    assert [problem.id for problem in found.problems] == ["model-is-head"]
    assert found.head.form == part


def test_the_target_as_its_own_head(target: Path) -> None:
    link = target.with_name("link.gguf")
    link.symlink_to(target)
    for head in (target, link):
        assert [p.id for p in inspect_model(target, head).problems] == ["model-head-is-target"]


def test_a_trunk_as_head(target: Path) -> None:
    assert _ids(target, draft()) == ["model-head-none"]


def test_a_relative_block_number(target: Path) -> None:
    head = draft("shared")
    head.rename("blk.4.", "blk.0.")
    assert _ids(target, head) == ["model-head-block"]


def test_another_width(target: Path) -> None:
    head = draft("shared", replace(MICRO, embd=512))
    assert _ids(target, head) == ["model-head-width"]


def test_another_number_of_streams(target: Path) -> None:
    assert _ids(target, draft("shared", replace(MICRO, hc=2))) == ["model-head-width"]


def test_another_number_of_trunk_layers(target: Path) -> None:
    assert _ids(target, draft("shared", replace(MICRO, layers=8))) == ["model-head-width"]


def test_a_trimmed_vocabulary(target: Path) -> None:
    head = draft("standalone")
    head.reshape("output.weight", 256, 100)
    assert _ids(target, head) == ["model-head-vocab"]


def test_another_vocabulary(target: Path) -> None:
    head = draft("shared")
    strings = (ValueType.STRING, ["a", "b", "c"])
    head.keys["tokenizer.ggml.tokens"] = (ValueType.ARRAY, strings)
    head.drop("tokenizer.ggml.token_type")
    assert _ids(target, head) == ["model-head-vocab"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("blk.4.nextn.hc_head_", "output_hc_"),
        ("nextn.hc_head_", "hc_"),
        ("nextn.eh_proj", "nextn.fc_embd"),
        ("nextn.hc_head_norm", "nextn.shared_head_norm"),
    ],
)
def test_names_of_other_software(target: Path, old: str, new: str) -> None:
    head = draft("shared")
    head.rename(old, new)
    assert _ids(target, head) == ["model-head-foreign"]


def test_a_head_with_only_foreign_names(target: Path) -> None:
    head = draft("shared")
    head.rename("nextn.eh_proj", "fc_embd")
    head.rename("nextn.", "")
    assert _ids(target, head) == ["model-head-foreign"]


def test_no_prediction_count(target: Path) -> None:
    head = draft("shared")
    head.drop("nextn_predict_layers")
    assert "model-head-count" in _ids(target, head)


def test_ple_keys_in_a_head(target: Path) -> None:
    head = draft("shared")
    head.keys.update({k: v for k, v in draft().keys.items() if k.startswith(f"{ARCH}.ple.")})
    assert "model-head-ple" in _ids(target, head)


def test_a_head_without_a_tensor(target: Path) -> None:
    head = draft("shared")
    head.drop_tensors("blk.4.nextn.hnorm")
    assert _ids(target, head) == ["model-tensor-missing"]


def test_a_head_with_half_a_vocabulary(target: Path) -> None:
    head = draft("standalone")
    head.drop_tensors("output.weight")
    assert _ids(target, head) == ["model-tensor-missing"]


def test_problems_of_target_and_head_come_together(tmp_path: Path) -> None:
    file = draft()
    file.drop("context_length")
    target = file.write(tmp_path / "model.gguf")
    head = draft("shared")
    head.rename("blk.4.", "blk.0.")
    assert _ids(target, head) == ["model-key-missing", "model-head-block"]


def test_a_head_that_is_not_there(target: Path) -> None:
    found = inspect_model(target, target.with_name("mtp.gguf"))
    assert [problem.id for problem in found.problems] == ["model-file-missing"]
