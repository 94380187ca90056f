"""Writes into another engine's pool that is mapped here: by DMA where runs are long, else by a kernel of ours.

A copy engine takes a microsecond or two for each run, in which NVLink moves half a megabyte; a kernel's programs store
to the other GPU's memory as they do to their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..cuda.copier import driver_copier
from ..cuda.driver import Copier
from ..cuda.streams import Lane, Priority, make_lane
from ..memory.layout import CacheLayout
from .base import Int64s
from .runs import Segments, merge_runs

if TYPE_CHECKING:
    from ...triton_kernels.copy_pieces import RegionTable

LEAST_DMA_BYTES = 512 << 10
"""Of a run. Between two H200s of NVLink 4 (2026-11-22) copy engines move runs of 256 KiB at 0.88 of one large copy, the
kernel at 0.92 with the multiprocessors that it takes from the model; runs of 1 MiB 0.96 and 0.91."""
DMA_STREAMS = 6
"""A copy engine rests between two runs, and others move bytes meanwhile: 0.91 of a large copy on 1 stream, 0.94 on 4,
0.97 on 6, for runs of 2 MiB."""
_PART_RUNS = 64


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """Regions, those joined that are neighbours in both pools: int64 of shape (num_columns,)."""

    own_bases: Int64s
    bases: Int64s
    own_strides: Int64s
    strides: Int64s
    sizes: Int64s

    def mean_run(self, source_ids: Int64s, target_ids: Int64s) -> float:
        """Bytes that a copy engine would move at a time."""
        num_ends = 1 + np.count_nonzero((np.diff(source_ids) != 1) | (np.diff(target_ids) != 1))
        is_dense = (self.sizes == self.strides) & (self.sizes == self.own_strides)
        num_runs = np.where(is_dense, num_ends, len(source_ids)).sum()
        return float(self.sizes.sum() * len(source_ids) / num_runs)

    def runs(self, source_ids: Int64s, target_ids: Int64s) -> Segments:
        """The copies, with the other pool as host side; column by column, so that neighbouring blocks stay so."""
        sizes = np.repeat(self.sizes, len(source_ids))
        return merge_runs(
            (self.own_bases[:, None] + source_ids * self.own_strides[:, None]).ravel(),
            (self.bases[:, None] + target_ids * self.strides[:, None]).ravel(),
            sizes,
            np.zeros_like(sizes),
        )


class RemoteWriters:
    """Makes writers into other engines' pools, which come and go: all of them use these streams and this memory for
    ids. One thread calls, them too; copies are enqueued on the lane's stream."""

    def __init__(self, layout: CacheLayout, lane: Lane, copier: Copier | None = None) -> None:
        """`copier` replaces the CUDA driver in tests."""
        from ..cuda.uploads import IdUploads

        self.layout = layout
        self.lane = lane
        self.beside = [make_lane(layout.device, Priority.PEER, timing=False) for _ in range(DMA_STREAMS - 1)]
        self.copier = copier if copier is not None else driver_copier()
        self.ids = IdUploads(layout.device, sides=2, in_order=True)

    def writer(self, bases: Int64s, strides: Int64s) -> RemoteWriter:
        """`bases` and `strides`, int64 of shape (num_regions,), say where the other pool's pieces lie: that of block b
        at `bases[r] + b * strides[r]`. Blocks the host until a table of them is on the device. Raises TransferError."""
        return RemoteWriter(self, bases, strides)


