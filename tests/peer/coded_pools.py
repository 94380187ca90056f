"""Pools of bf16 blocks, and sides of links that code them on their way through host memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kv_connector.peer.base import PeerPool, PeerTransport
from kv_connector.peer.carriers.nixl_agent import start_agent
from kv_connector.peer.carriers.over_channel import Endpoint
from kv_connector.peer.carriers.staged.nixl import NixlStagedTransport
from kv_connector.peer.carriers.staged.shared_memory import SharedMemoryTransport
from kv_connector.peer.wire.peer_info import PeerInfo
from kv_connector.transfer.cuda.streams import Priority, make_lane
from kv_connector.transfer.memory.layout import CacheLayout
from kv_connector.transfer.paths.coded_slots import DeviceCoder, HostCoder
from kv_connector.worker.peers import pool_of
from tests.copies import copy_now
from tests.peer.peers import IDENTITY, SECRET

NUM_BLOCKS = 40
STAGING = 8 * 65536
NOISE = {4: "keys", 11: "last", 30: "keys"}
"""Blocks of the producer that do not fit, and in which layer."""
ALL_PATTERNS = range(12, 28)
"""Blocks whose keys and values are all patterns of 16 bits, in windows that fit."""


class LateMarker:
    """Is reached when it has been asked about a few times."""

    def __init__(self) -> None:
        self.left = 3

    def query(self) -> bool:
        self.left -= 1
        return self.left <= 0


def patterns() -> torch.Tensor:
    """All 65,536 patterns as bf16, (windows, elements): sixteen exponents side by side, both signs."""
    ordered = torch.arange(1 << 16)
    return ordered[torch.argsort((ordered >> 7) & 255, stable=True)].to(torch.int16).view(torch.bfloat16).view(16, -1)


class CodedPool:
    """Layers of bf16, of two tensors and strided ones among them, and one of fp8 with scales, which is not coded."""

    def __init__(self, seed: int, device: torch.device | None = None, codes: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(NUM_BLOCKS, *shape, generator=generator).to(torch.bfloat16)

        self.caches: dict[str, Any] = {
            "keys": numbers(16, 2, 64),
            "fp8": [numbers(16, 64).to(torch.float8_e4m3fn), torch.randn(NUM_BLOCKS, 16, generator=generator)],
            "apart": [numbers(3, 16, 64)[:, 1], numbers(16, 96)],
            "last": numbers(16, 2, 64),
        }
        for block, name in NOISE.items():
            bits = torch.randint(-(1 << 15), 1 << 15, (16, 2, 64), generator=generator)
            self.caches[name][block] = bits.to(torch.int16).view(torch.bfloat16)
        for block, window in zip(ALL_PATTERNS, patterns(), strict=True):
            self.caches["keys"][block], self.caches["last"][block] = window.view(2, 16, 2, 64)
        if device is not None and device.type == "cuda":
            self.caches = {
                name: [t.to(device) for t in entry] if isinstance(entry, list) else entry.to(device)
                for name, entry in self.caches.items()
            }
        self.layout = CacheLayout.from_tensors(self.caches, NUM_BLOCKS, dict.fromkeys(self.caches, 0))
        lane = make_lane(self.layout.device, Priority.PEER, timing=False)
        self.pool: PeerPool = pool_of(self.layout, lane, codes)

    def as_device(self) -> CodedPool:
        """The same on what is said to be a device: that copies are over is known late."""
        self.pool = replace(self.pool, device=0, copy=copy_now, mark=LateMarker)
        return self

    def make_coder(self) -> HostCoder | DeviceCoder:
        assert self.pool.coder is not None
        coder: Any = self.pool.coder(STAGING // 8)
        return coder

    def block(self, block_id: int) -> bytes:
        """All bytes of a block."""
        return b"".join(region.view[block_id].cpu().numpy().tobytes() for region in self.layout.regions)

    def all_bytes(self) -> list[bytes]:
        """All bytes of every block."""
        return [self.block(block_id) for block_id in range(NUM_BLOCKS)]


def info_of(pool: CodedPool, engine_id: str = "engine", **changes: Any) -> PeerInfo:
    """What a side says of itself."""
    pieces, nothing = pool.pool.pieces, (0,) * len(pool.pool.pieces)
    identity = replace(IDENTITY, pieces=pieces, heads=nothing, head_bytes=nothing, **changes)
    return PeerInfo(identity, engine_id, NUM_BLOCKS)


def open_staged(carrier: str, pool: CodedPool, staging: int = STAGING, **changes: Any) -> PeerTransport:
    """A side whose blocks go through host memory."""
    where = pool.pool, Endpoint(info_of(pool, **changes), "127.0.0.1", 0, SECRET, 5.0), staging
    if carrier == "nixl_staged":
        return NixlStagedTransport(start_agent(), *where)
    return SharedMemoryTransport(*where)
