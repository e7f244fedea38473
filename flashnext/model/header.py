"""Read a GGUF header without reading tensors: fast, bounds-checked, with a reason for every broken file."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from flashnext.errors import ModelHeaderError
from flashnext.model.gguf_format import (
    DEFAULT_ALIGNMENT,
    INTEGERS,
    MAGIC,
    SCALARS,
    TENSOR_TYPES,
    TensorType,
    ValueType,
    align,
)

# No real header comes near these; a garbage length stops here instead of reading gigabytes.
_MAX_HEADER_BYTES = 512 << 20
_MAX_KEY_BYTES = 4096
_MAX_KEPT = 4096  # longer arrays are counted, their values are not kept
_MAX_NAME_BYTES = 63
_MAX_DIMS = 4
_STEP = 1 << 20


@dataclass(frozen=True, slots=True)
class Value:
    """One key's value. Of an array longer than 4096, or of strings, only type and count are kept (None)."""

    type: ValueType
    data: Any
    element: ValueType | None = None
    count: int = 1


class TensorEntry(NamedTuple):
    """One tensor as declared: shape in ggml order, offset from the start of the data section."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int

    @property
    def elements(self) -> int:
        total = 1
        for n in self.shape:
            total *= n
        return total

    @property
    def size_bytes(self) -> int:
        return self.type.row_bytes(self.elements)


class Header(NamedTuple):
    """A file's header. `header_bytes` is its unpadded length, `data_start` where tensor data begins."""

    path: Path
    file_bytes: int
    version: int
    metadata: dict[str, Value]
    tensors: tuple[TensorEntry, ...]
    header_bytes: int
    data_start: int
    alignment: int

    def number(self, key: str) -> int | float | None:
        """A scalar number, or None where the key is absent or no number."""
        value = self.metadata.get(key)
        if value is None or not isinstance(value.data, int | float) or isinstance(value.data, bool):
            return None
        return value.data

    def integer(self, key: str) -> int | None:
        """A scalar integer, or None where the key is absent or of another type."""
        value = self.metadata.get(key)
        return value.data if value is not None and value.type in INTEGERS else None

    def text(self, key: str) -> str | None:
        value = self.metadata.get(key)
        return value.data if value is not None and value.type is ValueType.STRING else None

    def items(self, key: str) -> list[int] | None:
        """The numbers of an array key, or None where it is absent, no array, or too long to be kept."""
        value = self.metadata.get(key)
        return value.data if value is not None and value.type is ValueType.ARRAY else None

    @property
    def end_bytes(self) -> int:
        """The size the file must at least have for its tensors; padding after the last does not count."""
        if not self.tensors:
            return self.header_bytes
        return self.data_start + max(t.offset + t.size_bytes for t in self.tensors)


class _Cursor:
    """Bytes of a file from its start, loaded in steps; every read is checked against the file's size."""

    def __init__(self, stream: BinaryIO, size: int, path: Path) -> None:
        self.stream = stream
        self.size = min(size, _MAX_HEADER_BYTES)
        self.path = path
        self.position = 0
        self.data = bytearray()

    def fail(self, reason: str) -> ModelHeaderError:
        return ModelHeaderError(
            f"{self.path.name}: {reason}", context=[f"file {self.path}", f"at byte {self.position:,}"]
        )

    def skip(self, count: int, what: str) -> int:
        """Move past `count` bytes and give the position where they start."""
        start, end = self.position, self.position + count
        if end > self.size:
            raise self.fail(f"the header ends inside {what}: a cut or damaged file")
        while len(self.data) < end:
            more = self.stream.read(min(max(_STEP, end - len(self.data)), self.size - len(self.data)))
            if not more:
                raise self.fail(f"the header ends inside {what}: a cut or damaged file")
            self.data += more
        self.position = end
        return start

    def unpack(self, layout: struct.Struct, what: str) -> Any:
        start = self.skip(layout.size, what)
        return layout.unpack_from(self.data, start)[0]

    def text(self, limit: int, what: str) -> str:
        length = self.unpack(SCALARS[ValueType.U64], what)
        if length > limit:
            raise self.fail(f"{what} claims {length:,} bytes: damaged header")
        start = self.skip(length, what)
        return self.data[start : start + length].decode("utf-8", errors="replace")


_U32 = SCALARS[ValueType.U32]
_U64 = SCALARS[ValueType.U64]


