"""Storage in Mooncake Store over loopback TCP: this package's backend beside Mooncake's own client in the same run.

A master and the owner of the memory are processes of their own. Ours moves blocks of several sizes, small ones in
groups of a megabyte, looks up before it writes and reads, and computes and checks checksums. Mooncake's client moves
the same number of bytes as objects of the same size, 32 MiB in a batch, between registered buffers, and does nothing
else. All take turns, `--repeats` times, and each of ours is compared with the client in its own turn; medians count. At
the end the master is killed, and requests are timed that nobody answers.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Protocol

import numpy as np

from integration.bench.stores import OurStore, longest_wait
from integration.mooncake_master import MooncakeMaster, running_store, store_config, why_not
from integration.report import Report, hardware
from integration.servers import HOST
from kv_connector.storage.mooncake.client import MooncakeClient, MooncakeOptions, load_mooncake
from kv_connector.storage.objects.backend import ObjectStorage

TOTAL = 64 << 20
STORE = 1 << 30
BATCH_BYTES = 32 << 20
OBJECT_SIZES = (1 << 20, 2 << 20)
BLOCK_SIZES = (16 << 10, 128 << 10, 1 << 20, 2 << 20)
CLAIMED_SIZES = (128 << 10, 2 << 20)
GOAL = 0.8
"""Of what Mooncake's client does: the rest is for look-ups and checksums."""
IDENTITY = hashlib.sha256(b"bench").digest()


class Side(Protocol):
    """One side of the comparison."""

    name: str
    object_bytes: int

    def put(self, turn: int) -> None: ...

    def get(self, turn: int) -> None: ...

    def remove(self, turn: int) -> None: ...

    def close(self) -> None: ...


class Ours(OurStore):
    """In a registered pool."""

    def __init__(self, master: MooncakeMaster, block_bytes: int, source: memoryview, target: memoryview) -> None:
        client = MooncakeClient(MooncakeOptions.of(store_config(master), 1, 1))
        storage = ObjectStorage("mooncake", client, IDENTITY, block_bytes, target)
        super().__init__(storage, block_bytes, source, target)
        self.block_bytes = block_bytes
        self.object_bytes = storage.group_blocks * block_bytes

    def get(self, turn: int) -> None:
        keys = self.keys(turn)
        assert self.storage.exists(keys).result() == len(keys)
        assert all(self.storage.read(keys, self.target).result())

    def remove(self, turn: int) -> None:
        self.storage.remove(self.keys(turn)).result()


class Raw:
    """Mooncake's client with objects of one size, as its own examples call it."""

    def __init__(self, master: MooncakeMaster, object_bytes: int, source: memoryview, target: memoryview) -> None:
        self.name = f"Mooncake's client, objects of {object_bytes >> 10} KiB"
        self.object_bytes = object_bytes
        self._store: Any = load_mooncake().MooncakeDistributedStore()
        assert self._store.setup(HOST, "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master.address) == 0
        self._from, self._to = (np.frombuffer(memory, dtype=np.uint8).ctypes.data for memory in (source, target))
        assert self._store.register_buffer(self._from, TOTAL) == self._store.register_buffer(self._to, TOTAL) == 0

    def put(self, turn: int) -> None:
        for names, places in self._batches(turn, self._from):
            assert not any(self._store.batch_put_from(names, places, [self.object_bytes] * len(names)))

    def get(self, turn: int) -> None:
        for names, places in self._batches(turn, self._to):
            sizes = [self.object_bytes] * len(names)
            assert self._store.batch_get_into(names, places, sizes) == sizes

    def remove(self, turn: int) -> None:
        for names, _ in self._batches(turn, 0):
            self._store.batch_remove(names, True)

    def close(self) -> None:
        self._store.close()

    def _batches(self, turn: int, start: int) -> Iterator[tuple[list[str], list[int]]]:
        size, count = self.object_bytes, TOTAL // self.object_bytes
        batch = BATCH_BYTES // size
        for first in range(0, count, batch):
            numbers = range(first, min(first + batch, count))
            yield [f"{self.name} {turn} {i}" for i in numbers], [start + i * size for i in numbers]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    if reason := why_not():
        print(reason)
        return 0
    report = Report("storage_mooncake")
    source, target = memoryview(mmap.mmap(-1, TOTAL)), memoryview(mmap.mmap(-1, TOTAL))
    source[:] = np.random.default_rng(0).integers(0, 256, TOTAL, dtype=np.uint8).tobytes()
    print(f"{hardware()['cpu']}, {hardware()['cores']} cores; GB/s over loopback TCP, median of {options.repeats}")
    with running_store(STORE) as master, ExitStack() as opened:
        clients = {size: opened.enter_context(closing(Raw(master, size, source, target))) for size in OBJECT_SIZES}
        ours = [opened.enter_context(closing(Ours(master, size, source, target))) for size in BLOCK_SIZES]
        sides: list[Side] = [*clients.values(), *ours]
        rates = measure(sides, options.repeats, lambda: _check(source, target))
        compare(report, rates, ours, clients)
        master.kill()
        report.claim("longest_wait_for_a_dead_store", longest_wait(ours[0]), 100, "ms", "lower")
    report.write(options.json)
    return 0


def measure(sides: Sequence[Side], repeats: int, check: Callable[[], None]) -> dict[tuple[str, str], list[float]]:
    """GB/s by side and action, of each repeat; the first round is for warming up."""
    rates: dict[tuple[str, str], list[float]] = {(side.name, action): [] for side in sides for action in ("put", "get")}
    for turn in range(repeats + 1):
        for side in sides:
            for action, call in (("put", side.put), ("get", side.get)):
                start = time.perf_counter()
                call(turn)
                rate = TOTAL / (time.perf_counter() - start) / 1e9
                if turn:
                    rates[side.name, action].append(rate)
            check()
            side.remove(turn)
    return rates


def compare(
    report: Report, rates: dict[tuple[str, str], list[float]], ours: Sequence[Ours], clients: dict[int, Raw]
) -> None:
    """Print and record one line for each side and action, and how ours compares with Mooncake's client."""
    for (name, action), values in rates.items():
        low, *_, high = quantiles(values, n=10)
        print(f"{name:38} {action}: {median(values):6.2f} ({low:.2f}..{high:.2f})")
        report.rows.append({"side": name, "action": action, "gb_per_s": median(values), "p10": low, "p90": high})
    for side in ours:
        for action in ("put", "get"):
            theirs = rates[clients[side.object_bytes].name, action]
            share = median(mine / its for mine, its in zip(rates[side.name, action], theirs, strict=True))
            print(f"{side.name:38} {action}: {share:.2f} of Mooncake's client")
            (row,) = [row for row in report.rows if (row["side"], row["action"]) == (side.name, action)]
            row["share_of_client"] = share
            if side.block_bytes in CLAIMED_SIZES:
                report.claim(f"{action}_of_{side.block_bytes >> 10}_kib_blocks", share, GOAL, "ratio", "higher")


def _check(source: memoryview, target: memoryview) -> None:
    assert source == target, "bytes that were never written"
    target[:] = bytes(len(target))


if __name__ == "__main__":
    sys.exit(main())
