"""What one cached block costs the index: match, insert and evict, at 10^3 to 10^6 cached blocks, and its memory.

Beside it, on the same work in the same run, vLLM's block pool where vllm is installed. One unit of work is a chain of
64 blocks: `evict` makes room for it at the cost of the least recently used, `insert` names, fills and releases it
there, `match` finds all of a random one. All sizes and both sides take turns,
`--repeats` times, so that whatever else the machine does falls on all of them; medians count.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any, Protocol

from integration.bench.flat_pool import FlatBlock, FlatPool
from integration.report import Report, hardware
from kv_connector.index import CacheTier, Event, PrefixTree
from kv_connector.types import BlockHash, Tier

CHAIN = 64
CHAINS_PER_REPEAT = 10
SIZES = (1_000, 10_000, 100_000, 1_000_000)
OPERATIONS = ("match", "insert", "evict")


class Index(Protocol):
    """One side of the comparison."""

    name: str

    def insert(self, hashes: Sequence[BlockHash]) -> None: ...

    def match(self, hashes: Sequence[BlockHash]) -> int: ...

    def evict(self) -> None: ...


class OurIndex:
    """`PrefixTree` and `CacheTier` of this package."""

    name = "kv_connector"

    def __init__(self, capacity: int) -> None:
        self.tree = PrefixTree(max_remembered=0)
        self.tier = CacheTier(self.tree, Tier.HOST, capacity, log_removed=True)  # as the scheduler half has it
        self._now = 0.0
        self._room: list[list[int]] = []

    def insert(self, hashes: Sequence[BlockHash]) -> None:
        self._now += 1
        block_ids = self._room.pop() if self._room else self.tier.allocate(len(hashes))
        assert block_ids is not None
        self.tier.attach(block_ids, self.tree.insert_path(hashes, self._now), Event.SWAP_OUT)
        self.tier.fill(block_ids)
        self.tier.release(block_ids)

    def match(self, hashes: Sequence[BlockHash]) -> int:
        return self.tier.resident_prefix(self.tree.match(hashes))

    def evict(self) -> None:
        self._room.append(self.tier.allocate(CHAIN) or [])
        self.tier.removed.clear()  # its owner drains it


class VllmIndex:
    """`BlockPool` of vLLM, called as its `KVCacheManager` does."""

    name = "vllm"

    def __init__(self, capacity: int) -> None:
        from vllm.v1.core.block_pool import BlockPool

        self._pool = BlockPool(capacity + 1, enable_caching=True, hash_block_size=16)  # one is its null block
        self._room: list[list[Any]] = []

    def insert(self, hashes: Sequence[BlockHash]) -> None:
        blocks = self._room.pop() if self._room else self._pool.get_new_blocks(len(hashes))
        request: Any = SimpleNamespace(block_hashes=hashes)
        self._pool.cache_full_blocks(request, blocks, 0, len(hashes), 16, 0)
        self._pool.free_blocks(reversed(blocks))

    def match(self, hashes: Sequence[BlockHash]) -> int:
        found = 0
        for block_hash in hashes:
            if not self._pool.get_cached_block(block_hash, [0]):  # type: ignore[arg-type]  # a NewType of bytes too
                break
            found += 1
        return found

    def evict(self) -> None:
        self._room.append(self._pool.get_new_blocks(CHAIN))


class FlatIndex:
    """What `VllmIndex` does on a model of vLLM's block pool, where vllm is not installed."""

    name = "flat_pool"

    def __init__(self, capacity: int) -> None:
        self._pool = FlatPool(capacity)
        self._room: list[list[FlatBlock]] = []

    def insert(self, hashes: Sequence[BlockHash]) -> None:
        blocks = self._room.pop() if self._room else self._pool.get_new_blocks(len(hashes))
        self._pool.cache_full_blocks(hashes, blocks, 16)
        self._pool.free_blocks(reversed(blocks))

    def match(self, hashes: Sequence[BlockHash]) -> int:
        found = 0
        for block_hash in hashes:
            if not self._pool.get_cached_block(block_hash, [0]):
                break
            found += 1
        return found

    def evict(self) -> None:
        self._room.append(self._pool.get_new_blocks(CHAIN))


def chain(number: int) -> list[BlockHash]:
    """The hashes of chain `number`."""
    return [BlockHash(hashlib.sha256(f"{number}/{index}".encode()).digest()) for index in range(CHAIN)]


