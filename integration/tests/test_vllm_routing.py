"""A router that knows nothing but what engines publish over ZeroMQ, asked by tokens who has a prefix, and where."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

import msgspec
import zmq
from vllm.distributed import kv_events

from integration.servers import HOST, free_ports
from integration.tests.vllm_engines import BLOCK_SIZE, VllmEngine, prompts, running, transfer_config

NUM_BLOCKS = 420 // BLOCK_SIZE  # of a prompt
LATEST_SECONDS = 60.0


class Router:
    """Reads the batches of engines as vLLM's example of a subscriber does, and keeps of each engine and medium which
    block, a hash, follows which with these tokens."""

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(type=kv_events.KVEventBatch)
        self._blocks: dict[tuple[str, str], dict[tuple[Any, tuple[int, ...]], Any]] = {}
        self._places: dict[tuple[str, str], dict[Any, tuple[Any, tuple[int, ...]]]] = {}
        self._sockets: dict[str, Any] = {}
        self._next: dict[str, int] = {}

    def connect(self, engine: str, endpoint: str) -> None:
        """Batches are asked for from the first one on, so that none is missed."""
        self._sockets[engine] = zmq.Context.instance().socket(zmq.DEALER)
        self._sockets[engine].connect(endpoint)
        self._next[engine] = 0

    def close(self) -> None:
        for connection in self._sockets.values():
            connection.close(linger=0)

    def read(self, engine: str) -> None:
        """All that the engine has published since."""
        connection = self._sockets[engine]
        connection.send_multipart((b"", self._next[engine].to_bytes(8, "big")))
        while True:
            *_, sequence, payload = connection.recv_multipart()
            if not payload:
                return
            self._next[engine] = int.from_bytes(sequence, "big") + 1
            for event in self._decoder.decode(payload).events:
                self._apply(engine, event)

    def count(self, engine: str, medium: str, tokens: Sequence[int]) -> int:
        """Leading blocks of these tokens that the engine has there."""
        blocks, parent = self._blocks.get((engine, medium), {}), None
        for count in range(len(tokens) // BLOCK_SIZE):
            parent = blocks.get((parent, tuple(tokens[count * BLOCK_SIZE : (count + 1) * BLOCK_SIZE])))
            if parent is None:
                return count
        return len(tokens) // BLOCK_SIZE

    def _apply(self, engine: str, event: Any) -> None:
        if isinstance(event, kv_events.AllBlocksCleared):
            for key in [key for key in self._blocks if key == (engine, "GPU")]:
                self._blocks[key].clear()
            return
        blocks = self._blocks.setdefault((engine, event.medium), {})
        places = self._places.setdefault((engine, event.medium), {})
        if isinstance(event, kv_events.BlockRemoved):
            for block_hash in event.block_hashes:
                blocks.pop(places.pop(block_hash, None), None)
            return
        parent, size = event.parent_block_hash, event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes), "every block says what it holds"
        for place, block_hash in enumerate(event.block_hashes):
            places[block_hash] = parent, tuple(event.token_ids[place * size : (place + 1) * size])
            blocks[places[block_hash]] = block_hash
            parent = block_hash


def free_endpoint() -> str:
    return f"tcp://{HOST}:{free_ports(1)[0]}"


@contextmanager
def publishing(folder: Path, router: Router, name: str) -> Iterator[VllmEngine]:
    replay = free_endpoint()
    storage = {"path": str(folder / "store"), "capacity": "64MiB", "prefetch": "wait_complete"}
    settings = {"write_policy": "write_through", "host_memory": "8MiB", "storage": storage}
    events = kv_events.KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=free_endpoint().replace("127.0.0.1", "*"),
        replay_endpoint=replay,
    )
    with running(
        folder, num_blocks=60, kv_transfer_config=transfer_config(settings), kv_events_config=events
    ) as engine:
        router.connect(name, replay)
        yield engine


def until(router: Router, engine: str, is_so: Callable[[], bool]) -> None:
    """A thread of vLLM's publishes: what is asked now may be there in a moment."""
    latest = time.monotonic() + LATEST_SECONDS
    while not is_so():
        assert time.monotonic() < latest, "the router has not come to know it"
        router.read(engine)


def test_who_has_which_prefix_and_where(tmp_path: Path, stable_hashes: None) -> None:
    router = Router()
    first, second, *others = prompts(10)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with publishing(tmp_path / "a", router, "a") as engine:
        engine.alone([first])
        engine.drain()
        until(router, "a", lambda: router.count("a", "CPU", first) == router.count("a", "STORAGE", first) == NUM_BLOCKS)
        assert router.count("a", "CPU", second) == 0
        engine.alone(others)
        engine.drain()
        assert engine.stats()["host_evicted_blocks"] > 0
        until(router, "a", lambda: router.count("a", "STORAGE", others[-1]) == NUM_BLOCKS)
        until(router, "a", lambda: router.count("a", "CPU", first) < NUM_BLOCKS)
        assert router.count("a", "STORAGE", first) == NUM_BLOCKS, "it is still there"
        engine.alone([first])
        engine.drain()
        until(router, "a", lambda: router.count("a", "CPU", first) == NUM_BLOCKS)
        assert engine.stats()["storage_hit_tokens"] > 0, "it has come back from there"
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        engine.alone(prompts(1, 40, seed=9))
        engine.drain()
        until(router, "a", lambda: router.count("a", "STORAGE", first) == router.count("a", "CPU", first) == 0)
    with publishing(tmp_path / "b", router, "b") as engine:
        engine.alone([second])
        engine.drain()
        until(router, "b", lambda: router.count("b", "STORAGE", second) == NUM_BLOCKS)
        assert router.count("b", "CPU", first) == router.count("a", "CPU", second) == 0
    router.close()
