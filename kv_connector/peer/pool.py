"""Blocks of a pool packed into runs of bytes, and back: where a push goes through memory that both sides see.

Packed, a block is its pieces of some regions, one behind the other; blocks follow one another.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .base import Ids, Marker, PeerPool

Bytes = NDArray[np.uint8]


class PackedBlocks(Protocol):
    """Moves blocks; a result other than None is the marker that says when it is done."""

    def pack(self, block_ids: Ids, regions: range, packed: Bytes) -> Marker | None:
        """Copy blocks into `packed`, contiguous uint8 of shape (num_blocks, bytes of the regions)."""

    def unpack(self, block_ids: Ids, regions: range, packed: Bytes) -> Marker | None:
        """The reverse of `pack`."""


def open_blocks(pool: PeerPool) -> PackedBlocks:
    """What packs this pool's blocks."""
    return HostBlocks(pool) if pool.device < 0 else DeviceBlocks(pool)


class HostBlocks:
    """A pool in the CPU's memory: its regions as arrays, of shape (num_blocks, piece_bytes)."""

    def __init__(self, pool: PeerPool) -> None:
        self._regions = [_view(pool.num_blocks, r.address, r.block_stride, r.piece_bytes) for r in pool.regions]
        self._keeps = pool.keeps

    def pack(self, block_ids: Ids, regions: range, packed: Bytes) -> None:
        """See `PackedBlocks.pack`."""
        start = 0
        for index in regions:
            region = self._regions[index]
            packed[:, start : start + region.shape[1]] = region[block_ids]
            start += region.shape[1]

    def unpack(self, block_ids: Ids, regions: range, packed: Bytes) -> None:
        """See `PackedBlocks.unpack`."""
        start = 0
        for index in regions:
            region = self._regions[index]
            region[block_ids] = packed[:, start : start + region.shape[1]]
            start += region.shape[1]


class DeviceBlocks:
    """A pool on a CUDA device: one copy of the driver's for each piece, on the pool's stream."""

    def __init__(self, pool: PeerPool) -> None:
        self._pool = pool

    def pack(self, block_ids: Ids, regions: range, packed: Bytes) -> Marker:
        """See `PackedBlocks.pack`."""
        device, host, sizes = self._pieces(block_ids, regions, packed)
        return self._copy(host, device, sizes)

    def unpack(self, block_ids: Ids, regions: range, packed: Bytes) -> Marker:
        """See `PackedBlocks.unpack`."""
        device, host, sizes = self._pieces(block_ids, regions, packed)
        return self._copy(device, host, sizes)

    def _pieces(self, block_ids: Ids, regions: range, packed: Bytes) -> tuple[Ids, Ids, Ids]:
        addresses = piece_addresses(self._pool, block_ids, regions)
        sizes = np.array([self._pool.regions[index].piece_bytes for index in regions], dtype=np.int64)
        starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
        rows = packed.ctypes.data + packed.strides[0] * np.arange(len(block_ids), dtype=np.int64)
        host = np.ascontiguousarray(rows[:, None] + starts[None, :]).reshape(-1)
        return addresses.reshape(-1), host, np.tile(sizes, len(block_ids))

    def _copy(self, targets: Ids, sources: Ids, sizes: Ids) -> Marker:
        assert self._pool.copy is not None and self._pool.mark is not None
        self._pool.copy(targets, sources, sizes, False, self._pool.stream)
        return self._pool.mark()


def piece_addresses(pool: PeerPool, block_ids: Ids, regions: range) -> Ids:
    """Where the pieces of these blocks lie: int64 of shape (num_blocks, num_regions)."""
    bases = np.array([pool.regions[index].address for index in regions], dtype=np.int64)
    strides = np.array([pool.regions[index].block_stride for index in regions], dtype=np.int64)
    return np.ascontiguousarray(bases[None, :] + block_ids[:, None] * strides[None, :])


def _view(num_blocks: int, address: int, block_stride: int, piece_bytes: int) -> Bytes:
    length = (num_blocks - 1) * block_stride + piece_bytes
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))
    return np.lib.stride_tricks.as_strided(memory, (num_blocks, piece_bytes), (block_stride, 1))
