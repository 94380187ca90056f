"""Blocks of a pool packed into runs of bytes, and back: where a push goes through memory that both sides see.

Packed, a block is its pieces of some regions, one behind the other; blocks follow one another.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from ..base import Ids, PeerPool

Bytes = NDArray[np.uint8]


class HostBlocks:
    """A pool in the CPU's memory: its regions as arrays, of shape (num_blocks, piece_bytes)."""

    def __init__(self, pool: PeerPool) -> None:
        self._regions = [_view(pool.num_blocks, r.address, r.block_stride, r.piece_bytes) for r in pool.regions]
        self._keeps = pool.keeps

    def pack(self, block_ids: Ids, regions: range, packed: Bytes) -> None:
        """Copy blocks into `packed`, uint8 of shape (num_blocks, bytes of the regions)."""
        start = 0
        for index in regions:
            region = self._regions[index]
            packed[:, start : start + region.shape[1]] = region[block_ids]
            start += region.shape[1]

    def unpack(self, block_ids: Ids, regions: range, packed: Bytes) -> None:
        """The reverse of `pack`."""
        start = 0
        for index in regions:
            region = self._regions[index]
            region[block_ids] = packed[:, start : start + region.shape[1]]
            start += region.shape[1]


def piece_addresses(pool: PeerPool, block_ids: Ids, regions: range) -> Ids:
    """Where the pieces of these blocks lie: int64 of shape (num_blocks, num_regions)."""
    bases = np.array([pool.regions[index].address for index in regions], dtype=np.int64)
    strides = np.array([pool.regions[index].block_stride for index in regions], dtype=np.int64)
    return np.ascontiguousarray(bases[None, :] + block_ids[:, None] * strides[None, :])


def _view(num_blocks: int, address: int, block_stride: int, piece_bytes: int) -> Bytes:
    length = (num_blocks - 1) * block_stride + piece_bytes
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))
    return np.lib.stride_tricks.as_strided(memory, (num_blocks, piece_bytes), (block_stride, 1))
