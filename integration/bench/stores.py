"""Our side of benchmarks of stores, and how long its requests wait for a store that is known to be dead."""

from __future__ import annotations

import hashlib
import time
from contextlib import ExitStack
from itertools import pairwise

from kv_connector.storage.objects.backend import ObjectStorage


class OurStore:
    """`ObjectStorage` with blocks of one size, from `source` to `target`."""

    def __init__(self, storage: ObjectStorage, block_bytes: int, source: memoryview, target: memoryview) -> None:
        """Returns when the store is reached."""
        self.name = f"ours, blocks of {block_bytes >> 10} KiB"
        self.storage = storage
        self.source = cut(source, block_bytes)
        self.target = cut(target, block_bytes)
        with ExitStack() as failed:
            failed.callback(storage.close)
            wait_until_reached(storage)
            failed.pop_all()

    def put(self, turn: int) -> None:
        assert all(self.storage.write(self.keys(turn), self.source).result())

    def close(self) -> None:
        self.storage.close()

    def keys(self, turn: int) -> list[bytes]:
        """Of a turn's blocks."""
        return [hashlib.sha256(f"{self.name} {turn} {i}".encode()).digest() for i in range(len(self.source))]


def wait_until_reached(storage: ObjectStorage) -> None:
    """Raises AssertionError where it is not within half a minute."""
    assert storage.connected.wait(30), "the store was not reached"
    while storage.stats()["breaker_is_open"]:
        time.sleep(0.01)


def cut(memory: memoryview, size: int) -> list[memoryview]:
    """Parts of one size, which follow one another."""
    return [memory[start : start + size] for start in range(0, len(memory), size)]


def longest_wait(ours: OurStore) -> float:
    """Milliseconds of the longest of 300 requests to a dead store, once one has found out that it is."""
    assert ours.storage.exists(ours.keys(0)).result() == 0
    assert ours.storage.stats()["breaker_is_open"]
    waits = []
    for turn in range(100):
        keys = ours.keys(turn)
        times = [time.perf_counter()]
        ours.storage.exists(keys).result()
        times.append(time.perf_counter())
        ours.storage.read(keys, ours.target).result()
        times.append(time.perf_counter())
        ours.storage.write(keys, ours.source).result()
        times.append(time.perf_counter())
        waits += [(after - before) * 1e3 for before, after in pairwise(times)]
    return max(waits)
