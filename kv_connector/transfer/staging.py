"""The staged path: a kernel packs pieces into rows on the device, DMA moves whole rows. The reverse for loads.

    save    blocks --pack--> buffer --DMA--> host rows        the caller's stream packs and unpacks,
    load    blocks <-unpack- buffer <--DMA-- host rows        a stream of the ring's own copies

DMA engines do the slow part, over the link, and cost the model next to nothing; a chunk is copied while the next one is
packed. A chunk's host side is sorted, and a row is as long as a layer group's part of a host block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import ConfigError
from ..triton_kernels.copy_pieces import RegionTable, gather_pieces, scatter_pieces
from ..types import Direction
from .direct import IdUploads, RegionTables, UploadedIds
from .dma import Copier, driver_copier, merge_runs
from .host_pool import HostPool
from .layout import PIECE_ALIGN, CacheLayout
from .streams import Event, make_lane

NUM_BUFFERS = 2
"""Buffers a direction: one is packed while one is copied. On an H200 (2026-11-21) two and three of the same memory both
reach 53 of 55 GB/s, two with fewer chunks to submit; and beside a busy model it is the size of a chunk that counts."""


class _Ring:
    """One direction's staging buffers, and the stream that copies from or to them."""

    def __init__(self, device: torch.device, num_bytes: int, priority: int) -> None:
        self.lane = make_lane(device, priority, timing=False)
        self.buffer_bytes = num_bytes // NUM_BUFFERS // PIECE_ALIGN * PIECE_ALIGN
        self._buffers = torch.empty((NUM_BUFFERS, self.buffer_bytes), dtype=torch.uint8, device=device)
        self._free: list[Event | None] = [None] * NUM_BUFFERS
        self._next = 0

    def take(self, stream: Any) -> torch.Tensor:
        """The next buffer; what `stream` does from now on comes after its last use."""
        free = self._free[self._next]
        if free is not None:
            free.wait(stream)
            self.lane.recycle([free])
            self._free[self._next] = None
        return self._buffers[self._next]

    def give(self, stream: Any) -> None:
        """`stream` has the last use of the buffer that was taken."""
        self._free[self._next] = self.lane.mark(stream)
        self._next = (self._next + 1) % NUM_BUFFERS

    def pass_on(self, stream: Any, then: Any) -> None:
        """What `then` does from now on comes after what `stream` holds now."""
        position = self.lane.mark(stream)
        position.wait(then)
        self.lane.recycle([position])


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Consecutive regions whose row fits into a buffer; `start` is where they begin in a host block.

    `offsets` and `sizes` are the row's stretches without padding, usually one: padding is never copied, it would carry
    what the buffer held before to the host.
    """

    table: RegionTable
    start: int
    row_bytes: int
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def rows(self, buffer: torch.Tensor, count: int) -> torch.Tensor:
        """The buffer's first `count` rows."""
        return buffer[: count * self.row_bytes].view(count, self.row_bytes)