def read_header(path: Path) -> Header:
    """Read and check the header of one GGUF file.

    Raises ModelHeaderError for whatever is no whole GGUF header (the message says what and where) and for a
    file that cannot be opened.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            return _read(_Cursor(stream, size, path), size)
    except OSError as error:
        raise ModelHeaderError(f"{path.name}: cannot be read: {error.strerror or error}") from error


def _read(cursor: _Cursor, size: int) -> Header:
    version = _read_version(cursor)
    tensor_count = cursor.unpack(_U64, "the tensor count")
    key_count = cursor.unpack(_U64, "the key count")
    # A key takes 13 bytes at least, a tensor 24: more than fit the file is garbage.
    if key_count * 13 + tensor_count * 24 > size:
        raise cursor.fail(f"{key_count:,} keys and {tensor_count:,} tensors do not fit into {size:,} bytes")
    metadata: dict[str, Value] = {}
    for _ in range(key_count):
        key = cursor.text(_MAX_KEY_BYTES, "a key")
        if not key or key in metadata:
            raise cursor.fail(f"key {key!r} is empty or there twice")
        metadata[key] = _read_value(cursor, key)
    alignment = _alignment(cursor, metadata)
    tensors = tuple(_read_tensors(cursor, tensor_count, alignment))
    header_bytes = cursor.position
    data_start = align(header_bytes, alignment) if tensors else header_bytes
    return Header(cursor.path, size, version, metadata, tensors, header_bytes, data_start, alignment)


def _read_version(cursor: _Cursor) -> int:
    magic = bytes(cursor.data[cursor.skip(4, "the magic") : 4])
    if magic != MAGIC:
        raise cursor.fail(f"no GGUF file: it starts with {magic!r}")
    version: int = cursor.unpack(_U32, "the version")
    if version not in (2, 3):
        swapped = version and version & 0xFFFF == 0
        reason = "written for big-endian machines" if swapped else "2 and 3 can be read"
        raise cursor.fail(f"GGUF version {version}: {reason}")
    return version


def _alignment(cursor: _Cursor, metadata: dict[str, Value]) -> int:
    value = metadata.get("general.alignment")
    if value is None:
        return DEFAULT_ALIGNMENT
    if value.type is not ValueType.U32 or value.data < 1 or value.data & (value.data - 1):
        raise cursor.fail(f"general.alignment {value.data!r} is no power of two")
    return int(value.data)


def _read_value(cursor: _Cursor, key: str) -> Value:
    kind = _value_type(cursor, key)
    if kind is ValueType.STRING:
        return Value(kind, cursor.text(cursor.size, f"the value of {key}"))
    if kind is not ValueType.ARRAY:
        return Value(kind, cursor.unpack(SCALARS[kind], f"the value of {key}"))
    element = _value_type(cursor, key)
    count = cursor.unpack(_U64, f"the length of {key}")
    what = f"the array {key}"
    if element is ValueType.ARRAY:
        raise cursor.fail(f"{key} is an array of arrays")
    if element is ValueType.STRING:
        if count * 8 > cursor.size:
            raise cursor.fail(f"{what} claims {count:,} strings: damaged header")
        for _ in range(count):
            cursor.skip(cursor.unpack(_U64, what), what)
        return Value(kind, None, element, count)
    layout = SCALARS[element]
    start = cursor.skip(layout.size * count, what)
    if count > _MAX_KEPT:
        return Value(kind, None, element, count)
    many = struct.Struct(f"<{count}{layout.format[1:]}")
    return Value(kind, list(many.unpack_from(cursor.data, start)), element, count)


def _value_type(cursor: _Cursor, key: str) -> ValueType:
    number = cursor.unpack(_U32, f"the type of {key}")
    try:
        return ValueType(number)
    except ValueError:
        raise cursor.fail(f"key {key!r} has the unknown type {number}") from None


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> list[TensorEntry]:
    tensors: list[TensorEntry] = []
    seen: set[str] = set()
    expected = 0
    for _ in range(count):
        name = cursor.text(_MAX_KEY_BYTES, "a tensor name")
        if len(name.encode()) > _MAX_NAME_BYTES or name in seen:
            raise cursor.fail(f"tensor name {name[:80]!r} is too long or there twice")
        seen.add(name)
        entry = _read_tensor(cursor, name)
        if entry.offset != expected:
            raise cursor.fail(f"tensor {name} lies at offset {entry.offset:,}, expected {expected:,}")
        expected = align(expected + entry.size_bytes, alignment)
        tensors.append(entry)
    return tensors


def _read_tensor(cursor: _Cursor, name: str) -> TensorEntry:
    what = f"tensor {name}"
    dims = cursor.unpack(_U32, what)
    if dims > _MAX_DIMS:
        raise cursor.fail(f"{what} has {dims} dimensions")
    shape = tuple(cursor.unpack(_U64, what) for _ in range(dims))
    total = 1
    for n in shape:
        total *= n
    if total >= 1 << 63 or any(n >= 1 << 63 for n in shape):
        raise cursor.fail(f"{what} has the impossible shape {list(shape)}")
    number = cursor.unpack(_U32, what)
    kind = TENSOR_TYPES.get(number)
    if kind is None:
        raise cursor.fail(f"{what} has the unknown type {number}")
    row = shape[0] if shape else 1
    if row % kind.block:
        raise cursor.fail(f"{what}: {row} values a row are no whole {kind.name} blocks of {kind.block}")
    return TensorEntry(name, shape, kind, cursor.unpack(_U64, what))
