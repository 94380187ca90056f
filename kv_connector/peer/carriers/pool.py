"""Blocks of a pool packed into runs of bytes, and back: where a push goes through memory that both sides see.

Packed, a block is its pieces of some regions, one behind the other, and a piece its runs; blocks follow one another. So
the half of a piece that a rank with half of the KV heads is sent is packed as that rank's whole piece.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..base import Ids, PeerPool, PoolRegion
from ..identity import PeerIdentity

Bytes = NDArray[np.uint8]


def shared_part(pool: PeerPool, here: PeerIdentity, there: PeerIdentity) -> PeerPool:
    """Of this side's pool what a peer holds, too: all of each piece, or the heads of a rank of a larger TP size."""
    if here.tp_size == there.tp_size:
        return pool
    parts = (region.part(here.shared_heads(there, index)) for index, region in enumerate(pool.regions))
    return replace(pool, regions=tuple(parts))


class HostBlocks:
    """A pool in the CPU's memory: its regions as arrays, of shape (num_blocks, num_runs, bytes of a run)."""

    def __init__(self, pool: PeerPool) -> None:
        self._regions = [_view(pool.num_blocks, region) for region in pool.regions]
        self._sizes = pool.pieces
        self._keeps = pool.keeps

    def pack(self, block_ids: Ids, regions: range, packed: Bytes) -> None:
        """Copy blocks into `packed`, uint8 of shape (num_blocks, bytes of the regions)."""
        start = 0
        for index in regions:
            stop = start + self._sizes[index]
            packed[:, start:stop] = self._regions[index][block_ids].reshape(len(block_ids), -1)
            start = stop

    def unpack(self, block_ids: Ids, regions: range, packed: Bytes) -> None:
        """The reverse of `pack`."""
        start = 0
        for index in regions:
            region, stop = self._regions[index], start + self._sizes[index]
            region[block_ids] = packed[:, start:stop].reshape(len(block_ids), *region.shape[1:])
            start = stop


def runs_of(pool: PeerPool, block_ids: Ids, regions: range) -> tuple[Ids, Ids]:
    """Where the runs of these blocks' pieces lie, and the bytes of each, in packed order: int64, (runs,)."""
    chosen = [pool.regions[index] for index in regions]
    counts = [region.num_runs for region in chosen]
    firsts = np.concatenate([region.address + np.arange(region.num_runs) * region.run_stride for region in chosen])
    strides = np.repeat([region.block_stride for region in chosen], counts)
    sizes = np.repeat([region.piece_bytes // region.num_runs for region in chosen], counts)
    addresses: Ids = (firsts[None, :] + block_ids[:, None] * strides[None, :]).reshape(-1)
    return addresses, np.tile(sizes, len(block_ids))


def _view(num_blocks: int, region: PoolRegion) -> Bytes:
    run = region.piece_bytes // region.num_runs
    length = (num_blocks - 1) * region.block_stride + (region.num_runs - 1) * region.run_stride + run
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(region.address))
    shape, strides = (num_blocks, region.num_runs, run), (region.block_stride, region.run_stride, 1)
    return np.lib.stride_tricks.as_strided(memory, shape, strides)