class StagedPath:
    """Packing kernel and DMA over a bounded ring (see `paths.CopyPath`): near the link's rate from 4 KiB pieces up."""

    def __init__(self, layout: CacheLayout, host: HostPool, staging_memory: int, copier: Copier | None = None) -> None:
        """`staging_memory` bytes of device memory serve both directions; `copier` replaces the CUDA driver in tests.

        Raises ConfigError where a piece does not fit into a buffer.
        """
        least = min_staging_memory(layout)
        if staging_memory < least:
            raise ConfigError(
                f"staging_memory={staging_memory} cannot hold the largest piece in each of {2 * NUM_BUFFERS} buffers: "
                f'give at least {least} bytes, or copy_path="runs"'
            )
        self._layout = layout
        self._host = host
        self._copier = copier if copier is not None else driver_copier()
        self._tables = RegionTables(layout)
        self._ids = IdUploads(layout.device)
        self._rings = {
            Direction.LOAD: _Ring(layout.device, staging_memory // 2, priority=-1),
            Direction.SAVE: _Ring(layout.device, staging_memory // 2, priority=0),
        }
        largest = self._rings[Direction.LOAD].buffer_bytes // PIECE_ALIGN
        self._slots = torch.arange(min(layout.num_blocks, largest), dtype=torch.int64, device=layout.device)
        self._row_numbers = np.arange(len(self._slots), dtype=np.int64)
        self._parts: dict[range, tuple[_Part, ...]] = {}
        if layout.device.type == "cuda":
            self._compile()

    def copy(
        self, direction: Direction, regions: range, device_ids: NDArray[np.int64], host_ids: NDArray[np.int64]
    ) -> None:
        """See `CopyPath.copy`."""
        ring = self._rings[direction]
        current = ring.lane.current()
        move = self._load_chunk if direction is Direction.LOAD else self._save_chunk
        ids = self._ids.get(direction, device_ids, host_ids)
        try:
            for part in self._fitting_parts(regions, ring.buffer_bytes):
                most = min(ring.buffer_bytes // part.row_bytes, len(self._slots))
                num_chunks = -(-len(ids.host_ids) // most)
                rows = -(-len(ids.host_ids) // num_chunks)
                for first in range(0, len(ids.host_ids), rows):
                    move(ring, current, part, ids, slice(first, first + rows))
        finally:
            ring.pass_on(ring.lane.stream, current)
            self._ids.used()

    def close(self) -> None:
        """See `CopyPath.close`."""
        self._ids.close()
        self._rings = {}

    def _compile(self) -> None:
        """Compile both kernels, on bytes that stay what they are.

        The first load would wait for the compiler otherwise, and be taken for the speed of the link.
        """
        ring = self._rings[Direction.LOAD]
        part = self._fitting_parts(range(1), ring.buffer_bytes)[0]
        rows = part.rows(ring.take(ring.lane.current()), 1)
        gather_pieces(part.table, self._slots[:1], rows, self._slots[:1], flat_shift=-part.start)
        scatter_pieces(part.table, self._slots[:1], rows, self._slots[:1], flat_shift=-part.start)
        ring.give(ring.lane.current())

    def _save_chunk(self, ring: _Ring, current: Any, part: _Part, ids: UploadedIds, chunk: slice) -> None:
        block_ids = ids.device_ids_there[chunk]
        rows = part.rows(ring.take(current), len(block_ids))
        gather_pieces(part.table, block_ids, rows, self._slots[: len(rows)], flat_shift=-part.start)
        ring.pass_on(current, ring.lane.stream)
        self._copy_rows(Direction.SAVE, ring.lane.handle, part, rows, ids.host_ids[chunk])
        ring.give(ring.lane.stream)

    def _load_chunk(self, ring: _Ring, current: Any, part: _Part, ids: UploadedIds, chunk: slice) -> None:
        block_ids = ids.device_ids_there[chunk]
        # The host's bytes are there already: only the buffer has to be free, not what the caller's stream waits for.
        rows = part.rows(ring.take(ring.lane.stream), len(block_ids))
        self._copy_rows(Direction.LOAD, ring.lane.handle, part, rows, ids.host_ids[chunk])
        ring.pass_on(ring.lane.stream, current)
        scatter_pieces(part.table, block_ids, rows, self._slots[: len(rows)], flat_shift=-part.start)
        ring.give(current)

    def _copy_rows(
        self, direction: Direction, stream: int, part: _Part, rows: torch.Tensor, host_ids: NDArray[np.int64]
    ) -> None:
        count = len(host_ids)
        slots = self._row_numbers[:count] * part.row_bytes + (rows.data_ptr() - part.start)
        blocks = host_ids * self._host.block_bytes + self._host.tensor.data_ptr()
        device = (slots[:, None] + part.offsets).ravel()
        host = (blocks[:, None] + part.offsets).ravel()
        sizes = np.tile(part.sizes, count)
        if part.sizes[0] == self._host.block_bytes:  # else a gap parts every row from the next
            segments = merge_runs(device, host, sizes, host_ids // self._host.blocks_per_piece)
            device, host, sizes = segments.device, segments.host, segments.sizes
        targets, sources = (device, host) if direction is Direction.LOAD else (host, device)
        self._copier(targets, sources, sizes, self._host.is_pinned, stream)

    def _fitting_parts(self, regions: range, buffer_bytes: int) -> tuple[_Part, ...]:
        """The regions, cut where the row of a block would outgrow a buffer."""
        if regions not in self._parts:
            ranges = []
            start = regions.start
            for region in regions:
                if _row_bytes(self._layout, range(start, region + 1)) > buffer_bytes:
                    ranges.append(range(start, region))
                    start = region
            ranges.append(range(start, regions.stop))
            self._parts[regions] = tuple(self._part(entry) for entry in ranges)
        return self._parts[regions]

    def _part(self, regions: range) -> _Part:
        pieces = self._layout.regions[regions.start : regions.stop]
        offsets = np.array([region.offset for region in pieces], dtype=np.int64)
        sizes = np.array([region.piece_bytes for region in pieces], dtype=np.int64)
        stretches = merge_runs(offsets, offsets, sizes, np.zeros_like(sizes))
        return _Part(
            table=self._tables.part(regions),
            start=pieces[0].offset,
            row_bytes=_row_bytes(self._layout, regions),
            offsets=stretches.host,
            sizes=stretches.sizes,
        )


def min_staging_memory(layout: CacheLayout) -> int:
    """Bytes that the rings need at least: every buffer holds the largest piece."""
    largest = max(_row_bytes(layout, range(i, i + 1)) for i in range(len(layout.regions)))
    return 2 * NUM_BUFFERS * largest


def _row_bytes(layout: CacheLayout, part: range) -> int:
    return -(-layout.host_slice(part)[1] // PIECE_ALIGN) * PIECE_ALIGN
