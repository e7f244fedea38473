"""The built library from Python: what it was built from, and the memory transaction's C interface.

cffi in ABI mode: the declarations below are those of fn-build-stamp.h and fn-phase.h; nothing is compiled.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import cffi

from flashnext.errors import BuildError

CDEF = """
const char * fn_build_version(void);
const char * fn_build_series_hash(void);
const char * fn_build_features(void);

struct llama_context;
struct fn_phase;
struct fn_phase_params { int32_t n_ubatch; int32_t mode; int32_t verify; int32_t reserved; };
struct fn_phase_stats {
    int32_t state; int32_t mode;
    uint64_t begins; uint64_t ends; uint64_t failures;
    uint64_t generation; uint64_t capacity; uint64_t released_bytes;
    double begin_ms; double begin_quiesce_ms; double begin_release_ms; double begin_reserve_ms;
    double end_ms; double end_quiesce_ms; double end_restore_ms; double end_reserve_ms;
};
struct fn_phase * fn_phase_init(struct llama_context *, struct llama_context *, struct fn_phase_params,
                                char *, size_t);
void fn_phase_free(struct fn_phase *);
int32_t fn_phase_begin(struct fn_phase *, int32_t);
int32_t fn_phase_end(struct fn_phase *);
int32_t fn_phase_get_state(const struct fn_phase *);
uint64_t fn_phase_generation(const struct fn_phase *);
void fn_phase_get_stats(const struct fn_phase *, struct fn_phase_stats *);
const char * fn_phase_state_name(int32_t);
const char * fn_phase_last_check(const struct fn_phase *);
const char * fn_phase_last_detail(const struct fn_phase *);
void fn_phase_print_failed(const struct fn_phase *);
void fn_phase_set_stop(struct fn_phase *, bool (*)(void *), void *);
int32_t fn_phase_tokens_done(const struct fn_phase *);
int32_t fn_phase_set_fault(struct fn_phase *, const char *);
size_t fn_phase_metrics(const struct fn_phase *, char *, size_t);
"""


class Mode(IntEnum):
    TRANSACTION = 0
    BYPASS = 1


class Result(IntEnum):
    OK = 0
    BAD_PARAMS = 1
    BAD_STATE = 2
    BROKEN = 3


class State(IntEnum):
    READY = 0
    BEGINNING = 1
    PROMPT = 2
    ENDING = 3
    FAILED = 4


class Stats(NamedTuple):
    """Counters of a transaction; times in milliseconds of the last begin and end, and their parts."""

    state: int
    mode: int
    begins: int
    ends: int
    failures: int
    generation: int
    capacity: int
    released_bytes: int
    begin_ms: float
    begin_quiesce_ms: float
    begin_release_ms: float
    begin_reserve_ms: float
    end_ms: float
    end_quiesce_ms: float
    end_restore_ms: float
    end_reserve_ms: float


class NativeLibraryError(BuildError):
    id = "native-library"
    hint = "build again: `flashnext build`"


class Library:
    """libllama.so of a build. ``cdef``: further declarations, for callers that need more of its functions."""

    def __init__(self, folder: Path, cdef: str = "") -> None:
        self.ffi: Any = cffi.FFI()
        self.ffi.cdef(CDEF + cdef)
        path = folder / "libllama.so"
        try:
            self.c: Any = self.ffi.dlopen(str(path), os.RTLD_NOW | os.RTLD_GLOBAL)
        except OSError as e:
            raise NativeLibraryError(f"cannot load {path}", context=[str(e)]) from e

    def text(self, pointer: Any) -> str:
        raw: bytes = self.ffi.string(pointer)
        return raw.decode()

    @property
    def version(self) -> str:
        return self.text(self.c.fn_build_version())

    @property
    def series_hash(self) -> str:
        return self.text(self.c.fn_build_series_hash())

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(filter(None, self.text(self.c.fn_build_features()).split(",")))


class PhaseRefusedError(Exception):
    """The contexts do not fit the parameters; the text says why."""


class Phase:
    """The transaction of one target context (and its draft's). Use :meth:`open`; calls from one thread."""

    def __init__(self, library: Library, handle: Any) -> None:
        self._lib = library
        self._handle = handle
        self._stop: Any = None

    @classmethod
    @contextmanager
    def open(
        cls,
        library: Library,
        target: Any,
        draft: Any = None,
        *,
        micro_batch: int,
        mode: Mode = Mode.TRANSACTION,
        verify: bool = False,
    ) -> Iterator[Phase]:
        """``target``, ``draft``: struct llama_context pointers that outlive the block.

        Raises PhaseRefusedError.
        """
        ffi = library.ffi
        params = ffi.new("struct fn_phase_params *", [micro_batch, int(mode), int(verify), 0])
        reason = ffi.new("char[512]")
        handle = library.c.fn_phase_init(target, draft or ffi.NULL, params[0], reason, 512)
        if handle == ffi.NULL:
            raise PhaseRefusedError(library.text(reason))
        try:
            yield cls(library, handle)
        finally:
            library.c.fn_phase_free(handle)

    def begin(self, n_tokens: int) -> Result:
        return Result(self._lib.c.fn_phase_begin(self._handle, n_tokens))

    def end(self) -> Result:
        return Result(self._lib.c.fn_phase_end(self._handle))

    def set_fault(self, fault: str) -> Result:
        """Builds for tests only: ``point:n``, or nothing."""
        return Result(self._lib.c.fn_phase_set_fault(self._handle, fault.encode()))

    @property
    def state(self) -> State:
        return State(self._lib.c.fn_phase_get_state(self._handle))

    @property
    def generation(self) -> int:
        return int(self._lib.c.fn_phase_generation(self._handle))

    @property
    def last_check(self) -> str:
        """Name of the check that the last failure did not pass, or nothing."""
        return self._lib.text(self._lib.c.fn_phase_last_check(self._handle))

    @property
    def last_detail(self) -> str:
        return self._lib.text(self._lib.c.fn_phase_last_detail(self._handle))

    @property
    def stats(self) -> Stats:
        out = self._lib.ffi.new("struct fn_phase_stats *")
        self._lib.c.fn_phase_get_stats(self._handle, out)
        return Stats(*(getattr(out, name) for name in Stats._fields))

    def metrics(self) -> str:
        """Prometheus text."""
        size = int(self._lib.c.fn_phase_metrics(self._handle, self._lib.ffi.NULL, 0)) + 64
        buf = self._lib.ffi.new("char[]", size)
        self._lib.c.fn_phase_metrics(self._handle, buf, size)
        return self._lib.text(buf)

    def stop_after(self, n_micro_batches: int | None) -> None:
        """End the next batches of the target after so many micro-batches; None: never."""
        if n_micro_batches is None:
            self._stop = None
            self._lib.c.fn_phase_set_stop(self._handle, self._lib.ffi.NULL, self._lib.ffi.NULL)
            return
        asked = 0

        def stop(_data: Any) -> bool:
            nonlocal asked
            asked += 1
            return asked >= n_micro_batches

        self._stop = self._lib.ffi.callback("bool(void *)", stop)
        self._lib.c.fn_phase_set_stop(self._handle, self._stop, self._lib.ffi.NULL)

    @property
    def tokens_done(self) -> int:
        return int(self._lib.c.fn_phase_tokens_done(self._handle))
