"""The staged path: a kernel packs pieces into rows on the device, DMA moves whole rows. The reverse for loads.

    save    blocks --pack--> buffer --DMA--> host rows        each buffer's own stream packs and unpacks,
    load    blocks <-unpack- buffer <--DMA-- host rows        a stream of the ring's copies

DMA engines do the slow part, over the link, and cost the model next to nothing; a chunk is copied while the next one is
packed. A chunk's host side is sorted, and a row is as long as a layer group's part of a host block. Beside a busy model
kernels start only where one of its own ends. Those of several buffers wait side by side and start together; of one
stream each would wait for an end of its own, and the link meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from ...errors import ConfigError
from ...types import Direction
from ..costs.curves import EDGE_BYTES
from ..cuda.allocations import device_tensor
from ..cuda.driver import Copier
from ..cuda.streams import Event, Priority, make_lane, make_stream
from ..cuda.turns import make_turn_taking, turn_taking_copiers
from ..cuda.uploads import IdUploads, UploadedIds
from ..memory.host_form import PIECE_ALIGN, HostForm
from ..memory.host_pool import HostPool
from .base import LONG_SLICE_BYTES, BlockCopy, Int64s
from .packing import Packing, PartTables, Verdicts
from .runs import merge_runs

NUM_BUFFERS = 3
"""Buffers a direction. Beside a busy model one is packed at each end of its kernels, 1.4 ms apart for large products,
and what lies in the others has to keep the link busy until then: of 128 MiB, 2.4 ms of the link, three are enough and
two not quite. More are more chunks to submit."""
_JOINED_BYTES = 256 << 10
"""Neighbouring rows below this are copied as one; DMA hardly gains beyond, and joining takes the thread's time."""
_PRIORITIES = {Direction.LOAD: Priority.PACK_LOAD, Direction.SAVE: Priority.PACK_SAVE}


class _Buffer:
    """Staging memory with the stream of its kernels; `free` is the end of its last use."""

    def __init__(self, memory: torch.Tensor, priority: Priority) -> None:
        self.memory = memory
        self.stream = make_stream(memory.device, priority)
        self.free: Event | None = None


class _Ring:
    """One direction's staging buffers, and the lane that copies from or to them."""

    def __init__(self, device: torch.device, num_bytes: int, priority: Priority) -> None:
        self.lane = make_lane(device, priority, timing=False)
        self.buffer_bytes = num_bytes // NUM_BUFFERS // PIECE_ALIGN * PIECE_ALIGN
        memory = device_tensor((NUM_BUFFERS, self.buffer_bytes), torch.uint8, device)
        self.buffers = [_Buffer(memory[i], priority) for i in range(NUM_BUFFERS)]
        self._next = 0

    def take(self, stream: Any = None) -> int:
        """Number of the next buffer; what `stream`, its own by default, does from now on comes after its last use."""
        number = self._next
        self._next = (number + 1) % NUM_BUFFERS
        buffer = self.buffers[number]
        if buffer.free is not None:
            buffer.free.wait(buffer.stream if stream is None else stream)
            self.lane.recycle([buffer.free])
            buffer.free = None
        return number

    def give(self, number: int, stream: Any) -> None:
        """`stream` has the last use of the buffer that was taken."""
        self.buffers[number].free = self.lane.mark(stream)

    def pass_on(self, stream: Any, *then: Any) -> None:
        """What each of `then` does from now on comes after what `stream` holds now."""
        position = self.lane.mark(stream)
        for follower in then:
            position.wait(follower)
        self.lane.recycle([position])

    def fork(self, stream: Any) -> None:
        """Kernels come after what `stream` holds now."""
        self.pass_on(stream, *(buffer.stream for buffer in self.buffers))

    def join(self, stream: Any) -> None:
        """What `stream` does from now on comes after all that the ring has enqueued."""
        for own in (self.lane.stream, *(buffer.stream for buffer in self.buffers)):
            self.pass_on(own, stream)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Consecutive regions whose row fits into a buffer of one direction.

    All that is the same for every chunk is made once, so that a chunk costs the thread that submits it little more than
    its launch and its call of the driver: `rows[b]` are the rows of buffer b, uint8 of shape (most_rows, row_bytes),
    and `addresses[b]` and `sizes` those of their stretches without padding, usually one a row: padding is never copied,
    it would carry what the buffer held before to the host. `pointers` are where those arrays lie, the sizes' last.
    """

    tables: PartTables
    offsets: Int64s  # of a row's stretches in a host block
    rows: tuple[torch.Tensor, ...]
    addresses: tuple[Int64s, ...]
    sizes: Int64s
    pointers: tuple[int, ...]

    @property
    def most_rows(self) -> int:
        """That a chunk can have."""
        return self.rows[0].shape[0]


class _Chunk(NamedTuple):
    """`num_rows` blocks of a copy from `first` on; `addresses` are the host's side of all of the copy's stretches, and
    `verdicts` those of a save's rows."""

    block_ids: torch.Tensor
    first: int
    num_rows: int
    addresses: Int64s
    pointer: int  # of the chunk's addresses
    verdicts: Verdicts
    copier: Copier
    pieces: Int64s | None  # which registered piece of host memory each lies in; None where no two are neighbours


