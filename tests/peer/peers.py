"""Pools and links between them for tests of peers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kv_connector.peer.base import (
    Arrived,
    Connected,
    Lost,
    Message,
    PeerEvent,
    PeerPool,
    PeerTransport,
    PoolRegion,
    Push,
    Pushed,
)
from kv_connector.peer.carriers.nixl import NixlTransport
from kv_connector.peer.carriers.nixl_agent import start_agent, why_not
from kv_connector.peer.carriers.over_channel import Endpoint
from kv_connector.peer.carriers.staged.nixl import NixlStagedTransport
from kv_connector.peer.carriers.staged.shared_memory import SharedMemoryTransport
from kv_connector.peer.identity import PeerIdentity
from kv_connector.peer.wire.peer_info import PeerInfo
from kv_connector.testing.loopback import LoopbackNet, LoopbackTransport

SECRET = b"a secret that both sides know"
SECONDS = 120.0
PIECES = (512, 512, 768)  # bytes of a block in each region
NO_HEADS = (0,) * len(PIECES)
IDENTITY = PeerIdentity("model", "float32", "NHD", 16, 1, 1, 0, PIECES, heads=NO_HEADS, head_bytes=NO_HEADS)
STAGING = 8 * 8192


class Pool:
    """Blocks in memory of this process; regions are apart, and the last one is strided."""

    def __init__(self, num_blocks: int = 40, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.arrays = [rng.integers(0, 256, (num_blocks, 1024), dtype=np.uint8)[:, :piece] for piece in PIECES]
        regions = [PoolRegion(a.ctypes.data, a.strides[0], a.shape[1]) for a in self.arrays]
        self.pool = PeerPool(num_blocks, tuple(regions), keeps=self.arrays)

    def block(self, block_id: int) -> bytes:
        """All bytes of a block."""
        return b"".join(array[block_id].tobytes() for array in self.arrays)

    def all_bytes(self) -> list[bytes]:
        """All bytes of every block."""
        return [self.block(block_id) for block_id in range(self.pool.num_blocks)]


def info_of(pool: Pool, engine_id: str = "engine", transport: str = "shared_memory", **changes: Any) -> PeerInfo:
    """What a side says of itself."""
    extra = {"transport": transport, "socket": "", "slot_bytes": STAGING // 8}
    return PeerInfo(replace(IDENTITY, **changes), engine_id, pool.pool.num_blocks, extra)


def linked(link: int, num_blocks: int = 40) -> Connected:
    """A link to a rank like this one is open."""
    return Connected(link, "engine", num_blocks, IDENTITY.shard)


class Backend:
    """Makes transports that reach each other."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.net = LoopbackNet()

    def open(self, pool: Pool, secret: bytes = SECRET, seconds: float = 60.0, **changes: Any) -> PeerTransport:
        """A transport for this pool."""
        info = info_of(pool, **changes)
        if self.name == "loopback":
            return LoopbackTransport(self.net, pool.pool, info, secret)
        where = pool.pool, Endpoint(info, "127.0.0.1", 0, secret, seconds)
        if self.name == "nixl":
            return NixlTransport(start_agent(), *where)
        if self.name == "nixl_staged":
            return NixlStagedTransport(start_agent(), *where, STAGING)
        return SharedMemoryTransport(*where, STAGING)


needs_nixl = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
STAGED = ["shared_memory", pytest.param("nixl_staged", marks=needs_nixl)]
BACKENDS = ["loopback", *STAGED, pytest.param("nixl", marks=needs_nixl)]


class Side:
    """A transport, and what it has told."""

    def __init__(self, transport: PeerTransport) -> None:
        self.transport = transport
        self.events: list[PeerEvent] = []

    def poll(self, timeout: float = 0.0) -> None:
        self.events += self.transport.poll(timeout)

    def of(self, kind: type) -> list[Any]:
        """Events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]


def until(condition: Callable[[], bool], *sides: Side) -> None:
    """Let all sides work until something is so."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, f"it never came: {[side.events for side in sides]}"
        for side in sides:
            side.poll(0.002)


def link_up(a: Side, b: Side) -> tuple[int, int]:
    """A link from a to b: its number on both sides."""
    known = len(b.of(Connected))
    link = a.transport.connect("127.0.0.1", b.transport.port)
    until(lambda: any(event.link == link for event in a.of(Connected)) and len(b.of(Connected)) > known, a, b)
    return link, b.of(Connected)[-1].link


def ids(values: Sequence[int]) -> Any:
    """Block ids as a push has them."""
    return np.array(values, dtype=np.int64)


NUMBERS = itertools.count(1000)


def push_all(a: Side, link: int, sources: Sequence[int], targets: Sequence[int], grant: int, first: int = 0) -> int:
    """Push every region of these blocks; returns the push's number."""
    number = next(NUMBERS)
    a.transport.push(link, Push(number, grant, first, ids(sources), ids(targets), range(len(PIECES))))
    return number


__all__ = ["Arrived", "Connected", "Lost", "Message", "Push", "Pushed"]
