"""What is wrong with a set of files is said before anything is launched, all at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_variants import draft

from flashnext.model.inspect import Inspection, inspect_model


def _ids(found: Inspection) -> list[str]:
    return [problem.id for problem in found.problems]


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    return draft().write_shards(tmp_path, 4)


def test_a_whole_set_is_sound_and_equals_the_single_file(shards: list[Path], tmp_path: Path) -> None:
    found = inspect_model(shards[0])
    single = inspect_model(draft().write(tmp_path / "single.gguf"))
    assert found.ok
    assert [shard.state for shard in found.shards] == ["present"] * 4
    assert found.shards[0].tensors == 0
    assert all(shard.tensors for shard in found.shards[1:])
    assert {t.name: t.shape for t in found.tensors} == {t.name: t.shape for t in single.tensors}
    assert found.tensor_bytes == single.tensor_bytes
    assert found.experts == single.experts


def test_all_missing_shards_are_listed_at_once(shards: list[Path]) -> None:
    shards[1].unlink()
    shards[3].unlink()
    found = inspect_model(shards[0])
    assert _ids(found) == ["model-shard-missing"]
    assert shards[1].name in found.problems[0].message
    assert shards[3].name in found.problems[0].message
    assert [shard.state for shard in found.shards] == ["present", "missing", "present", "missing"]


def test_another_shard_than_the_first_names_the_first(shards: list[Path]) -> None:
    found = inspect_model(shards[1])
    assert _ids(found) == ["model-not-first-shard"]
    assert shards[0].name in found.problems[0].message


def test_not_the_first_and_missing_come_together(shards: list[Path]) -> None:
    shards[0].unlink()
    assert _ids(inspect_model(shards[2])) == ["model-not-first-shard", "model-shard-missing"]


def test_an_empty_shard(shards: list[Path]) -> None:
    shards[1].write_bytes(b"")
    assert _ids(inspect_model(shards[0])) == ["model-file-empty"]


@pytest.mark.parametrize("cut", [1, 5000])
def test_a_cut_shard_says_how_much_there_is(shards: list[Path], cut: int) -> None:
    whole = shards[2].stat().st_size
    shards[2].write_bytes(shards[2].read_bytes()[: -cut - 32])
    found = inspect_model(shards[0])
    assert _ids(found) == ["model-truncated"]
    assert f"{whole - cut - 32:,} of " in found.problems[0].message


@pytest.mark.parametrize("name", ["joined.gguf", "model-00001-of-00004.gguf"])
def test_shards_joined_with_cat(shards: list[Path], name: str, tmp_path: Path) -> None:
    whole = b"".join(path.read_bytes() for path in shards)
    folder = tmp_path / "joined"
    folder.mkdir()
    path = folder / name
    path.write_bytes(whole)
    found = inspect_model(path)
    assert "model-shards-joined" in _ids(found)
    joined = next(p for p in found.problems if p.id == "model-shards-joined")
    assert "cat" in joined.hint


def test_a_renamed_shard(shards: list[Path], tmp_path: Path) -> None:
    path = shards[0].rename(tmp_path / "first.gguf")
    assert _ids(inspect_model(path)) == ["model-shard-name"]


def test_shards_of_two_sets(shards: list[Path], tmp_path: Path) -> None:
    other = draft()
    other.drop_tensors("blk.3.attn_k.weight")
    folder = tmp_path / "other"
    folder.mkdir()
    shards[3].write_bytes(other.write_shards(folder, 4)[3].read_bytes())
    found = inspect_model(shards[0])
    assert "model-shard-mismatch" in _ids(found)


def test_a_shard_under_another_number(shards: list[Path]) -> None:
    shards[2].write_bytes(shards[1].read_bytes())
    assert "model-shard-mismatch" in _ids(inspect_model(shards[0]))


@pytest.mark.parametrize("suffix", [".part", ".incomplete", ".crdownload"])
def test_a_partial_shard_is_refused_by_name(shards: list[Path], suffix: str) -> None:
    partial = shards[1].rename(shards[1].with_name(shards[1].name + suffix))
    found = inspect_model(shards[0])
    assert _ids(found) == ["model-partial-download", "model-shard-missing"]
    assert all(partial.name in problem.message for problem in found.problems)
    assert found.shards[1].state == "partial"


def test_a_partial_file_in_a_hub_cache_is_found(shards: list[Path]) -> None:
    shards[1].unlink()
    cache = shards[0].parent / ".cache" / "huggingface" / "download"
    cache.mkdir(parents=True)
    (cache / "Xk3.0123abcd.incomplete").write_bytes(b"GGUF")
    assert _ids(inspect_model(shards[0])) == ["model-partial-download", "model-shard-missing"]


def test_a_preallocated_download_is_not_taken_for_whole(shards: list[Path]) -> None:
    shards[1].with_name(shards[1].name + ".aria2").write_bytes(b"")
    assert _ids(inspect_model(shards[0])) == ["model-partial-download"]


def test_a_leftover_beside_a_whole_file_is_only_a_note(tmp_path: Path) -> None:
    path = draft().write(tmp_path / "model.gguf")
    (tmp_path / "model.gguf.part").write_bytes(b"GGUF")
    found = inspect_model(path)
    assert found.ok
    assert "model.gguf.part" in found.notes[0]


def test_a_partial_file_given_directly(tmp_path: Path) -> None:
    path = draft().write(tmp_path / "model.gguf.part")
    assert _ids(inspect_model(path)) == ["model-partial-download"]
    assert _ids(inspect_model(tmp_path / "model.gguf")) == ["model-partial-download"]


def test_a_wrong_name_gets_a_suggestion(tmp_path: Path) -> None:
    draft().write(tmp_path / "flashnext-tiny.gguf")
    found = inspect_model(tmp_path / "flashnext-tyni.gguf")
    assert _ids(found) == ["model-file-missing"]
    assert "flashnext-tiny.gguf" in found.problems[0].hint


def test_a_dangling_link_and_an_absent_folder(tmp_path: Path) -> None:
    link = tmp_path / "model.gguf"
    link.symlink_to(tmp_path / "blob")
    assert "link to" in inspect_model(link).problems[0].message
    assert "no folder" in inspect_model(tmp_path / "no" / "model.gguf").problems[0].message


def test_a_folder_names_the_file_to_pass(shards: list[Path]) -> None:
    found = inspect_model(shards[0].parent)
    assert _ids(found) == ["model-is-folder"]
    assert shards[0].name in found.problems[0].hint
    assert shards[1].name not in found.problems[0].hint


def test_a_folder_of_partial_downloads(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00004.gguf.part").write_bytes(b"")
    assert _ids(inspect_model(tmp_path)) == ["model-partial-download"]


def test_a_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = draft().write(tmp_path / "model.gguf")

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # root may read everything, so no mode can show it
    found = inspect_model(path)
    assert _ids(found) == ["model-header-broken"]
    assert "Permission denied" in found.problems[0].message


@pytest.mark.parametrize(("name", "words"), [("llama", "architecture llama"), ("clip", "projector")])
def test_another_architecture(tmp_path: Path, name: str, words: str) -> None:
    file = draft()
    kind, _ = file.keys["general.architecture"]
    file.keys["general.architecture"] = (kind, name)
    found = inspect_model(file.write(tmp_path / "model.gguf"))
    assert _ids(found) == ["model-wrong-architecture"]
    assert words in found.problems[0].message
