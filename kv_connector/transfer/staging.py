"""The staged path: a kernel packs pieces into rows on the device, DMA moves whole rows. The reverse for loads.

    save    blocks --pack--> buffer --DMA--> host rows        the caller's stream packs and unpacks,
    load    blocks <-unpack- buffer <--DMA-- host rows        a stream of the ring's own copies

DMA engines do the slow part, over the link, and cost the model next to nothing; a chunk is copied while the next one is
packed. A chunk's host side is sorted, and a row is as long as a layer group's part of a host block.
"""

from __future__ import annotations

from collections.abc import Iterator
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

Int64s = NDArray[np.int64]

NUM_BUFFERS = 2
"""Buffers a direction: one is packed while one is copied. On an H200 (2026-11-21) two and three of the same memory both
reach 53 of 55 GB/s, two with fewer chunks to submit; and beside a busy model it is the size of a chunk that counts."""


class _Ring:
    """One direction's staging buffers, and the stream that copies from or to them."""

    def __init__(self, device: torch.device, num_bytes: int, priority: int) -> None:
        self.lane = make_lane(device, priority, timing=False)
        self.buffer_bytes = num_bytes // NUM_BUFFERS // PIECE_ALIGN * PIECE_ALIGN
        self.buffers = torch.empty((NUM_BUFFERS, self.buffer_bytes), dtype=torch.uint8, device=device)
        self._free: list[Event | None] = [None] * NUM_BUFFERS
        self._next = 0

    def take(self, stream: Any) -> int:
        """Number of the next buffer; what `stream` does from now on comes after its last use."""
        free = self._free[self._next]
        if free is not None:
            free.wait(stream)
            self.lane.recycle([free])
            self._free[self._next] = None
        return self._next

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
    """Consecutive regions whose row fits into a buffer of one direction; `start` is where they begin in a host block.

    All that is the same for every chunk is made once, so that a chunk costs the launching thread little more than its
    launch and its call of the driver: `rows[b]` are the rows of buffer b, uint8 of shape (most_rows, row_bytes), and
    `addresses[b]` and `sizes` those of their stretches without padding, usually one a row: padding is never copied, it
    would carry what the buffer held before to the host.
    """

    table: RegionTable
    start: int
    offsets: Int64s  # of a row's stretches in a host block
    rows: tuple[torch.Tensor, ...]
    addresses: tuple[Int64s, ...]
    sizes: Int64s

    @property
    def most_rows(self) -> int:
        """That a chunk can have."""
        return len(self.rows[0])


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """Some rows of a copy: device block ids on the device, and the host's side of their stretches, by row."""

    block_ids: torch.Tensor
    addresses: Int64s
    pieces: Int64s | None  # which registered piece of host memory each lies in; None where no two are neighbours


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
        self._parts: dict[tuple[Direction, range], tuple[_Part, ...]] = {}
        if layout.device.type == "cuda":
            self._compile()

    def copy(self, direction: Direction, regions: range, device_ids: Int64s, host_ids: Int64s) -> None:
        """See `CopyPath.copy`."""
        ring = self._rings[direction]
        current = ring.lane.current()
        move = self._load_chunk if direction is Direction.LOAD else self._save_chunk
        ids = self._ids.get(direction, device_ids, host_ids)
        try:
            for part in self._fitting_parts(direction, regions):
                for chunk in self._chunks(part, ids):
                    move(ring, current, part, chunk)
        finally:
            ring.pass_on(ring.lane.stream, current)
            self._ids.used()

    def close(self) -> None:
        """See `CopyPath.close`."""
        self._ids.close()
        self._rings, self._parts = {}, {}

    def _compile(self) -> None:
        """Compile both kernels, on bytes that stay what they are.

        The first load would wait for the compiler otherwise, and be taken for the speed of the link.
        """
        ring = self._rings[Direction.LOAD]
        part = self._fitting_parts(Direction.LOAD, range(1))[0]
        rows = part.rows[ring.take(ring.lane.current())]
        for _ in range(2):  # the second call is the one that service makes
            gather_pieces(part.table, self._slots[:1], rows, self._slots[:1], flat_shift=-part.start)
            scatter_pieces(part.table, self._slots[:1], rows, self._slots[:1], flat_shift=-part.start)
        ring.give(ring.lane.current())

    def _chunks(self, part: _Part, ids: UploadedIds) -> Iterator[_Chunk]:
        """The rows of a copy in equal chunks that fit into a buffer."""
        count, width = len(ids.host_ids), len(part.offsets)
        num_chunks = -(-count // part.most_rows)
        num_rows = -(-count // num_chunks)
        addresses = ids.host_ids * self._host.block_bytes + self._host.tensor.data_ptr()
        addresses = (addresses[:, None] + part.offsets).ravel()
        pieces = None
        # A gap parts every row from the next, except where a row is all of its block.
        if part.sizes[0] == self._host.block_bytes and np.any(np.diff(ids.host_ids) == 1):
            pieces = ids.host_ids // self._host.blocks_per_piece
        for first in range(0, count, num_rows):
            rows = slice(first, first + num_rows)
            stretches = slice(first * width, (first + num_rows) * width)
            yield _Chunk(ids.device_ids_there[rows], addresses[stretches], None if pieces is None else pieces[rows])

    def _save_chunk(self, ring: _Ring, current: Any, part: _Part, chunk: _Chunk) -> None:
        buffer, slots = ring.take(current), self._slots[: len(chunk.block_ids)]
        gather_pieces(part.table, chunk.block_ids, part.rows[buffer], slots, flat_shift=-part.start)
        ring.pass_on(current, ring.lane.stream)
        self._copy_rows(Direction.SAVE, ring, part, buffer, chunk)
        ring.give(ring.lane.stream)

    def _load_chunk(self, ring: _Ring, current: Any, part: _Part, chunk: _Chunk) -> None:
        # The host's bytes are there already: only the buffer has to be free, not what the caller's stream waits for.
        buffer, slots = ring.take(ring.lane.stream), self._slots[: len(chunk.block_ids)]
        self._copy_rows(Direction.LOAD, ring, part, buffer, chunk)
        ring.pass_on(ring.lane.stream, current)
        scatter_pieces(part.table, chunk.block_ids, part.rows[buffer], slots, flat_shift=-part.start)
        ring.give(current)

    def _copy_rows(self, direction: Direction, ring: _Ring, part: _Part, buffer: int, chunk: _Chunk) -> None:
        count = len(chunk.addresses)
        device, host, sizes = part.addresses[buffer][:count], chunk.addresses, part.sizes[:count]
        if chunk.pieces is not None:
            segments = merge_runs(device, host, sizes, chunk.pieces)
            device, host, sizes = segments.device, segments.host, segments.sizes
        targets, sources = (device, host) if direction is Direction.LOAD else (host, device)
        self._copier(targets, sources, sizes, self._host.is_pinned, ring.lane.handle)

    def _fitting_parts(self, direction: Direction, regions: range) -> tuple[_Part, ...]:
        """The regions, cut where the row of a block would outgrow a buffer."""
        key = direction, regions
        if key not in self._parts:
            ring = self._rings[direction]
            ranges = []
            start = regions.start
            for region in regions:
                if _row_bytes(self._layout, range(start, region + 1)) > ring.buffer_bytes:
                    ranges.append(range(start, region))
                    start = region
            ranges.append(range(start, regions.stop))
            self._parts[key] = tuple(self._part(ring, entry) for entry in ranges)
        return self._parts[key]

    def _part(self, ring: _Ring, regions: range) -> _Part:
        pieces = self._layout.regions[regions.start : regions.stop]
        offsets = np.array([region.offset for region in pieces], dtype=np.int64)
        sizes = np.array([region.piece_bytes for region in pieces], dtype=np.int64)
        stretches = merge_runs(offsets, offsets, sizes, np.zeros_like(sizes))
        start, row_bytes = pieces[0].offset, _row_bytes(self._layout, regions)
        most_rows = min(ring.buffer_bytes // row_bytes, len(self._slots))
        rows = tuple(buffer[: most_rows * row_bytes].view(most_rows, row_bytes) for buffer in ring.buffers)
        row_offsets = np.arange(most_rows, dtype=np.int64)[:, None] * row_bytes + (stretches.host - start)
        return _Part(
            table=self._tables.part(regions),
            start=start,
            offsets=stretches.host,
            rows=rows,
            addresses=tuple((row_offsets + buffer.data_ptr()).ravel() for buffer in rows),
            sizes=np.tile(stretches.sizes, most_rows),
        )


def min_staging_memory(layout: CacheLayout) -> int:
    """Bytes that the rings need at least: every buffer holds the largest piece."""
    largest = max(_row_bytes(layout, range(i, i + 1)) for i in range(len(layout.regions)))
    return 2 * NUM_BUFFERS * largest


def _row_bytes(layout: CacheLayout, part: range) -> int:
    return -(-layout.host_slice(part)[1] // PIECE_ALIGN) * PIECE_ALIGN
