"""Engines of any TP size in one process: ranks with real cache tensors, linked with each other rank by rank."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kv_connector.build import _peer_identity
from kv_connector.index import CacheIdentity, RankIdentity
from kv_connector.peer.base import PeerTransport
from kv_connector.peer.carriers.over_channel import Endpoint
from kv_connector.peer.carriers.staged.shared_memory import SharedMemoryTransport
from kv_connector.peer.protocol.jobs import PeerJobs
from kv_connector.peer.wire.peer_info import PeerInfo
from kv_connector.testing.loopback import LoopbackNet, LoopbackTransport
from kv_connector.transfer.cuda.streams import Priority, make_lane
from kv_connector.transfer.memory.layout import CacheLayout
from kv_connector.types import PeerAction, PeerJob
from kv_connector.worker.peers import pool_of

NUM_BLOCKS, TOKENS, DIM = 24, 4, 8
SECONDS = 120.0
SECRET = b"known to all ranks of these tests"
JOBS = itertools.count(1)


@dataclass(frozen=True)
class Layer:
    """A layer's cache on a rank with some KV heads: `make` gives a tensor, whose dimension `blocks` counts blocks and
    `heads` KV heads; None where every rank holds the same, "unknown" where the engine does not say."""

    make: Callable[[int], torch.Tensor]
    heads: int | str | None
    num_heads: int = 4
    blocks: int = 0

    def heads_of(self, rank: int, tp_size: int) -> range:
        """As engines divide them: where there are fewer heads than ranks, several ranks have the same."""
        first = rank * self.num_heads // tp_size
        return range(first, first + max(1, self.num_heads // tp_size))


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def nhd(num_heads: int = 4) -> Layer:
    return Layer(lambda heads: _zeros(NUM_BLOCKS, 2, TOKENS, heads, DIM), 3, num_heads)


def hnd(num_heads: int = 4) -> Layer:
    """In memory; its dimensions are in the order of NHD, as vLLM registers them."""
    return Layer(lambda heads: _zeros(NUM_BLOCKS, 2, heads, TOKENS, DIM).transpose(2, 3), 3, num_heads)


def apart(num_heads: int = 4) -> Layer:
    """Keys and values in tensors of their own, heads in rows of tokens."""
    return Layer(lambda heads: _zeros(2, NUM_BLOCKS, TOKENS, heads, DIM), 3, num_heads, blocks=1)


def mla() -> Layer:
    return Layer(lambda heads: _zeros(NUM_BLOCKS, TOKENS, DIM), None, 1)


def heads_outside(num_heads: int = 4) -> Layer:
    """Each head has blocks of its own."""
    return Layer(lambda heads: _zeros(heads, NUM_BLOCKS, TOKENS, DIM), 0, num_heads, blocks=1)


class Rank:
    """A rank of an engine; those of a pipeline's stages follow each other, with layers of their own."""

    def __init__(self, net: LoopbackNet | None, layers: Sequence[Layer], rank: int, tp_size: int, **named: Any) -> None:
        self.layers = layers
        self.rank, self.position, self.tp_size = rank, rank % tp_size, tp_size
        self.tensors = [layer.make(len(layer.heads_of(self.position, tp_size))) for layer in layers]
        names = [f"layers.{index}" for index in range(len(layers))]
        layout = CacheLayout.from_tensors(
            dict(zip(names, self.tensors, strict=True)),
            NUM_BLOCKS,
            {name: layer.blocks for name, layer in zip(names, layers, strict=True)},
            {name: layer.heads for name, layer in zip(names, layers, strict=True) if not isinstance(layer.heads, str)},
        )
        pool = pool_of(layout, make_lane(layout.device, Priority.PEER, timing=False))
        cache = CacheIdentity("model", "int64", "", TOKENS, tp_size=tp_size)
        own = RankIdentity(cache, rank, tp_size, arrangement=pool.arrangement)
        self.identity = replace(_peer_identity(own, pool.regions), **named)
        info = PeerInfo(self.identity, f"engine of {tp_size}", NUM_BLOCKS)
        self.transport: PeerTransport
        if net is not None:
            self.transport = LoopbackTransport(net, pool, info)
        else:
            endpoint = Endpoint(info, "127.0.0.1", 0, SECRET, SECONDS)
            self.transport = SharedMemoryTransport(pool, endpoint, 8 * 8192)
        self.jobs = PeerJobs(self.transport, info.engine_id, self.identity, SECONDS, SECONDS)
        self.ended: dict[int, bool] = {}

    def block(self, layer: int, block: int) -> torch.Tensor:
        """A layer's piece of a block, heads first."""
        entry, tensor = self.layers[layer], self.tensors[layer]
        piece = tensor.movedim(entry.blocks, 0)[block]
        if not isinstance(entry.heads, int):
            return piece[None]
        return piece.movedim(entry.heads if entry.heads < entry.blocks else entry.heads - 1, 0)

    def turn(self) -> None:
        self.jobs.turn(0.0)
        for job in self.jobs.poll():
            assert job.job_id not in self.ended, "it ends twice"
            self.ended[job.job_id] = job.ok


