"""The runs path: neighbours merged into long segments, copied by the DMA engines, which leave the model alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...types import Direction
from ..cuda.copier import driver_copier
from ..cuda.driver import Copier
from ..memory.host_pool import HostPool
from ..memory.layout import CacheLayout
from .base import BlockCopy, Int64s


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Copies of bytes that are contiguous on both sides: int64 arrays of shape (num_segments,), sizes in bytes."""

    device: Int64s
    host: Int64s
    sizes: Int64s

    def __len__(self) -> int:
        return len(self.sizes)


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
