"""Device memory from the CUDA driver itself, for tables, ids and staging buffers of copies.

Not from torch, whose allocator gives what suits the context of the call: from a pool that the engine discards when it
sleeps (`torch.cuda.use_mem_pool`), bytes whose last kernel is still queued on the stream that is current, or bytes that
it first fills on that stream. Memory of the driver's is nobody else's, has no stream, and stays where it is.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import TransferError
from .driver import check, on_device

_PORTABLE = 1
_TYPES = {torch.uint8: "|u1", torch.int64: "<i8"}

logger = logging.getLogger("kv_connector.transfer")


def device_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised uint8 or int64 on `device`, at least one element; freed with the last view of it.

    The last view may go only when nothing that reads or writes it is under way. Raises TransferError where the device
    has no such memory.
    """
    with torch.inference_mode(False):  # tensors of that mode could not be written to outside of it
        if device.type == "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        index = index_of(device)
        return torch.as_tensor(_DeviceMemory(index, shape, dtype), device=torch.device("cuda", index))


def page_locked_int64(count: int, device: torch.device) -> NDArray[np.int64]:
    """Uninitialised host memory that `device` copies from and to in stream order; plain memory where that is the CPU.

    Lifetime and errors as for `device_tensor`.
    """
    if device.type == "cpu":
        return np.empty(count, dtype=np.int64)
    return np.asarray(_HostMemory(index_of(device), count))


def index_of(device: torch.device) -> int:
    """Index of a CUDA device; of the current one where it has none."""
    return torch.cuda.current_device() if device.index is None else device.index


class _DeviceMemory:
    """Is freed when nobody holds it any more, as the storage of a tensor over it does."""

    def __init__(self, device: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        address = ctypes.c_uint64()
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        with on_device(device) as driver:
            code = driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(num_bytes))
            check(code, f"cuMemAlloc of {num_bytes} bytes")
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": shape,
            "typestr": _TYPES[dtype],
            "data": (address.value, False),
            "strides": None,
            "version": 2,
        }
        weakref.finalize(self, _free, device, "cuMemFree_v2", address).atexit = False


class _HostMemory:
    """As `_DeviceMemory`, for an array over it."""

    def __init__(self, device: int, count: int) -> None:
        address = ctypes.c_void_p()
        with on_device(device) as driver:
            code = driver.cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(8 * count), ctypes.c_uint(_PORTABLE))
            check(code, f"cuMemHostAlloc of {8 * count} bytes")
        self.__array_interface__: dict[str, Any] = {
            "shape": (count,),
            "typestr": "<i8",
            "data": (address.value, False),
            "version": 3,
        }
        weakref.finalize(self, _free, device, "cuMemFreeHost", address).atexit = False


def _free(device: int, call: str, address: ctypes.c_uint64 | ctypes.c_void_p) -> None:
    try:
        with on_device(device) as driver:
            check(getattr(driver, call)(address), call)
    except TransferError as error:  # a finalizer's top: the device is lost, and its memory with it
        logger.warning("device memory cannot be freed: %s", error)
