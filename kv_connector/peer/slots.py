"""Blocks of a pool packed into slots of a ring, and back.

Packed, a block is its pieces of some regions, one behind the other; blocks follow one another.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Protocol

import numpy as np

from .base import Ids, Marker, PeerError, PeerPool
from .pool import piece_addresses
from .ring import Ring

_MOST_VECTORS = 1024  # IOV_MAX


class SlotCopier(Protocol):
    """Moves blocks; a result other than None is the marker that says when it is done."""

    def pack(self, block_ids: Ids, regions: range, ring: Ring, slot: int) -> Marker | None:
        """Copy blocks into a slot. Raises PeerError where the system does not let us."""

    def unpack(self, block_ids: Ids, regions: range, ring: Ring, slot: int) -> Marker | None:
        """The reverse of `pack`."""


def open_copier(pool: PeerPool) -> SlotCopier:
    """What packs this pool's blocks."""
    return HostSlots(pool) if pool.device < 0 else DeviceSlots(pool)


class HostSlots:
    """A pool in the CPU's memory: a vectored read or write of the ring's file moves a thousand pieces in one call.

    Not NumPy, and not one call for each piece: an engine's main thread may hold on to Python's lock for milliseconds
    whenever it is let go, so that it must not be let go for every piece.
    """

    def __init__(self, pool: PeerPool) -> None:
        self._pool = pool
        libc = ctypes.CDLL(None, use_errno=True)
        self._write, self._read = libc.pwritev, libc.preadv
        for call in (self._write, self._read):
            call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
            call.restype = ctypes.c_ssize_t

    def pack(self, block_ids: Ids, regions: range, ring: Ring, slot: int) -> None:
        """See `SlotCopier.pack`."""
        self._move(self._write, block_ids, regions, ring, slot)

    def unpack(self, block_ids: Ids, regions: range, ring: Ring, slot: int) -> None:
        """See `SlotCopier.unpack`."""
        self._move(self._read, block_ids, regions, ring, slot)

    def _move(self, call: Any, block_ids: Ids, regions: range, ring: Ring, slot: int) -> None:
        addresses = piece_addresses(self._pool, block_ids, regions)
        vectors = np.empty((*addresses.shape, 2), dtype=np.int64)  # struct iovec: address and length
        vectors[:, :, 0] = addresses
        vectors[:, :, 1] = [self._pool.regions[index].piece_bytes for index in regions]
        vectors = vectors.reshape(-1, 2)
        offset = slot * ring.slot_bytes
        while len(vectors):
            part = vectors[:_MOST_VECTORS]
            moved = call(ring.fd, part.ctypes.data, len(part), offset)
            if moved <= 0:
                raise PeerError(f"shared memory cannot be used: {os.strerror(ctypes.get_errno())}")
            offset += moved
            vectors = _behind(vectors, moved)


class DeviceSlots:
    """A pool on a CUDA device: one copy of the driver's for each piece, on the pool's stream."""

    def __init__(self, pool: PeerPool) -> None:
        self._pool = pool

    def pack(self, block_ids: Ids, regions: range, ring: Ring, slot: int) -> Marker:
        """See `SlotCopier.pack`."""
        device, host, sizes = self._pieces(block_ids, regions, ring, slot)
        return self._copy(host, device, sizes)

    def unpack(self, block_ids: Ids, regions: range, ring: Ring, slot: int) -> Marker:
        """See `SlotCopier.unpack`."""
        device, host, sizes = self._pieces(block_ids, regions, ring, slot)
        return self._copy(device, host, sizes)

    def _pieces(self, block_ids: Ids, regions: range, ring: Ring, slot: int) -> tuple[Ids, Ids, Ids]:
        addresses = piece_addresses(self._pool, block_ids, regions).reshape(-1)
        sizes = np.array([self._pool.regions[index].piece_bytes for index in regions], dtype=np.int64)
        sizes = np.tile(sizes, len(block_ids))
        starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
        return addresses, ring.slots[slot].ctypes.data + starts, sizes

    def _copy(self, targets: Ids, sources: Ids, sizes: Ids) -> Marker:
        assert self._pool.copy is not None and self._pool.mark is not None
        self._pool.copy(targets, sources, sizes, False, self._pool.stream)
        return self._pool.mark()


def _behind(vectors: Ids, moved: int) -> Ids:
    """What is left after so many bytes."""
    ends = np.cumsum(vectors[:, 1])
    first = int(np.searchsorted(ends, moved, side="right"))
    left: Ids = vectors[first:].copy()
    if len(left):
        inside = moved - (int(ends[first - 1]) if first else 0)
        left[0] += (inside, -inside)
    return left
