"""Copies between addresses, by the CUDA driver."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from .driver import check, libcuda, quick_libcuda

MAX_COPIES_PER_CALL = 2048
"""Descriptors in one driver call. On an H200, driver 580 (2026-11-21), submitting 16,384 at once stalls the host for
51 ms while 8,192 take 3.6 ms; a tenth of that keeps each call well below a millisecond."""
_ACCESS_IN_STREAM_ORDER = 1


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


@cache
def driver_copier() -> DriverCopier:
    """The CUDA driver's copier. Raises TransferError where there is no driver."""
    return DriverCopier()


class DriverCopier:
    """`cuMemcpyBatchAsync` on one stream, or one `cuMemcpyAsync` a segment where that does not serve.

    Through ctypes and not cuda.bindings: NumPy arrays go to the driver as they are, where the bindings take a Python
    object for every address, a microsecond each on the model-runner thread; and ctypes drops the GIL. A call blocks
    while the driver's queue is full; for one with the GIL, what the stream waits for might be in Python. Nor is a load
    faster whose short calls keep it: a host hit of 4 GiB took 109.5 ms with such calls and 108.0 without (SGLang, H200,
    `sglang_ttft_variants_eager_h200.json`).
    """

    def __init__(self, max_copies_per_call: int = MAX_COPIES_PER_CALL) -> None:
        self._max_copies = max_copies_per_call
        self._driver = libcuda()
        # CUDA 13 dropped the index of the failing copy from the arguments; 12.8 brought the call.
        self._takes_fail_index = not hasattr(self._driver, "cuMemcpyBatchAsync_v2")
        name = "cuMemcpyBatchAsync" if self._takes_fail_index else "cuMemcpyBatchAsync_v2"
        self._batch: Any = getattr(self._driver, name, None)
        self._attributes = _Attributes(source_access_order=_ACCESS_IN_STREAM_ORDER)
        self._first, self._fail_index = ctypes.c_size_t(0), ctypes.c_size_t(0)
        # Made once: a call is submitted for every couple of megabytes.
        self._constant: tuple[Any, ...] = (ctypes.byref(self._attributes), ctypes.byref(self._first), 1)
        if self._takes_fail_index:
            self._constant = (*self._constant, ctypes.byref(self._fail_index))
        if self._batch is not None:
            pointer, size = ctypes.c_void_p, ctypes.c_size_t
            fail_index = [pointer] if self._takes_fail_index else []
            self._batch.argtypes = [pointer, pointer, pointer, size, pointer, pointer, size, *fail_index, pointer]
        self._one = quick_libcuda().cuMemcpyAsync
        for call in (self._driver.cuMemcpyAsync, self._one):
            call.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]

    def __call__(self, targets: int, sources: int, sizes: int, count: int, pinned: bool, stream: int | None) -> None:
        """See `driver.Copier`."""
        if stream is None:
            stream = torch.cuda.current_stream().cuda_stream
        # The batch call refuses the default stream, and pageable memory is not its case.
        if self._batch is None or stream == 0 or not pinned:
            self._copy_each(targets, sources, sizes, count, stream)
            return
        for start in range(0, count, self._max_copies):
            skipped, number = 8 * start, min(self._max_copies, count - start)
            code = self._batch(targets + skipped, sources + skipped, sizes + skipped, number, *self._constant, stream)
            check(code, "cuMemcpyBatchAsync")

    def copy_one(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Copy so few bytes that releasing the GIL for the call, and waiting for it again, would take longer."""
        check(self._one(target, source, num_bytes, stream), "cuMemcpyAsync")

    def _copy_each(self, targets: int, sources: int, sizes: int, count: int, stream: int) -> None:
        arrays = [(ctypes.c_uint64 * count).from_address(address) for address in (targets, sources, sizes)]
        for target, source, size in zip(*arrays, strict=True):
            check(self._driver.cuMemcpyAsync(target, source, size, stream), "cuMemcpyAsync")