class RemoteWriter:
    """Writes blocks of this pool into one other pool. May go when nothing that it has enqueued is under way."""

    def __init__(self, shared: RemoteWriters, bases: Int64s, strides: Int64s) -> None:
        """See `RemoteWriters.writer`."""
        from ..cuda.uploads import upload_table

        self._shared = shared
        self._lane = shared.lane
        self._bases, self._strides = bases, strides
        regions = shared.layout.regions
        self._own_bases = np.array([region.data_ptr for region in regions], dtype=np.int64)
        self._own_strides = np.array([region.block_stride for region in regions], dtype=np.int64)
        self._sizes = np.array([region.piece_bytes for region in regions], dtype=np.int64)
        self._base = int(bases.min())
        with torch.cuda.stream(self._lane.stream):
            self._table = upload_table(regions, (bases - self._base).tolist())
        self._tables: dict[range, RegionTable] = {}
        self._columns: dict[range, _Columns] = {}
        self._changes = np.flatnonzero(np.diff(strides)) + 1  # where the next stride differs

    def write(
        self, source_ids: Int64s, target_ids: Int64s, regions: range, may_write: Callable[[], bool] = lambda: True
    ) -> bool:
        """Copy these consecutive regions of block `source_ids[i]` to the other pool's block `target_ids[i]`; not if
        `may_write`, asked right in front of the first copy, says no, which is the answer then.

        Ids are int64 of shape (num_blocks,), at least one, in range, `target_ids` without repetition. Raises what torch
        raises, or TransferError; what the lane's stream holds then may be a part of it.
        """
        columns = self._merged_columns(regions)
        with self._lane.on_device():
            if columns.mean_run(source_ids, target_ids) >= LEAST_DMA_BYTES:
                runs = columns.runs(source_ids, target_ids)
                if is_written := may_write():
                    self._write_runs(runs)
                return is_written
            return self._write_pieces(source_ids, target_ids, regions, may_write)

    def _write_runs(self, runs: Segments) -> None:
        """In short parts, each on the next of the lane's stream and those beside it, so that all begin early."""
        beside, stream = self._shared.beside, self._lane.stream
        start = self._lane.mark(stream)
        for lane in beside:
            start.wait(lane.stream)
        lanes = (self._lane, *beside)
        to, by, sizes = (array.ctypes.data for array in (runs.host, runs.device, runs.sizes))
        try:
            for number, first in enumerate(range(0, len(runs), _PART_RUNS)):
                count, skipped = min(_PART_RUNS, len(runs) - first), 8 * first
                handle = lanes[number % DMA_STREAMS].handle
                self._shared.copier(to + skipped, by + skipped, sizes + skipped, count, True, handle)
        finally:  # where a part fails, those in front of it run all the same
            for lane in beside:
                end = lane.mark(lane.stream)
                end.wait(stream)
                lane.recycle([end])
            self._lane.recycle([start])

    def _merged_columns(self, regions: range) -> _Columns:
        if regions not in self._columns:
            own, other, own_strides, strides, sizes = (
                column[regions.start : regions.stop]
                for column in (self._own_bases, self._bases, self._own_strides, self._strides, self._sizes)
            )
            changes = (np.diff(own_strides) != 0) | (np.diff(strides) != 0)
            runs = merge_runs(own, other, sizes, np.concatenate(([0], np.cumsum(changes))))
            kept = np.searchsorted(np.cumsum(sizes) - sizes, np.cumsum(runs.sizes) - runs.sizes)
            self._columns[regions] = _Columns(runs.device, runs.host, own_strides[kept], strides[kept], runs.sizes)
        return self._columns[regions]

    def _write_pieces(
        self, source_ids: Int64s, target_ids: Int64s, regions: range, may_write: Callable[[], bool]
    ) -> bool:
        from ...triton_kernels.copy_pieces import send_pieces

        stream = self._lane.stream
        there = self._shared.ids.get(source_ids, target_ids, stream).there
        try:
            if not may_write():
                return False
            for part in self._equal_strides(regions):
                send_pieces(
                    self._tables.setdefault(part, self._table.narrow(part.start, len(part))),
                    there,
                    len(source_ids),
                    self._base,
                    int(self._strides[part.start]),
                    stream=stream,
                )
            return True
        finally:
            self._shared.ids.used(stream)

    def _equal_strides(self, regions: range) -> list[range]:
        inner = [int(i) for i in self._changes if regions.start < i < regions.stop]
        return [range(start, stop) for start, stop in pairwise([regions.start, *inner, regions.stop])]
