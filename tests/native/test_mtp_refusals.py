"""A head that cannot belong to its target ends the server before any weight is read, naming what differs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from mtp_models import Models
from mtp_server import MTP, MtpServer

from flashnext import markers

pytestmark = pytest.mark.native


def refusal(bin_dir: Path, log_dir: Path, model: Path, *args: str | Path) -> list[dict[str, str]]:
    """Runs the server to its end; the reasons of the marker line. Fails if weights were read."""
    with MtpServer(bin_dir, log_dir, model, *args, ready_s=None) as server:
        assert server.ended(timeout_s=30.0) == 1
    found = [marker for line in server.text.splitlines() if (marker := markers.parse(line)) is not None]
    assert [marker.name for marker in found] == ["mtp:refused"], server.text[-2000:]
    # nothing was loaded: neither tensors nor the loader's listing of them
    assert "load_tensors" not in server.text
    assert "llama_model_loader" not in server.text
    body = found[0].data
    assert body["target"] == str(model)
    for reason in body["reasons"]:
        assert reason["message"] in body["reason"]
    reasons: list[dict[str, str]] = body["reasons"]
    return reasons


def rewrite(
    source: Path,
    out: Path,
    keys: dict[str, Any] | None = None,
    rename: Callable[[str], str | None] | None = None,
) -> Path:
    """A copy of a GGUF with some keys replaced and tensors renamed (None drops one)."""
    reader = GGUFReader(source)
    replaced = keys or {}
    arch = replaced.get("general.architecture", "qwen4exp")
    writer = GGUFWriter(out, arch)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = replaced.get(field.name, field.contents())
        name = field.name.replace("qwen4exp.", f"{arch}.")
        if field.types[0] == GGUFValueType.ARRAY:
            writer.add_key_value(name, value, GGUFValueType.ARRAY, sub_type=field.types[-1])
        else:
            writer.add_key_value(name, value, field.types[0])
    for tensor in reader.tensors:
        new = tensor.name if rename is None else rename(tensor.name)
        if new is not None:
            writer.add_tensor(new, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def changed(models: Models, tmp_path: Path, **change: Any) -> Path:
    return rewrite(models.head("standalone"), tmp_path / "head.gguf", **change)


def tokens(head: Path) -> list[str]:
    found: list[str] = GGUFReader(head).fields["tokenizer.ggml.tokens"].contents()
    return found


def test_rewritten_head_is_taken(native_build: Any, mtp_models: Models, tmp_path: Path) -> None:
    """The control of all cases below: the copy itself is not what is refused."""
    head = changed(mtp_models, tmp_path)
    with MtpServer(native_build.bin, tmp_path, mtp_models.trunk(), "-md", head, *MTP) as server:
        assert server.tokens("a", 8).timings["draft_n"] > 0


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (
            {"qwen4exp.embedding_length": 512},
            {"id": "width", "message": "embedding_length differs", "target": "256", "head": "512"},
        ),
        (
            {"qwen4exp.hyper_connection.count": 2},
            {"id": "width", "message": "hyper_connection.count differs", "target": "4", "head": "2"},
        ),
        (
            {"general.architecture": "qwen35moe"},
            {
                "id": "architecture",
                "message": "general.architecture differs",
                "target": "qwen4exp",
                "head": "qwen35moe",
            },
        ),
        (
            {"qwen4exp.nextn_predict_layers": 0},
            {
                "id": "no-mtp-block",
                "message": "the draft file has no MTP block (nextn_predict_layers)",
                "target": "1",
                "head": "0",
            },
        ),
    ],
    ids=["width", "streams", "architecture", "no-block"],
)
def test_other_model(
    native_build: Any, mtp_models: Models, tmp_path: Path, keys: dict[str, Any], reason: dict[str, str]
) -> None:
    head = changed(mtp_models, tmp_path, keys=keys)
    assert refusal(native_build.bin, tmp_path, mtp_models.trunk(), "-md", head, *MTP) == [reason]


def test_other_vocabulary(native_build: Any, mtp_models: Models, tmp_path: Path) -> None:
    words = tokens(mtp_models.head("standalone"))
    other = [*words[:100], "something-else", *words[101:]]
    head = changed(mtp_models, tmp_path, keys={"tokenizer.ggml.tokens": other})
    found = refusal(native_build.bin, tmp_path, mtp_models.trunk(), "-md", head, *MTP)
    assert found == [
        {"id": "vocabulary", "message": "token 100 differs", "target": words[100], "head": "something-else"}
    ]


def test_trimmed_vocabulary(native_build: Any, mtp_models: Models, tmp_path: Path) -> None:
    words = tokens(mtp_models.head("standalone"))
    types = [1] * (len(words) - 5)
    keys = {"tokenizer.ggml.tokens": words[:-5], "tokenizer.ggml.token_type": types}
    head = changed(mtp_models, tmp_path, keys=keys)
    found = refusal(native_build.bin, tmp_path, mtp_models.trunk(), "-md", head, *MTP)
    n = len(words)
    assert found[0] == {
        "id": "vocabulary", "message": "number of tokens differs", "target": str(n), "head": str(n - 5)
    }  # fmt: skip


def test_block_numbering(native_build: Any, mtp_models: Models, tmp_path: Path) -> None:
    ratios = [0] * 13
    keys = {"qwen4exp.block_count": 13, "qwen4exp.attention.compress_ratios": ratios}
    head = changed(mtp_models, tmp_path, keys=keys, rename=lambda name: name.replace("blk.8.", "blk.12."))
    found = refusal(native_build.bin, tmp_path, mtp_models.trunk(), "-md", head, *MTP)
    assert [(r["id"], r["target"], r["head"]) for r in found] == [("block-numbering", "8", "12")]


def test_foreign_tensor_names(native_build: Any, mtp_models: Models, tmp_path: Path) -> None:
    """Other converters name the head's mixer after the trunk's."""
    head = changed(mtp_models, tmp_path, rename=lambda n: n.replace("blk.8.nextn.hc_head_", "output_hc_"))
    found = refusal(native_build.bin, tmp_path, mtp_models.trunk(), "-md", head, *MTP)
    assert [r["id"] for r in found] == ["tensor-names", "tensor-names"]
    assert "output_hc_down.weight, output_hc_norm.weight, output_hc_up.weight" in found[0]["message"]
    assert "blk.8.nextn.hc_head_norm.weight" in found[1]["message"]


def test_everything_that_differs_is_named_at_once(
    native_build: Any, mtp_models: Models, tmp_path: Path
) -> None:
    words = tokens(mtp_models.head("standalone"))
    head = changed(
        mtp_models,
        tmp_path,
        keys={"qwen4exp.embedding_length": 512, "tokenizer.ggml.tokens": [words[1], words[0], *words[2:]]},
        rename=lambda name: None if name.endswith("nextn.enorm.weight") else name,
    )
    found = refusal(native_build.bin, tmp_path, mtp_models.trunk(), "-md", head, *MTP)
    assert [r["id"] for r in found] == ["width", "vocabulary", "tensor-names"]


def test_target_as_its_own_head(native_build: Any, mtp_models: Models, tmp_path: Path) -> None:
    trunk = mtp_models.trunk()
    link = tmp_path / "link.gguf"
    link.symlink_to(trunk)
    for head in (trunk, link):
        found = refusal(native_build.bin, tmp_path, trunk, "-md", head, *MTP)
        assert [r["id"] for r in found] == ["target-as-head"]


def test_shard_of_the_target(native_build: Any, mtp_models: Models, tmp_path: Path) -> None:
    first, second = mtp_models.shards()
    found = refusal(native_build.bin, tmp_path, first, "-md", second, *MTP)
    assert [(r["id"], r["head"]) for r in found] == [("target-shard", str(second))]


def test_embedded_file_asked_for_twice(native_build: Any, mtp_models: Models, tmp_path: Path) -> None:
    embedded = mtp_models.embedded()
    found = refusal(native_build.bin, tmp_path, embedded, "-md", embedded, *MTP)
    assert [r["id"] for r in found] == ["embedded-twice"]


def test_embedded_file_as_head(native_build: Any, mtp_models: Models, tmp_path: Path) -> None:
    found = refusal(native_build.bin, tmp_path, mtp_models.trunk(), "-md", mtp_models.embedded(), *MTP)
    assert [r["id"] for r in found] == ["embedded-as-head"]


def test_no_head_at_all(native_build: Any, mtp_models: Models, tmp_path: Path) -> None:
    found = refusal(native_build.bin, tmp_path, mtp_models.trunk(), *MTP)
    assert [r["id"] for r in found] == ["no-mtp-block"]


def test_unreadable_head(native_build: Any, mtp_models: Models, tmp_path: Path) -> None:
    head = tmp_path / "head.gguf"
    shutil.copy(mtp_models.head("standalone"), head)
    head.write_bytes(head.read_bytes()[:4000])
    found = refusal(native_build.bin, tmp_path, mtp_models.trunk(), "-md", head, *MTP)
    assert [r["id"] for r in found] == ["unreadable"]
