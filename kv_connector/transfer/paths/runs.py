"""The runs path: what the DMA engines copy by themselves, which leave the model alone.

Neighbours are merged into long segments; a block's pieces that are long and lie evenly apart in one allocation are one
pitched copy. A driver that refuses one is asked for no other: pieces are segments from then on.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...errors import TransferError
from ...types import Direction
from ..costs.curves import LEAST_PITCHED_BYTES
from ..cuda.driver import Copier
from ..cuda.pitched import MOST_PITCH, Pitch, PitchedCopier, copy_pitched, pitched_copies
from ..cuda.turns import make_turn_taking, turn_taking_copiers
from ..memory.host_form import HostForm
from ..memory.host_pool import HostPool
from .base import SLICE_BYTES, BlockCopy, Int64s

logger = logging.getLogger("kv_connector.transfer")


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
    """Regions, those joined that are adjacent on both sides: an entry each, `piece_bytes` are `sizes` again.

    `pitch` says how they lie, where a copy engine takes all of a block's at once. `may_join`: a block is one piece, and
    may be adjacent to another on both sides; else no two are, whatever their ids, and nothing needs an order.
    """

    bases: Int64s
    strides: Int64s
    sizes: Int64s
    offsets: Int64s
    piece_bytes: tuple[int, ...]
    pitch: Pitch | None
    may_join: bool


class RunsPath:
    """Copies merged segments, in a call of the driver from one turn to the next, or pitched rows (see `CopyPath`)."""

    def __init__(
        self,
        form: HostForm,
        host: HostPool,
        copier: Copier | None = None,
        pitched: PitchedCopier = copy_pitched,
        least_pitched: int = LEAST_PITCHED_BYTES,
    ) -> None:
        """`copier` and `pitched` replace the CUDA driver in tests. Pieces of less than `least_pitched` bytes are
        segments, however they lie."""
        self._form = form
        self._host = host
        self._turn_taking = make_turn_taking(form.layout.device)
        self._copiers = turn_taking_copiers(self._turn_taking, copier)
        self._pitched = pitched
        self._least_pitched = least_pitched
        self._is_refused = False  # a pitched copy was
        self._columns: dict[range, _Columns] = {}

    def copy(self, copy: BlockCopy) -> None:
        """See `CopyPath.copy`."""
        if not self.is_pitched(copy.regions) or not self._copy_pitched(copy):
            self.submit(copy, self.plan(copy))

    def slice_bytes(self, direction: Direction) -> int:
        """See `CopyPath.slice_bytes`."""
        return SLICE_BYTES

    def is_pitched(self, regions: range) -> bool:
        """Whether all of a block's pieces in these regions are one copy for a copy engine."""
        return self._host.is_pinned and not self._is_refused and self._merged_columns(regions).pitch is not None

    def submit(self, copy: BlockCopy, plan: Segments) -> None:
        """Copy what `plan` returned for it."""
        load = copy.direction is Direction.LOAD
        targets, sources = (plan.device, plan.host) if load else (plan.host, plan.device)
        to, by, sizes = targets.ctypes.data, sources.ctypes.data, plan.sizes.ctypes.data
        handle = None if copy.stream is None else copy.stream.cuda_stream
        self._copiers[copy.pace](to, by, sizes, len(plan), self._host.is_pinned, handle)

    def plan(self, copy: BlockCopy) -> Segments:
        """The segments of it."""
        columns = self._merged_columns(copy.regions)
        if not columns.may_join:
            return self._segments(copy.device_ids, copy.host_ids, columns)
        order = np.argsort(copy.host_ids, kind="stable")
        device_ids, host_ids = copy.device_ids[order], copy.host_ids[order]
        blocks = self._segments(device_ids, host_ids, columns)  # one each, whole
        return merge_runs(blocks.device, blocks.host, blocks.sizes, host_ids // self._host.blocks_per_piece)

    def piece_bytes(self, regions: range) -> tuple[int, ...]:
        """Lengths of a block's pieces, those joined that are adjacent on both sides."""
        return self._merged_columns(regions).piece_bytes

    def close(self) -> None:
        """Nothing is held."""

    def _segments(self, device_ids: Int64s, host_ids: Int64s, columns: _Columns) -> Segments:
        """One for each piece, block by block."""
        device = columns.bases + device_ids[:, None] * columns.strides
        host = host_ids[:, None] * self._host.block_bytes + (columns.offsets + self._host.tensor.data_ptr())
        return Segments(device.ravel(), host.ravel(), np.tile(columns.sizes, len(device)))

    def _copy_pitched(self, copy: BlockCopy) -> bool:
        """False where the driver refuses one of the copies: those in front of it are enqueued, and may be again."""
        columns = self._merged_columns(copy.regions)
        assert columns.pitch is not None, "the caller has asked"
        device = columns.bases[0] + copy.device_ids * columns.strides[0]
        host = self._host.tensor.data_ptr() + copy.host_ids * self._host.block_bytes + columns.offsets[0]
        handle = None if copy.stream is None else copy.stream.cuda_stream
        copies = pitched_copies(copy.direction, columns.pitch, device, host)
        sizes = np.full(len(copies), columns.pitch.num_bytes)
        try:
            for first, stop in self._turn_taking[copy.pace].stretches(sizes, handle):
                self._pitched(copies[first:stop], handle)
        except TransferError as error:  # saves have no other path to be tried on
            if not self._is_refused:  # as the other direction's thread may have found out
                logger.warning("no pitched copies from now on, pieces are copied one by one: %s", error)
            self._is_refused = True
            return False
        return True

    def _merged_columns(self, regions: range) -> _Columns:
        """Those of the regions."""
        if regions not in self._columns:
            part = self._form.layout.regions[regions.start : regions.stop]
            bases = np.array([region.data_ptr for region in part], dtype=np.int64)
            offsets = np.array(self._form.offsets[regions.start : regions.stop], dtype=np.int64)
            strides = np.array([region.block_stride for region in part], dtype=np.int64)
            sizes = np.array([region.piece_bytes for region in part], dtype=np.int64)
            # A driver may refuse a copy from one allocation into the next, and then gets no pitched one any more.
            is_one = len({region.view.untyped_storage().data_ptr() for region in part}) == 1
            merged = merge_runs(bases, offsets, sizes, strides)
            kept = np.searchsorted(offsets, merged.host)
            columns = merged.device, strides[kept], merged.sizes, merged.host
            self._columns[regions] = _Columns(
                *columns,
                piece_bytes=tuple(merged.sizes.tolist()),
                pitch=_pitch_of(*columns, self._least_pitched) if is_one else None,
                may_join=merged.sizes.tolist() == strides[kept].tolist() == [self._host.block_bytes],
            )
        return self._columns[regions]


def _pitch_of(bases: Int64s, strides: Int64s, sizes: Int64s, offsets: Int64s, least: int) -> Pitch | None:
    """How several pieces of a block lie, if all are as long, `least` bytes or more, and evenly apart on both sides."""
    steps = [set(np.diff(column).tolist()) for column in (bases, offsets)]
    if len(sizes) < 2 or any(len(set(column.tolist())) > 1 for column in (sizes, strides)) or max(map(len, steps)) > 1:
        return None
    (device_bytes,), (host_bytes,), piece_bytes = *steps, int(sizes[0])
    is_fit = piece_bytes >= least and piece_bytes <= device_bytes <= MOST_PITCH
    return Pitch(len(sizes), piece_bytes, device_bytes, host_bytes) if is_fit else None