def measure(index: Index, size: int) -> Callable[[int], dict[str, float]]:
    """Fill the index with `size` blocks; returns what runs one repeat and gives nanoseconds per block."""
    chains = size // CHAIN
    for number in range(chains):
        index.insert(chain(number))
    rng = random.Random(size)

    def repeat(number: int) -> dict[str, float]:
        first = chains + number * CHAINS_PER_REPEAT
        oldest = first - chains + CHAINS_PER_REPEAT  # what this repeat leaves
        new = [chain(first + i) for i in range(CHAINS_PER_REPEAT)]
        known = [chain(rng.randrange(oldest, first)) for _ in range(CHAINS_PER_REPEAT)]
        times = {
            "evict": _time(lambda: [index.evict() for _ in new]),
            "insert": _time(lambda: [index.insert(hashes) for hashes in new]),
            "match": _time(lambda: [index.match(hashes) for hashes in known]),
        }
        assert all(index.match(hashes) == CHAIN for hashes in known)
        return times

    return repeat


def memory_per_block(size: int) -> float:
    """Bytes that Python allocates for one cached block of ours, its hash included."""
    tracemalloc.start()
    index = OurIndex(size)
    for number in range(size // CHAIN):
        index.insert(chain(number))
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert index.match(chain(0)) == CHAIN
    return used / (size // CHAIN * CHAIN)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=60)
    options = parser.parse_args()
    report, sides = Report("index"), [OurIndex, *vllm_index()]
    print(f"{hardware()['cpu']}, {hardware()['cores']} cores; ns per block, median of {options.repeats} repeats")
    print(f"{'cached blocks':>13}  {'':13}" + "".join(f"{name:>24}" for name in OPERATIONS))
    keys = [(side, size) for size in SIZES for side in sides]
    repeats = {(side.name, size): measure(side(size // CHAIN * CHAIN), size) for side, size in keys}
    gc.collect()
    gc.freeze()  # as vLLM does after start-up: what is cached is not walked again and again
    results: dict[tuple[str, int], list[dict[str, float]]] = {key: [] for key in repeats}
    for number in range(options.repeats):
        for key, repeat in repeats.items():
            results[key].append(repeat(number))
    gc.unfreeze()
    costs = {key: summarize(report, *key, rows) for key, rows in results.items()}
    claim(report, costs, sides)
    report.write(options.json)
    return 0


def summarize(report: Report, name: str, size: int, rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Print and record one line; returns the medians by operation."""
    cells, medians = [], {}
    for operation in OPERATIONS:
        values = [row[operation] for row in rows]
        low, *_, high = quantiles(values, n=10)
        medians[operation] = median(values)
        cells.append(f"{medians[operation]:8.0f} ({low:.0f}..{high:.0f})")
        row = {"index": name, "operation": operation, "cached_blocks": size, "ns_per_block": medians[operation]}
        report.rows.append(row | {"p10": low, "p90": high})
    print(f"{size:13,}  {name:13}" + "".join(f"{cell:>24}" for cell in cells), flush=True)
    return medians


def claim(report: Report, costs: dict[tuple[str, int], dict[str, float]], sides: Sequence[type[Any]]) -> None:
    """What was asked for, and how it compares."""
    for operation in OPERATIONS:
        ours = [costs["kv_connector", size][operation] for size in SIZES]
        growth = max(ours) / ours[0]
        report.claim(f"{operation}_growth_from_1e3_to_1e6_blocks", growth, 1.3, "x", "lower")
    report.claim("memory_per_cached_block", memory_per_block(SIZES[-1]), 400, "bytes", "lower")
    if len(sides) == 1:
        print("vllm is not installed: no comparison")
        return
    for operation in OPERATIONS:
        ratios = [costs["vllm", size][operation] / costs["kv_connector", size][operation] for size in SIZES]
        print(f"        vLLM's {operation} takes {min(ratios):.2f} to {max(ratios):.2f} times as long")


def vllm_index() -> list[type[Any]]:
    try:
        import vllm.v1.core.block_pool  # noqa: F401
    except ImportError:
        return []
    return [VllmIndex]


def _time(work: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start) / (CHAIN * CHAINS_PER_REPEAT)


if __name__ == "__main__":
    sys.exit(main())