class Reached:
    """A point in a device's work that is over."""

    def query(self) -> bool:
        return True


class Engines:
    """A producer and a consumer of the same model. `net` is where they meet; without, they share memory."""

    def __init__(
        self, layers: Sequence[Layer], producer: int, consumer: int, net: LoopbackNet | None, num_stages: int = 1
    ) -> None:
        """`producer` and `consumer` are TP sizes."""
        self.layers = layers
        self.num_stages = num_stages
        self.producer = self._engine(net, producer)
        self.consumer = self._engine(net, consumer)
        self._ranks = [*self.producer, *self.consumer]  # some may be left out of a test, for a while

    def _engine(self, net: LoopbackNet | None, tp_size: int) -> list[Rank]:
        count = tp_size * self.num_stages
        return [Rank(net, self.layers, rank, tp_size, pp_size=self.num_stages) for rank in range(count)]

    def content(self, stage: int, layer: int, position: int, head: int, like: torch.Tensor) -> torch.Tensor:
        """What a head of a layer computes for a block: every word of it tells which it is."""
        first = (((stage * 100 + layer) * 100 + position) * 100 + head) * 1000
        return torch.arange(first, first + like.numel(), dtype=torch.int64).reshape(like.shape)

    def compute(self, blocks: Sequence[int]) -> None:
        """The producer's blocks hold the prompt."""
        for rank in self.producer:
            self._each(rank, blocks, lambda piece, wanted: piece.copy_(wanted))

    def check(self, blocks: Sequence[int]) -> None:
        """The consumer's blocks hold the prompt, and its others what was there before."""
        for rank in self.consumer:

            def compare(piece: torch.Tensor, wanted: torch.Tensor, rank: Rank = rank) -> None:
                assert torch.equal(piece, wanted), f"rank {rank.rank} has other heads"

            self._each(rank, blocks, compare)
            others = [block for block in range(NUM_BLOCKS) if block not in blocks]
            assert not any(rank.block(layer, b).any() for layer in range(len(self.layers)) for b in others)

    def _each(self, rank: Rank, blocks: Sequence[int], act: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        for layer, entry in enumerate(self.layers):
            for position, block in enumerate(blocks):
                for index, head in enumerate(entry.heads_of(rank.position, rank.tp_size)):
                    piece = rank.block(layer, block)[index]
                    act(piece, self.content(rank.rank // rank.tp_size, layer, position, head, piece))

    @property
    def ports(self) -> tuple[int, ...]:
        return tuple(rank.jobs.port for rank in self.producer)

    def offer(self, blocks: Sequence[int], group: int = 0, transfer_id: str = "t") -> int:
        """The producer offers them; returns the job."""
        names = b"".join(name_of(position) for position in range(len(blocks)))
        job = PeerJob(next(JOBS), PeerAction.SEND, transfer_id, 0, np.array(blocks), names=names, group=group)
        for rank in self.producer:
            rank.jobs.begin(job, Reached())
        return job.job_id

    def ready(self, job_id: int, regions: int | None = None) -> None:
        """What is offered is computed, of all regions or of the first."""
        for rank in self.producer:
            rank.jobs.ready([job_id], regions or len(rank.identity.pieces), Reached())

    def ask(
        self,
        blocks: Sequence[int],
        count: int,
        ports: tuple[int, ...] = (),
        group: int = 0,
        transfer_id: str = "t",
        name: bytes = b"",
    ) -> int:
        """The consumer wants the last of `count` blocks there; returns the job."""
        ports = ports or self.ports
        job = PeerJob(
            next(JOBS),
            PeerAction.RECEIVE,
            transfer_id,
            count - len(blocks),
            np.array(blocks, dtype=np.int64),
            names=name or name_of(count - 1),
            host="127.0.0.1",
            ports=ports,
            tp_size=len(ports) // self.num_stages,
            request_id="request",
            group=group,
        )
        for rank in self.consumer:
            rank.jobs.begin(job, Reached())
        return job.job_id

    def turn(self) -> None:
        for rank in (*self.producer, *self.consumer):
            rank.turn()

    def until_ended(self, job_id: int, ranks: Sequence[Rank]) -> list[bool]:
        """What each of these ranks says of the job."""
        end = time.monotonic() + SECONDS
        while not all(job_id in rank.ended for rank in ranks):
            assert time.monotonic() < end, f"job {job_id} never ends: {[rank.ended for rank in ranks]}"
            self.turn()
        return [rank.ended[job_id] for rank in ranks]

    def close(self) -> None:
        for rank in self._ranks:
            rank.jobs.close()


def name_of(position: int) -> bytes:
    return hashlib.sha256(f"block {position}".encode()).digest()
