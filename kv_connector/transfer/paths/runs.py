"""The runs path: neighbours merged into long segments, copied by the DMA engines, which leave the model alone."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...types import Direction
from ..cuda.driver import check, libcuda, quick_libcuda
from ..memory.host_pool import HostPool
from ..memory.layout import CacheLayout
from .base import BlockCopy

Int64s = NDArray[np.int64]

MAX_COPIES_PER_CALL = 2048
"""Descriptors in one driver call. On an H200, driver 580 (2026-11-21), submitting 16,384 at once stalls the host for
51 ms while 8,192 take 3.6 ms; a tenth of that keeps each call well below a millisecond."""
_ACCESS_IN_STREAM_ORDER = 1


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Copies of bytes that are contiguous on both sides: int64 arrays of shape (num_segments,), sizes in bytes."""

    device: Int64s
    host: Int64s
    sizes: Int64s

    def __len__(self) -> int:
        return len(self.sizes)


class Copier(Protocol):
    """Enqueues copies between addresses."""

    def __call__(self, targets: int, sources: int, sizes: int, count: int, pinned: bool, stream: int | None) -> None:
        """Copy `sizes[i]` bytes from `sources[i]` to `targets[i]`, each given by the address of `count` int64 values.

        The arrays are read before it returns. Addresses, because asking NumPy for one takes longer than all else here.
        `pinned` says that the host side is page-locked; `stream` is the driver's handle, None the current stream's.
        """


def merge_runs(device: Int64s, host: Int64s, sizes: Int64s, pieces: Int64s) -> Segments:
    """Join neighbours that are adjacent on both sides, except where `pieces`, the registered piece, changes.

    Entries are in host-address order, so that runs whose ids ascend or descend together look the same.
    """
    ends = (device[:-1] + sizes[:-1] != device[1:]) | (host[:-1] + sizes[:-1] != host[1:]) | (pieces[:-1] != pieces[1:])
    starts = np.concatenate(([0], np.flatnonzero(ends) + 1))
    return Segments(device[starts], host[starts], np.add.reduceat(sizes, starts))


class _Columns(NamedTuple):
    """Regions, those joined that are adjacent on both sides: an entry each, `piece_bytes` are `sizes` again."""

    bases: Int64s
    strides: Int64s
    sizes: Int64s
    offsets: Int64s
    piece_bytes: tuple[int, ...]


class RunsPath:
    """Copies merged segments with one driver call per couple of thousand (see `CopyPath`)."""

    def __init__(self, layout: CacheLayout, host: HostPool, copier: Copier | None = None) -> None:
        """`copier` replaces the CUDA driver in tests."""
        self._layout = layout
        self._host = host
        self._copier = copier if copier is not None else driver_copier()
        self._columns: dict[range, _Columns] = {}

    def copy(self, copy: BlockCopy) -> None:
        """See `CopyPath.copy`."""
        self.submit(copy, self.plan(copy))

    def submit(self, copy: BlockCopy, plan: Segments) -> None:
        """Copy what `plan` returned for it."""
        load = copy.direction is Direction.LOAD
        targets, sources = (plan.device, plan.host) if load else (plan.host, plan.device)
        arrays = targets.ctypes.data, sources.ctypes.data, plan.sizes.ctypes.data
        handle = None if copy.stream is None else copy.stream.cuda_stream
        self._copier(*arrays, len(plan), self._host.is_pinned, handle)

    def plan(self, copy: BlockCopy) -> Segments:
        """The segments of it."""
        bases, strides, sizes, offsets, _ = self._merged_columns(copy.regions)
        order = np.argsort(copy.host_ids, kind="stable")
        device_ids, host_ids = copy.device_ids[order, None], copy.host_ids[order, None]
        shape = (len(order), len(sizes))
        return merge_runs(
            (bases + device_ids * strides).ravel(),
            (self._host.tensor.data_ptr() + host_ids * self._host.block_bytes + offsets).ravel(),
            np.broadcast_to(sizes, shape).ravel(),
            np.broadcast_to(host_ids // self._host.blocks_per_piece, shape).ravel(),
        )

    def piece_bytes(self, regions: range) -> tuple[int, ...]:
        """Lengths of a block's pieces, those joined that are adjacent on both sides."""
        return self._merged_columns(regions).piece_bytes

    def close(self) -> None:
        """Nothing is held."""

    def _merged_columns(self, regions: range) -> _Columns:
        """Those of the regions."""
        if regions not in self._columns:
            part = self._layout.regions[regions.start : regions.stop]
            bases = np.array([region.data_ptr for region in part], dtype=np.int64)
            offsets = np.array([region.offset for region in part], dtype=np.int64)
            strides = np.array([region.block_stride for region in part], dtype=np.int64)
            sizes = np.array([region.piece_bytes for region in part], dtype=np.int64)
            merged = merge_runs(bases, offsets, sizes, strides)
            kept = np.searchsorted(offsets, merged.host)
            lengths = tuple(merged.sizes.tolist())
            self._columns[regions] = _Columns(merged.device, strides[kept], merged.sizes, merged.host, lengths)
        return self._columns[regions]


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


@lru_cache(maxsize=1)
def driver_copier() -> DriverCopier:
    """The CUDA driver's copier. Raises TransferError where there is no driver."""
    return DriverCopier()


class DriverCopier:
    """`cuMemcpyBatchAsync` on one stream, or one `cuMemcpyAsync` a segment where that does not serve.

    Through ctypes and not cuda.bindings: NumPy arrays go to the driver as they are, where the bindings take a Python
    object for every address, a microsecond each on the thread that launches the model; and ctypes drops the GIL.
    """

    def __init__(self, max_copies_per_call: int = MAX_COPIES_PER_CALL) -> None:
        self._max_copies = max_copies_per_call
        self._driver = libcuda()
        # CUDA 13 dropped the index of the failing copy from the arguments; 12.8 brought the call.
        self._takes_fail_index = not hasattr(self._driver, "cuMemcpyBatchAsync_v2")
        name = "cuMemcpyBatchAsync" if self._takes_fail_index else "cuMemcpyBatchAsync_v2"
        self._batch = getattr(self._driver, name, None)
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
        """See `Copier`."""
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
        """Copy so few bytes that giving up Python's lock for the call, and waiting for it again, would take longer."""
        check(self._one(target, source, num_bytes, stream), "cuMemcpyAsync")

    def _copy_each(self, targets: int, sources: int, sizes: int, count: int, stream: int) -> None:
        arrays = [(ctypes.c_uint64 * count).from_address(address) for address in (targets, sources, sizes)]
        for target, source, size in zip(*arrays, strict=True):
            check(self._driver.cuMemcpyAsync(target, source, size, stream), "cuMemcpyAsync")
