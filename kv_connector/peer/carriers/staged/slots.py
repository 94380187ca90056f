"""Blocks packed into slots of a ring as `pool` says, and back."""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np

from ...base import Ids, Marker, PeerError, PeerPool
from ..page_locks import PageLocks
from ..pool import runs_of
from .ring import Ring

_Result = TypeVar("_Result")
_MOST_VECTORS = 1024  # IOV_MAX
_POLL_SECONDS = 0.0002
logger = logging.getLogger("kv_connector.peer")


class SlotCopier(Protocol):
    """Moves blocks of a pool, or what a peer holds of them; a result other than None is the marker that says when it is
    done."""

    def pack(self, pool: PeerPool, block_ids: Ids, regions: range, ring: Ring, slot: int) -> Marker | None:
        """Copy blocks into a slot. Raises PeerError where the system does not let us."""

    def unpack(self, pool: PeerPool, block_ids: Ids, regions: range, ring: Ring, slot: int) -> Marker | None:
        """The reverse of `pack`."""

    def run(self, ring: Ring, act: Callable[[bool], _Result]) -> tuple[_Result, Marker | None]:
        """Let something else copy between blocks and a ring: `act` is told whether the ring's memory is page-locked,
        and enqueues on the pool's stream. Its result, and the marker. Where it raises nothing is under way any more."""

    def lock(self, ring: Ring) -> None:
        """Make copies to and from a ring fast, where the pool is on a device; blocks for milliseconds."""

    def unlock(self, ring: Ring) -> None:
        """Undo `lock`, before the ring's memory goes: no copy may be under way. Nothing where it did nothing."""


def open_copier(pool: PeerPool) -> SlotCopier:
    """What packs this pool's blocks."""
    return HostSlots() if pool.device < 0 else DeviceSlots(pool)


class HostSlots:
    """A pool in the CPU's memory: a vectored read or write of the ring's file moves a thousand pieces in one call.

    Not NumPy, and not one call for each piece: an engine's main thread may hold the GIL for milliseconds
    whenever it is let go, so that it must not be let go for every piece.
    """

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._write, self._read = libc.pwritev, libc.preadv
        for call in (self._write, self._read):
            call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
            call.restype = ctypes.c_ssize_t

    def pack(self, pool: PeerPool, block_ids: Ids, regions: range, ring: Ring, slot: int) -> None:
        """See `SlotCopier.pack`."""
        self._move(self._write, pool, block_ids, regions, ring, slot)

    def unpack(self, pool: PeerPool, block_ids: Ids, regions: range, ring: Ring, slot: int) -> None:
        """See `SlotCopier.unpack`."""
        self._move(self._read, pool, block_ids, regions, ring, slot)

    def run(self, ring: Ring, act: Callable[[bool], _Result]) -> tuple[_Result, None]:
        """See `SlotCopier.run`."""
        return act(False), None

    def lock(self, ring: Ring) -> None:
        """See `SlotCopier.lock`."""

    def unlock(self, ring: Ring) -> None:
        """See `SlotCopier.unlock`."""

    def _move(self, call: Any, pool: PeerPool, block_ids: Ids, regions: range, ring: Ring, slot: int) -> None:
        vectors = np.stack(runs_of(pool, block_ids, regions), axis=1)  # struct iovec: address and length
        offset = slot * ring.slot_bytes
        while len(vectors):
            part = vectors[:_MOST_VECTORS]
            moved = call(ring.fd, part.ctypes.data, len(part), offset)
            if moved <= 0:
                raise PeerError(f"shared memory cannot be used: {os.strerror(ctypes.get_errno())}")
            offset += moved
            vectors = _behind(vectors, moved)


class DeviceSlots:
    """A pool on a CUDA device: the driver copies each piece on the pool's stream, to and from locked pages."""

    def __init__(self, pool: PeerPool) -> None:
        self._pool = pool
        self._locked: set[int] = set()  # by address
        self._is_refused = False
        self._driver: PageLocks | None = None
        try:
            self._driver = PageLocks(pool.device)
        except PeerError as error:
            logger.warning("slots for blocks stay unpinned, copies will be slower: %s", error)

    def pack(self, pool: PeerPool, block_ids: Ids, regions: range, ring: Ring, slot: int) -> Marker:
        """See `SlotCopier.pack`."""
        device, host, sizes = self._runs(pool, block_ids, regions, ring, slot)
        return self._copy(host, device, sizes, ring)

    def unpack(self, pool: PeerPool, block_ids: Ids, regions: range, ring: Ring, slot: int) -> Marker:
        """See `SlotCopier.unpack`."""
        device, host, sizes = self._runs(pool, block_ids, regions, ring, slot)
        return self._copy(device, host, sizes, ring)

    def run(self, ring: Ring, act: Callable[[bool], _Result]) -> tuple[_Result, Marker]:
        """See `SlotCopier.run`."""
        assert self._pool.mark is not None
        if self._driver is not None:
            self._driver.use()
        try:
            result = act(ring.address in self._locked)
        except Exception:
            self._wait(self._pool.mark())  # a part of it may be under way, and who is told may reuse both sides at once
            raise
        return result, self._pool.mark()

    def lock(self, ring: Ring) -> None:
        """See `SlotCopier.lock`. Where it fails, copies are slower."""
        if self._driver is None or self._is_refused:
            return
        try:
            self._driver.lock(ring.address, ring.slots.nbytes)
            self._locked.add(ring.address)
        except PeerError as error:
            self._is_refused = True
            logger.warning("slots for blocks stay unpinned, copies will be slower: %s; raise `ulimit -l`", error)

    def unlock(self, ring: Ring) -> None:
        """See `SlotCopier.unlock`."""
        if self._driver is not None and ring.address in self._locked:
            self._locked.remove(ring.address)
            self._driver.unlock(ring.address)

    def _runs(self, pool: PeerPool, block_ids: Ids, regions: range, ring: Ring, slot: int) -> tuple[Ids, Ids, Ids]:
        addresses, sizes = runs_of(pool, block_ids, regions)
        starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
        return addresses, ring.address + slot * ring.slot_bytes + starts, sizes

    def _copy(self, targets: Ids, sources: Ids, sizes: Ids, ring: Ring) -> Marker:
        assert self._pool.copy is not None
        copy, stream = self._pool.copy, self._pool.stream
        arrays = targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data
        _, marker = self.run(ring, lambda locked: copy(*arrays, len(sizes), locked, stream))
        return marker

    def _wait(self, marker: Marker) -> None:
        while not marker.query():
            time.sleep(_POLL_SECONDS)


def _behind(vectors: Ids, moved: int) -> Ids:
    """What is left after so many bytes."""
    ends = np.cumsum(vectors[:, 1])
    first = int(np.searchsorted(ends, moved, side="right"))
    left: Ids = vectors[first:].copy()
    if len(left):
        inside = moved - (int(ends[first - 1]) if first else 0)
        left[0] += (inside, -inside)
    return left
