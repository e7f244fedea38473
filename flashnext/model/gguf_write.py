"""Write GGUF files by streaming: header first, tensor data as it is drawn, in place only when complete."""

from __future__ import annotations

import contextlib
import errno
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from flashnext.errors import ModelDiskFullError, ModelWriteError
from flashnext.model.gguf_format import DEFAULT_ALIGNMENT, MAGIC, SCALARS, VERSION, ValueType, align
from flashnext.model.synth_shape import Metadata, Plan

Chunks = Callable[[Plan], Iterable[Any]]
Advance = Callable[[int], None]


def _string(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _value(kind: ValueType, value: Any) -> bytes:
    if kind is ValueType.STRING:
        return _string(value)
    if kind is ValueType.ARRAY:
        element, items = value
        body = b"".join(_value(element, item) for item in items)
        return struct.pack("<IQ", element, len(items)) + body
    return SCALARS[kind].pack(value)


def header_bytes(metadata: Metadata, plans: Sequence[Plan]) -> bytes:
    """Everything before the tensor data, padded to the alignment."""
    out = [MAGIC, struct.pack("<IQQ", VERSION, len(plans), len(metadata))]
    for key, (kind, value) in metadata.items():
        out += [_string(key), struct.pack("<I", kind), _value(kind, value)]
    offset = 0
    for plan in plans:
        out.append(_string(plan.name))
        out.append(struct.pack(f"<I{len(plan.shape)}Q", len(plan.shape), *plan.shape))
        out.append(struct.pack("<IQ", plan.type.id, offset))
        offset = align(offset + plan.size_bytes)
    raw = b"".join(out)
    return raw.ljust(align(len(raw)), b"\0")


def file_bytes(metadata: Metadata, plans: Sequence[Plan]) -> int:
    """The size the file will have."""
    return len(header_bytes(metadata, plans)) + sum(align(plan.size_bytes) for plan in plans)


def check_space(folder: Path, need_bytes: int) -> None:
    """Refuse before the first byte. Raises ModelDiskFullError, ModelWriteError (no such folder, not ours)."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise ModelWriteError(f"cannot write to {folder}: {error.strerror or error}") from error
    if need_bytes > free:
        raise ModelDiskFullError(
            f"the model needs {need_bytes:,} bytes, {folder} has {free:,} free",
            context=[f"short by {need_bytes - free:,} bytes"],
        )


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A temporary file beside `path` that takes its name at the end, or vanishes."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as stream:
            name = Path(stream.name)
            try:
                yield stream  # type: ignore[misc]
                stream.flush()
                name.chmod(0o644)
                name.replace(path)
            except BaseException:
                name.unlink(missing_ok=True)
                raise
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ModelDiskFullError(f"no space left while writing {path}") from error
        raise ModelWriteError(f"cannot write {path}: {error.strerror or error}") from error


def write_gguf(
    path: Path, metadata: Metadata, plans: Sequence[Plan], chunks: Chunks, advance: Advance
) -> None:
    """Write one file. `chunks(plan)` gives a tensor's bytes; `advance(n)` hears of each n bytes written."""
    with _replacing(path) as stream:
        stream.write(header_bytes(metadata, plans))
        for plan in plans:
            written = 0
            for chunk in chunks(plan):
                stream.write(chunk)
                written += memoryview(chunk).nbytes
                advance(memoryview(chunk).nbytes)
            if written != plan.size_bytes:
                raise ValueError(f"{plan.name}: {written} bytes drawn, {plan.size_bytes} declared")
            stream.write(b"\0" * (align(written, DEFAULT_ALIGNMENT) - written))


def shard_name(stem: str, index: int, count: int) -> str:
    """llama.cpp's own pattern; index counts from 0, the name from 1."""
    return f"{stem}-{index + 1:05d}-of-{count:05d}.gguf"


def split(metadata: Metadata, plans: Sequence[Plan], count: int) -> list[tuple[Metadata, list[Plan]]]:
    """Cut a model into `count` shards as the published sets are: the first carries the metadata only.

    Tensors keep their order and are dealt by bytes, so a layer may straddle two shards.
    """
    total = sum(plan.size_bytes for plan in plans)
    shards: list[list[Plan]] = [[] for _ in range(count)]
    done, last = 0, 1
    for position, plan in enumerate(plans):
        by_size = 1 + done * (count - 1) // max(total, 1)
        # No shard after the first stays empty: never skip one, and leave one tensor for each that is to come.
        last = max(min(by_size, last + (position > 0), count - 1), count - (len(plans) - position))
        shards[last].append(plan)
        done += plan.size_bytes
    result = []
    for index, part in enumerate(shards):
        keys: Metadata = dict(metadata) if index == 0 else {}
        keys["split.no"] = (ValueType.U16, index)
        keys["split.count"] = (ValueType.U16, count)
        keys["split.tensors.count"] = (ValueType.I32, len(plans))
        result.append((keys, part))
    return result
