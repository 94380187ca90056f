"""Processes that are killed while they write to a folder: what they leave is right, and no more than there may be."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from kv_connector.config import Config, Prefetch, StorageConfig, WritePolicy
from kv_connector.scheduler.storage import reading
from kv_connector.storage.filesystem.backend import FilesystemStorage
from tests.fakes import PatternModel, make_engine
from tests.storage.storages import IDENTITY, PER_PACK, SECONDS, capacity_for, get, keys_of, open_store, put, size_of

KILLS = 50
KILLING_SECONDS = 80.0
"""No kill begins later. A writer makes hundreds of calls on the disk one behind another: where others keep the disk's
queue full each of them takes half a second, and there are fewer kills than `KILLS`."""
SILENT_SECONDS = 120.0
"""A writer that says nothing for so long hangs; one beside a full queue was heard after 16 s at the latest."""
PAGE = 4096
NUM_DOCUMENTS = 10
CAPACITY_OF_ENGINE = 90 * PAGE  # some documents of ten blocks, not all


def run(target: Callable[..., None], *arguments: object) -> None:
    """In a process of its own, which tells where its threads are when it is aborted."""
    faulthandler.enable()
    target(*arguments)


@contextmanager
def started(target: Callable[..., None], *arguments: object) -> Iterator[tuple[BaseProcess, Connection]]:
    """A process that sends what it does. It is dead behind the block: no later test runs beside it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.storage.storages", "tests.fakes"])
    ours, theirs = context.Pipe()
    process = context.Process(target=run, args=(target, *arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join(SECONDS)
        ours.close()


def hear(process: BaseProcess, pipe: Connection) -> Any:
    """What it says next."""
    if not pipe.poll(SILENT_SECONDS):
        assert process.pid is not None
        os.kill(process.pid, signal.SIGABRT)
        process.join(SECONDS)
        pytest.fail("the writer hangs: its error output says where")
    return pipe.recv()


def listen(process: BaseProcess, pipe: Connection, rng: random.Random) -> list[Any]:
    """Let it say something, and come to somewhere behind that; what it said."""
    said = [hear(process, pipe) for _ in range(rng.randrange(1, 6))]
    for _ in range(rng.randrange(20_000)):
        pass
    return said


def turns() -> Iterator[int]:
    """Of killing: see `KILLING_SECONDS`."""
    end = time.monotonic() + KILLING_SECONDS
    return takewhile(lambda _: time.monotonic() < end, range(KILLS))


def documents() -> list[list[int]]:
    return [[100 * number + position for position in range(40)] for number in range(NUM_DOCUMENTS)]


def serve_for_ever(root: Path, seed: int, pipe: Connection) -> None:
    """An engine that is asked about documents until it is killed; says if an answer is right, and what was fetched."""
    # An engine that waits looks at its clock thousands of times before a busy disk answers: that is no silence.
    reading.STALL_SECONDS = reading.LOST_SECONDS = 1e9
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
    for turn in turns():
        with started(serve_for_ever, tmp_path, turn) as (process, pipe):
            said = listen(process, pipe, rng)
        assert all(is_right for is_right, _ in said), "an answer rests on bytes that are not its own"
        fetched += said[-1][1]
        assert size_of(tmp_path) <= CAPACITY_OF_ENGINE
    assert fetched > turn, "there was something to read"
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
        put(store, keys_of(name, rng.randrange(1, 2 * PER_PACK)), seconds=SILENT_SECONDS)
        get(store, keys_of(rng.randrange(12)), seconds=SILENT_SECONDS)


def test_killed_at_any_moment_nothing_wrong_is_ever_read(tmp_path: Path) -> None:
    """50 kills of one of two processes that write into the same folder."""
    capacity = capacity_for(5)
    rng = random.Random(1)
    found = 0
    with started(write_for_ever, tmp_path, 10**6, capacity) as (neighbour, neighbour_pipe):
        for turn in turns():
            with started(write_for_ever, tmp_path, turn, capacity) as (process, pipe):
                listen(process, pipe, rng)
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
    assert found > turn * PER_PACK, "there was something to read"
    store = open_store(tmp_path, capacity)
    put(store, keys_of("last"))
    assert not list((tmp_path / "tmp").iterdir()), "a temporary file is left for ever"
    store.close()
