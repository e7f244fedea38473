"""The few calls of the CUDA driver that the bench makes itself, by ctypes: memory and copies, no kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p

LIBRARY = "libcuda.so.1"


class CudaError(Exception):
    """A driver call that failed, with the driver's own word for it."""


class Driver:
    """The driver with one primary context per device. Calls raise CudaError."""

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._lib = ctypes.CDLL(library)
        except OSError as error:
            raise CudaError(f"{library}: {error}") from None
        self.call("cuInit", c_uint(0))
        count = c_int()
        self.call("cuDeviceGetCount", byref(count))
        self._contexts: list[c_void_p] = []
        self.names: list[str] = []
        for index in range(count.value):
            device, context, name = c_int(), c_void_p(), ctypes.create_string_buffer(128)
            self.call("cuDeviceGet", byref(device), c_int(index))
            self.call("cuDeviceGetName", name, c_int(128), device)
            self.call("cuDevicePrimaryCtxRetain", byref(context), device)
            self._contexts.append(context)
            self.names.append(name.value.decode())

    @property
    def count(self) -> int:
        return len(self._contexts)

    def call(self, name: str, *arguments: object) -> None:
        code = getattr(self._lib, name)(*arguments)
        if code != 0:
            text = c_char_p()
            known = self._lib.cuGetErrorName(c_int(code), byref(text)) == 0 and text.value
            raise CudaError(f"{name}: {text.value.decode() if known and text.value else code}")

    def use(self, device: int) -> None:
        self.call("cuCtxSetCurrent", self._contexts[device])

    def memory(self, device: int) -> tuple[int, int]:
        """(free, total) bytes."""
        self.use(device)
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def allocate(self, device: int, size_bytes: int) -> int:
        """A device address."""
        self.use(device)
        address = c_uint64()
        self.call("cuMemAlloc_v2", byref(address), c_size_t(size_bytes))
        return address.value

    def pinned(self, device: int, size_bytes: int) -> int:
        """The address of page-locked host memory that every device can read."""
        self.use(device)
        address = c_void_p()
        portable = 1
        self.call("cuMemHostAlloc", byref(address), c_size_t(size_bytes), c_uint(portable))
        return address.value or 0

    def stream(self, device: int) -> c_void_p:
        self.use(device)
        handle = c_void_p()
        non_blocking = 1
        self.call("cuStreamCreate", byref(handle), c_uint(non_blocking))
        return handle

    def upload(self, device: int, target: int, source: int, size_bytes: int, stream: c_void_p) -> None:
        """Queue a copy from pinned host memory."""
        self.use(device)
        self.call("cuMemcpyHtoDAsync_v2", c_uint64(target), c_void_p(source), c_size_t(size_bytes), stream)

    def wait(self, device: int, stream: c_void_p) -> None:
        self.use(device)
        self.call("cuStreamSynchronize", stream)


def devices(driver: Driver, wanted: Sequence[int] | None) -> list[int]:
    """The devices asked for, all by default."""
    return list(wanted) if wanted is not None else list(range(driver.count))
