"""Memory in use, from the driver's management library: microseconds a call, so watching costs nothing."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_uint, c_ulonglong, c_void_p

LIBRARY = "libnvidia-ml.so.1"


class NvmlError(Exception):
    """The library is not there, or a call of it failed."""


class _Memory(ctypes.Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class Nvml:
    """Every device of the machine. Calls raise NvmlError."""

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._lib = ctypes.CDLL(library)
        except OSError as error:
            raise NvmlError(f"{library}: {error}") from None
        self._call("nvmlInit_v2")
        count = c_uint()
        self._call("nvmlDeviceGetCount_v2", byref(count))
        self._devices: list[c_void_p] = []
        for index in range(count.value):
            handle = c_void_p()
            self._call("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(handle))
            self._devices.append(handle)

    def _call(self, name: str, *arguments: object) -> None:
        try:
            code = getattr(self._lib, name)(*arguments)
        except AttributeError as error:
            raise NvmlError(str(error)) from None
        if code != 0:
            raise NvmlError(f"{name}: {code}")

    def used_bytes(self) -> list[int]:
        """Bytes in use on each device, by whomever."""
        found = []
        for handle in self._devices:
            memory = _Memory()
            self._call("nvmlDeviceGetMemoryInfo", handle, byref(memory))
            found.append(int(memory.used))
        return found
