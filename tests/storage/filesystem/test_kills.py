"""Processes that are killed while they write to a folder: what they leave is right, and no more than there may be."""

from __future__ import annotations

import multiprocessing
import random
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from kv_connector.config import Config, Prefetch, StorageConfig, WritePolicy
from kv_connector.storage.filesystem.backend import FilesystemStorage
from tests.fakes import PatternModel, make_engine
from tests.storage.storages import IDENTITY, PER_PACK, SECONDS, capacity_for, get, keys_of, open_store, put, size_of

KILLS = 50
PAGE = 4096
NUM_DOCUMENTS = 10
CAPACITY_OF_ENGINE = 90 * PAGE  # some documents of ten blocks, not all


def start(target: Any, *arguments: object) -> tuple[BaseProcess, Connection]:
    """A process that sends what it does."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.storage.storages", "tests.fakes"])
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def kill(process: BaseProcess, pipe: Connection, rng: random.Random) -> list[Any]:
    """Let it say something, then kill it somewhere behind that; what it said."""
    said = []
    for _ in range(rng.randrange(1, 6)):
        assert pipe.poll(SECONDS), "the writer hangs"
        said.append(pipe.recv())
    for _ in range(rng.randrange(20_000)):
        pass
    process.kill()
    process.join(SECONDS)
    return said


def documents() -> list[list[int]]:
    return [[100 * number + position for position in range(40)] for number in range(NUM_DOCUMENTS)]


def serve_for_ever(root: Path, seed: int, pipe: Connection) -> None:
    """An engine that is asked about documents until it is killed; says if an answer is right, and what was fetched."""
    model = PatternModel(num_layers=2)
    config = Config(
        host_memory=16 * PAGE,
        write_policy=WritePolicy.WRITE_THROUGH,
        storage=StorageConfig(path=str(root), capacity=8 << 20, prefetch=Prefetch.WAIT_COMPLETE),
    )
    storage = FilesystemStorage(root, IDENTITY, PAGE, CAPACITY_OF_ENGINE)
    engine = make_engine(config, model=model, storages=[storage])
    rng = random.Random(seed)
    while True:
        prompt = documents()[rng.randrange(NUM_DOCUMENTS)]
        (request,) = engine.generate([prompt], 2)
        assert engine.connector is not None
        fetched = engine.connector.metrics.fetched_blocks
        pipe.send((request.output_token_ids == model.expected_tokens(prompt, 2), fetched))


def test_an_engine_that_is_killed_leaves_nothing_wrong(tmp_path: Path) -> None:
    """50 kills; every engine is asked for what those before it have left."""
    rng = random.Random(2)
    fetched = 0
    for turn in range(KILLS):
        process, pipe = start(serve_for_ever, tmp_path, turn)
        said = kill(process, pipe, rng)
        assert all(is_right for is_right, _ in said), "an answer rests on bytes that are not its own"
        fetched += said[-1][1]
        assert size_of(tmp_path) <= CAPACITY_OF_ENGINE
    assert fetched > KILLS, "there was something to read"
    store = FilesystemStorage(tmp_path, IDENTITY, PAGE, CAPACITY_OF_ENGINE)
    put(store, keys_of("last", 1), PAGE)
    assert not list((tmp_path / "tmp").iterdir()), "a temporary file is left for ever"
    store.close()


def write_for_ever(root: Path, seed: int, capacity: int, pipe: Connection) -> None:
    """A process that writes and reads until it is killed; it says when each batch begins."""
    store = open_store(root, capacity)
    rng = random.Random(seed)
    while True:
        name = rng.randrange(12)
        pipe.send(name)
        put(store, keys_of(name, rng.randrange(1, 2 * PER_PACK)))
        get(store, keys_of(rng.randrange(12)))


def test_killed_at_any_moment_nothing_wrong_is_ever_read(tmp_path: Path) -> None:
    """50 kills of one of two processes that write into the same folder."""
    capacity = capacity_for(5)
    rng = random.Random(1)
    neighbour, neighbour_pipe = start(write_for_ever, tmp_path, 10**6, capacity)
    found = 0
    for turn in range(KILLS):
        kill(*start(write_for_ever, tmp_path, turn, capacity), rng)
        while neighbour_pipe.poll():
            neighbour_pipe.recv()
        assert neighbour.is_alive(), "a kill disturbed another process"
        # A look takes a while: what its neighbour deletes meanwhile counts beside what takes its place.
        assert min(size_of(tmp_path) for _ in range(3)) <= capacity
        store = open_store(tmp_path, capacity)
        store.recovered.result(SECONDS)
        for name in range(12):
            found += sum(get(store, keys_of(name, 2 * PER_PACK)))
        assert store.stats()["corrupt_blocks"] == 0
        store.close()
    neighbour.kill()
    neighbour.join(SECONDS)
    assert found > KILLS * PER_PACK, "there was something to read"
    store = open_store(tmp_path, capacity)
    put(store, keys_of("last"))
    assert not list((tmp_path / "tmp").iterdir()), "a temporary file is left for ever"
    store.close()
