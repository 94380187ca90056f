"""libcuda, loaded once, and those of its calls that others build on. Imports neither torch nor NumPy.

Through ctypes: `libcuda` releases the GIL during a call; `quick_libcuda` keeps it, for calls that take less than
getting it back.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Protocol, TypeVar

from ...errors import KVConnectorError, TransferError

_CAPTURE_MODE_RELAXED = 2
_Library = TypeVar("_Library", bound=ctypes.CDLL)


class Copier(Protocol):
    """Enqueues copies between addresses of this process (`copier.DriverCopier`)."""

    def __call__(self, targets: int, sources: int, sizes: int, count: int, pinned: bool, stream: int | None) -> None:
        """Copy `sizes[i]` bytes from `sources[i]` to `targets[i]`, each given by the address of `count` int64 values.

        The arrays are read before it returns. Addresses, because asking NumPy for one takes longer than all else here.
        `pinned` says that the host side is page-locked; `stream` is the driver's handle, None the current stream's.
        """


@cache
def libcuda() -> ctypes.CDLL:
    """The CUDA driver. Raises TransferError where there is none."""
    return _load(ctypes.CDLL)


@cache
def quick_libcuda() -> ctypes.PyDLL:
    """The same, with the GIL held during calls. Raises as `libcuda`."""
    return _load(ctypes.PyDLL)


def let_go() -> None:
    """Give the GIL to whoever waits for it, in some 60 us. A call of half as many that lets go of it does not, nor a
    sleep of no time in Python 3.10: the other thread wakes up later than that."""
    time.sleep(1e-6)


def check(code: int, call: str, error: type[KVConnectorError] = TransferError) -> None:
    """Raise `error`, with the driver's words, unless `code` is 0."""
    if code != 0:
        text = ctypes.c_char_p()
        libcuda().cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
        raise error(f"{call} failed with CUDA error {code}: {(text.value or b'unknown').decode()}")


def prepare_thread(device: int) -> None:
    """For a thread of our own, in front of its first call: the device's context is current on it from now on, and what
    it does spoils no CUDA graph that another one captures at the time.

    Engines capture theirs in the mode that forbids many calls to every thread that has not opted out (see
    `cudaThreadExchangeStreamCaptureMode` in CUDA's manual). Raises TransferError.
    """
    check(libcuda().cuCtxSetCurrent(primary_context(device)), "cuCtxSetCurrent")
    _exchange_capture_mode(_CAPTURE_MODE_RELAXED)


@cache
def primary_context(device: int) -> ctypes.c_void_p:
    """The context that torch uses on a device, kept until the process ends. Raises TransferError."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    check(libcuda().cuInit(0), "cuInit")
    check(libcuda().cuDeviceGet(ctypes.byref(handle), device), "cuDeviceGet")
    check(libcuda().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), "cuDevicePrimaryCtxRetain")
    return context


@contextmanager
def on_device(device: int) -> Iterator[ctypes.CDLL]:
    """The driver for calls within the device's context, that spoil no capture; then all is as it was.

    Whatever context, stream or memory pool the thread is in, these calls do not ask for it. Raises TransferError.
    """
    driver, context = libcuda(), primary_context(device)
    check(driver.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
    try:
        before = _exchange_capture_mode(_CAPTURE_MODE_RELAXED)
        try:
            yield driver
        finally:
            _exchange_capture_mode(before)
    finally:
        check(driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())), "cuCtxPopCurrent")


def _exchange_capture_mode(mode: int) -> int:
    value = ctypes.c_int(mode)
    code = libcuda().cuThreadExchangeStreamCaptureMode(ctypes.byref(value))
    check(code, "cuThreadExchangeStreamCaptureMode")
    return value.value


def _load(kind: type[_Library]) -> _Library:
    try:
        return kind("libcuda.so.1")
    except OSError as error:
        raise TransferError(f"the CUDA driver cannot be loaded: {error}") from error
