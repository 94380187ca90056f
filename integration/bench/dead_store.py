"""How long requests wait for a store that is known to be dead, for benchmarks of stores."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Protocol

from kv_connector.storage.objects.backend import ObjectStorage


class Side(Protocol):
    """A backend, with memory that it was measured with."""

    storage: ObjectStorage
    source: list[memoryview]
    target: list[memoryview]

    def keys(self, turn: int) -> list[bytes]:
        """Of a turn's blocks."""


def longest_wait(ours: Side) -> float:
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
