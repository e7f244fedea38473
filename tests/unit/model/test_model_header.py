"""The header reader: exact on sound files, a reason and never a traceback on broken ones."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_variants import draft

from flashnext.errors import ModelHeaderError
from flashnext.model.gguf_format import TENSOR_TYPES, ValueType
from flashnext.model.gguf_write import header_bytes
from flashnext.model.header import read_header
from flashnext.model.inspect import inspect_model

_SOUND = draft()
_HEADER = header_bytes(_SOUND.keys, _SOUND.plans)
_FUZZ = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_a_sound_header_is_read_back_exactly(tmp_path: Path) -> None:
    header = read_header(_SOUND.write(tmp_path / "model.gguf"))
    assert [(t.name, t.shape, t.type) for t in header.tensors] == [tuple(p) for p in _SOUND.plans]
    for key, (kind, value) in _SOUND.keys.items():
        found = header.metadata[key]
        assert found.type is kind
        if kind is ValueType.ARRAY:
            element, items = value
            assert (found.element, found.count) == (element, len(items))
            assert found.data == (None if element is ValueType.STRING else items)
        else:
            assert found.data == pytest.approx(value)
    assert header.end_bytes == header.file_bytes


def test_the_gguf_package_reads_the_same(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = _SOUND.write(tmp_path / "model.gguf")
    reader = gguf.GGUFReader(path)
    mine = read_header(path)
    assert [(t.name, tuple(int(n) for n in t.shape), t.data_offset) for t in reader.tensors] == [
        (t.name, t.shape, mine.data_start + t.offset) for t in mine.tensors
    ]
    assert {k for k in reader.fields if not k.startswith("GGUF.")} == set(mine.metadata)


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    for kind in gguf.GGMLQuantizationType:
        if kind.name == "Q8_1":  # the package counts a sum that the struct stores as half
            continue
        ours = TENSOR_TYPES[int(kind)]
        assert (ours.name, ours.block, ours.block_bytes) == (kind.name, *gguf.GGML_QUANT_SIZES[kind])


@given(cut=st.integers(0, len(_HEADER) - 1))
@_FUZZ
def test_a_cut_header_is_explained(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(_HEADER[:cut])
    found = inspect_model(path)
    assert found.problems
    assert {p.id for p in found.problems} <= {"model-header-broken", "model-file-empty", "model-truncated"}


@given(
    flips=st.lists(st.tuples(st.integers(0, len(_HEADER) - 1), st.integers(1, 255)), min_size=1, max_size=4)
)
@_FUZZ
def test_flipped_bytes_never_end_in_a_traceback(flips: list[tuple[int, int]], tmp_path: Path) -> None:
    data = bytearray(_HEADER)
    for position, mask in flips:
        data[position] ^= mask
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    found = inspect_model(path)
    assert found.problems  # the tensor data is not there
    found.model_dump_json()
    with_head = inspect_model(path, path.with_name("none.gguf"))
    assert len(with_head.problems) == len(found.problems) + 1


@given(data=st.binary(max_size=400))
@_FUZZ
def test_garbage_is_explained(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for prefix in (b"", b"GGUF" + struct.pack("<I", 3)):
        path.write_bytes(prefix + data)
        found = inspect_model(path)
        assert found.problems


def _with_counts(tensors: int, keys: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + rest


def _key(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def _tensor(name: bytes, shape: list[int], kind: int, offset: int) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return struct.pack("<Q", len(name)) + name + dims + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"PK\x03\x04 a zip archive", "no GGUF file"),
        (b"GGUF" + struct.pack("<I", 1), "version 1"),
        (b"GGUF" + struct.pack(">I", 3), "big-endian"),
        (b"GGUF" + struct.pack("<I", 9), "version 9"),
        (_with_counts(1 << 60, 0), "do not fit"),
        (_with_counts(0, 1 << 60), "do not fit"),
        (_with_counts(0, 1, struct.pack("<Q", 1 << 40) + bytes(64)), "claims"),
        (_with_counts(0, 1, _key(b"k", 77, b"") + bytes(64)), "unknown type 77"),
        (_with_counts(0, 1, _key(b"k", 9, struct.pack("<IQ", 8, 1 << 50)) + bytes(64)), "claims"),
        (_with_counts(0, 1, _key(b"k", 9, struct.pack("<IQ", 4, 1 << 50)) + bytes(64)), "ends inside"),
        (_with_counts(0, 1, _key(b"k", 9, struct.pack("<IQ", 9, 1)) + bytes(64)), "array of arrays"),
        (_with_counts(0, 2, _key(b"k", 0, b"\1") * 2 + bytes(64)), "twice"),
        (_with_counts(0, 1, _key(b"general.alignment", 4, struct.pack("<I", 3)) + bytes(64)), "power of two"),
        (_with_counts(1, 0, _tensor(b"t", [1] * 5, 0, 0) + bytes(64)), "5 dimensions"),
        (_with_counts(1, 0, _tensor(b"t", [1 << 40, 1 << 40], 0, 0) + bytes(64)), "impossible shape"),
        (_with_counts(1, 0, _tensor(b"t", [32], 4, 0) + bytes(64)), "unknown type 4"),
        (_with_counts(1, 0, _tensor(b"t", [33], 8, 0) + bytes(64)), "no whole Q8_0 blocks"),
        (_with_counts(1, 0, _tensor(b"t", [32], 8, 64) + bytes(64)), "expected 0"),
        (_with_counts(1, 0, _tensor(b"t" * 70, [32], 8, 0) + bytes(64)), "too long"),
        (_with_counts(2, 0, _tensor(b"t", [32], 0, 0) + _tensor(b"t", [32], 0, 128) + bytes(64)), "twice"),
    ],
)
def test_each_kind_of_damage_has_its_reason(data: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelHeaderError, match=words) as caught:
        read_header(path)
    assert "model.gguf" in caught.value.message
    assert caught.value.exit_code == 4


def test_a_large_vocabulary_is_read_quickly(tmp_path: Path) -> None:
    file = draft()
    tokens = [f"token{i}" for i in range(250_000)]
    file.keys["tokenizer.ggml.tokens"] = (ValueType.ARRAY, (ValueType.STRING, tokens))
    path = file.write(tmp_path / "model.gguf")
    start = time.process_time()
    header = read_header(path)
    assert header.metadata["tokenizer.ggml.tokens"].count == 250_000
    assert time.process_time() - start < 2