class StagedPath:
    """Packing kernel and DMA over a bounded ring (see `CopyPath`): near the link's rate from 4 KiB pieces up."""

    def __init__(self, form: HostForm, host: HostPool, staging_memory: int, copier: Copier | None = None) -> None:
        """`staging_memory` bytes of device memory serve both directions; `copier` replaces the CUDA driver in tests.

        Raises ConfigError where a piece does not fit into a buffer.
        """
        least = min_staging_memory(form)
        if staging_memory < least:
            other = 'host_form="raw"' if form.name else 'copy_path="runs"'
            raise ConfigError(
                f"staging_memory={staging_memory} cannot hold the largest piece in each of {2 * NUM_BUFFERS} buffers: "
                f"give at least {least} bytes, or {other}"
            )
        device = form.layout.device
        self._form = form
        self._host = host
        self._copiers = turn_taking_copiers(make_turn_taking(device), copier)
        self._packing = Packing(form)
        self._ids = {way: IdUploads(device, sides=1, in_order=True) for way in Direction}
        self._rings = {way: _Ring(device, staging_memory // 2, _PRIORITIES[way]) for way in Direction}
        self._parts: dict[tuple[Direction, range], tuple[_Part, ...]] = {}
        if device.type == "cuda":
            with self._rings[Direction.LOAD].lane.on_device():
                self._compile()

    def copy(self, copy: BlockCopy) -> None:
        """See `CopyPath.copy`."""
        direction = copy.direction
        ring, uploads = self._rings[direction], self._ids[direction]
        move = self._load_chunk if direction is Direction.LOAD else self._save_chunk
        ids = uploads.get(copy.device_ids, copy.host_ids, copy.stream)
        verdicts = self._packing.no_verdicts
        if direction is Direction.SAVE and self._packing.may_refuse:
            verdicts = self._packing.verdicts(len(ids.host_ids))
            copy.refusals.append(partial(verdicts.refused, ids.host_ids))
        copier = self._copiers[copy.pace]
        ring.fork(copy.stream)
        try:
            for part in self._fitting_parts(direction, copy.regions):
                for chunk in self._chunks(direction, part, ids, verdicts, copier):
                    move(ring, part, chunk)
        finally:
            ring.join(copy.stream)
            uploads.used(copy.stream)

    def slice_bytes(self, direction: Direction) -> int:
        """See `CopyPath.slice_bytes`: the ring runs empty between two copies, until the next one's first chunk is
        packed, which beside a busy model begins where one of its kernels ends."""
        return LONG_SLICE_BYTES

    def close(self) -> None:
        """See `CopyPath.close`."""
        for uploads in self._ids.values():
            uploads.close()
        self._rings, self._parts, self._ids = {}, {}, {}

    def _compile(self) -> None:
        """Compile all kernels.

        The first load would wait for the compiler otherwise, and be taken for the speed of the link.
        """
        ring = self._rings[Direction.LOAD]
        ring.fork(ring.lane.current())
        self._packing.compile(ring.buffers[0].stream)

    def _chunks(
        self, direction: Direction, part: _Part, ids: UploadedIds, verdicts: Verdicts, copier: Copier
    ) -> Iterator[_Chunk]:
        """The rows of a copy in equal chunks that fit into a buffer, but for a short one at the exposed end."""
        host_ids, width = ids.host_ids, len(part.offsets)
        addresses = host_ids * self._host.block_bytes + self._host.tensor.data_ptr()
        addresses = (addresses[:, None] + part.offsets).ravel()
        pieces = None
        # A gap parts every row from the next, except where a row is all of its block; long ones gain nothing.
        if part.sizes[0] == self._host.block_bytes < _JOINED_BYTES and np.any(host_ids[1:] == host_ids[:-1] + 1):
            pieces = host_ids // self._host.blocks_per_piece
        pointer, first = addresses.ctypes.data, 0
        for count in chunk_rows(direction, len(host_ids), part.most_rows, EDGE_BYTES // part.rows[0].stride(0)):
            yield _Chunk(ids.there, first, count, addresses, pointer + 8 * width * first, verdicts, copier, pieces)
            first += count

    def _save_chunk(self, ring: _Ring, part: _Part, chunk: _Chunk) -> None:
        number = ring.take()
        stream = ring.buffers[number].stream
        rows = part.rows[number]
        self._packing.pack(part.tables, chunk.block_ids, rows, chunk.verdicts, chunk.first, chunk.num_rows, stream)
        ring.pass_on(stream, ring.lane.stream)
        self._copy_rows(Direction.SAVE, ring, part, number, chunk)
        ring.give(number, ring.lane.stream)

    def _load_chunk(self, ring: _Ring, part: _Part, chunk: _Chunk) -> None:
        # The host's bytes are there already: only the buffer has to be free, not what the caller's stream waits for.
        number = ring.take(ring.lane.stream)
        stream = ring.buffers[number].stream
        self._copy_rows(Direction.LOAD, ring, part, number, chunk)
        ring.pass_on(ring.lane.stream, stream)
        self._packing.unpack(part.tables, chunk.block_ids, part.rows[number], chunk.first, chunk.num_rows, stream)
        ring.give(number, stream)

    def _copy_rows(self, direction: Direction, ring: _Ring, part: _Part, number: int, chunk: _Chunk) -> None:
        device, host, sizes = part.pointers[number], chunk.pointer, part.pointers[-1]
        count = chunk.num_rows * len(part.offsets)
        if chunk.pieces is not None:
            rows = slice(chunk.first, chunk.first + count)
            stretches = part.addresses[number][:count], chunk.addresses[rows], part.sizes[:count]
            merged = merge_runs(*stretches, chunk.pieces[rows])
            device, host, sizes = (a.ctypes.data for a in (merged.device, merged.host, merged.sizes))
            count = len(merged)
        targets, sources = (device, host) if direction is Direction.LOAD else (host, device)
        chunk.copier(targets, sources, sizes, count, self._host.is_pinned, ring.lane.handle)

    def _fitting_parts(self, direction: Direction, regions: range) -> tuple[_Part, ...]:
        """The regions, cut where the row of a block would outgrow a buffer."""
        key = direction, regions
        if key not in self._parts:
            ring = self._rings[direction]
            ranges = []
            start = regions.start
            for region in regions:
                if _row_bytes(self._form, range(start, region + 1)) > ring.buffer_bytes:
                    ranges.append(range(start, region))
                    start = region
            ranges.append(range(start, regions.stop))
            self._parts[key] = tuple(self._part(ring, entry) for entry in ranges)
        return self._parts[key]

    def _part(self, ring: _Ring, regions: range) -> _Part:
        part = slice(regions.start, regions.stop)
        offsets = np.array(self._form.offsets[part], dtype=np.int64)
        sizes = np.array(self._form.stored_bytes[part], dtype=np.int64)
        stretches = merge_runs(offsets, offsets, sizes, np.zeros_like(sizes))
        start, row_bytes = int(offsets[0]), _row_bytes(self._form, regions)
        most_rows = min(ring.buffer_bytes // row_bytes, self._form.layout.num_blocks)
        memory = [buffer.memory for buffer in ring.buffers]
        rows = tuple(buffer[: most_rows * row_bytes].view(most_rows, row_bytes) for buffer in memory)
        row_offsets = np.arange(most_rows, dtype=np.int64)[:, None] * row_bytes + (stretches.host - start)
        addresses = tuple((row_offsets + buffer.data_ptr()).ravel() for buffer in memory)
        sizes = np.tile(stretches.sizes, most_rows)
        return _Part(
            tables=self._packing.part(regions),
            offsets=stretches.host,
            rows=rows,
            addresses=addresses,
            sizes=sizes,
            pointers=tuple(array.ctypes.data for array in (*addresses, sizes)),
        )


def chunk_rows(direction: Direction, count: int, most: int, edge: int) -> list[int]:
    """How many of `count` rows each chunk has, at most `most`; of many the one at the exposed end has `edge`."""
    edge = min(edge, most) if count > 2 * edge else 0
    num_chunks = -(-(count - edge) // most)
    starts = [(count - edge) * i // num_chunks for i in range(num_chunks + 1)]
    rows = [end - start for start, end in pairwise(starts)]
    if not edge:
        return rows
    return [edge, *rows] if direction is Direction.SAVE else [*rows, edge]


def min_staging_memory(form: HostForm) -> int:
    """Bytes that the rings need at least: every buffer holds the largest piece."""
    largest = max(_row_bytes(form, range(i, i + 1)) for i in range(len(form.offsets)))
    return 2 * NUM_BUFFERS * largest


def _row_bytes(form: HostForm, part: range) -> int:
    return -(-form.host_slice(part)[1] // PIECE_ALIGN) * PIECE_ALIGN
