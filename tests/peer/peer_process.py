"""A side of a link in a process of its own, for backends that need two: asked like one that is here."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch

from kv_connector.build import open_transport
from kv_connector.config import PeerConfig, PeerRoute
from kv_connector.peer.base import PeerTransport
from kv_connector.transfer.cuda.streams import Priority, make_lane
from kv_connector.transfer.memory.layout import CacheLayout
from kv_connector.worker.peers import pool_of
from tests.peer.peers import IDENTITY, PIECES, SECONDS, SECRET, STAGING, Backend, Pool, Side

_METHODS = {"connect", "send", "grant", "revoke", "push", "cancel", "drop", "wake", "close"}


class DevicePool(Pool):
    """The same blocks on a CUDA device."""

    def __init__(self, num_blocks: int = 40, seed: int = 0, device: int = 0) -> None:
        super().__init__(num_blocks, seed)
        base = [torch.tensor(array.base, device=f"cuda:{device}") for array in self.arrays]
        tensors = {str(i): memory[:, :piece] for i, (memory, piece) in enumerate(zip(base, PIECES, strict=True))}
        self.tensors = list(tensors.values())
        layout = CacheLayout.from_tensors(tensors, num_blocks, dict.fromkeys(tensors, 0))
        self.pool = pool_of(layout, make_lane(layout.device, Priority.PEER, timing=False))

    def block(self, block_id: int) -> bytes:
        """All bytes of a block."""
        return b"".join(tensor[block_id].cpu().numpy().tobytes() for tensor in self.tensors)

    def all_bytes(self) -> list[bytes]:
        """All bytes of every block."""
        columns = np.concatenate([tensor.cpu().numpy() for tensor in self.tensors], axis=1)
        return [row.tobytes() for row in columns]


def open_on(backend: str, num_blocks: int, seed: int, engine_id: str, device: int) -> tuple[Side, Pool]:
    """A side of `backend`: of the CPU's, or `cuda+KIND+ROUTE`, what these settings give for a pool on a device."""
    if not backend.startswith("cuda"):
        pool = Pool(num_blocks, seed)
        return Side(Backend(backend).open(pool, engine_id=engine_id)), pool
    kind, _, route = backend.partition("+")[2].partition("+")
    there = DevicePool(num_blocks, seed, device)
    config = PeerConfig(
        kind=kind or "shared_memory",
        route=PeerRoute(route or "auto"),
        secret=SECRET.decode(),
        staging_memory=STAGING,
        timeout_ms=60_000,
    )
    identity = replace(IDENTITY, arrangement=there.pool.arrangement)
    return Side(open_transport(config, identity, engine_id, there.pool)), there


class FarSide:
    """See `Side`, `Pool` and `PeerTransport`: all three, of another process."""

    def __init__(
        self, backend: str, num_blocks: int, seed: int, engine_id: str, device: int, visible: str | None = None
    ) -> None:
        """`visible`: the CUDA devices that the process sees, all by default; `device` is one of those."""
        self._ask = _process(visible)
        self._ask("open", backend, num_blocks, seed, engine_id, device)

    @property
    def transport(self) -> PeerTransport:
        """Calls and reads that go there."""
        return self  # type: ignore[return-value]

    def __getattr__(self, name: str) -> Any:
        if name in _METHODS:
            return lambda *args, **named: self._ask("call", name, args, named)
        return self._ask("get", name)

    @property
    def events(self) -> list[Any]:
        """What it has told."""
        return list(self._ask("events"))

    def poll(self, timeout: float = 0.0) -> None:
        """It polls by itself."""

    def of(self, kind: type) -> list[Any]:
        """Events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def block(self, block_id: int) -> bytes:
        """All bytes of a block."""
        return self.all_bytes()[block_id]

    def all_bytes(self) -> list[bytes]:
        """All bytes of every block."""
        return list(self._ask("bytes"))


@cache
def _process(visible: str | None) -> Any:
    """One for all tests: it takes seconds to start."""
    context = multiprocessing.get_context("spawn")
    pipe, remote = context.Pipe()
    with pytest.MonkeyPatch.context() as patch:
        if visible is not None:
            patch.setenv("CUDA_VISIBLE_DEVICES", visible)
        context.Process(target=_serve, args=(remote,), daemon=True).start()

    def ask(*words: Any) -> Any:
        pipe.send(words)
        assert pipe.poll(2 * SECONDS), f"no answer to {words[:2]}"
        worked, result = pipe.recv()
        assert worked, result
        return result

    return ask


def _serve(pipe: Connection) -> None:
    side, pool = None, None
    while True:
        is_open = side is not None and not side.transport._is_closed
        if is_open:
            side.poll(0.001)
        if not pipe.poll(0.0 if is_open else None):
            continue
        try:
            word, *args = pipe.recv()
        except EOFError:
            return
        try:
            if word == "open":
                side, pool = open_on(*args)
                result = None
            else:
                assert side is not None and pool is not None
                result = _answer(side, pool, word, *args)
            pipe.send((True, result))
        except Exception as error:  # noqa: BLE001 - the child's top
            pipe.send((False, repr(error)))


def _answer(side: Side, pool: Pool, word: str, *args: Any) -> Any:
    if word == "call":
        name, positional, named = args
        return getattr(side.transport, name)(*positional, **named)
    if word == "get":
        return getattr(side.transport, args[0])
    return side.events if word == "events" else pool.all_bytes()
