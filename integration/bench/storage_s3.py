"""Storage in S3 on loopback: this package's backend beside obstore's own calls in the same run.

moto's server is a process of its own. Ours moves blocks of several sizes in groups, looks up before it writes, copies,
and computes and checks checksums. The raw side puts and gets objects of the same size, as many at a time, out of one
piece of memory and into memory of the library's, and does nothing else. All take turns, in an order that rotates,
`--repeats` times; medians count. At the end the server is killed, and requests are timed that nobody answers.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Protocol

import numpy as np

from integration.bench.stores import OurStore, cut, longest_wait
from integration.report import Report, hardware
from integration.s3_server import S3Server, running_s3, s3_settings, why_not
from kv_connector.config import S3Config, StorageConfig
from kv_connector.storage.s3.backend import GROUP_BYTES, open_s3
from kv_connector.storage.s3.client import S3Client

TOTAL = 128 << 20
OBJECT = GROUP_BYTES
BLOCK_SIZES = (64 << 10, 512 << 10, 4 << 20)
IDENTITY = hashlib.sha256(b"bench").digest()
RAW = "obstore"
ACTIONS = ("put", "look up", "get")


class Side(Protocol):
    """One side of the comparison."""

    name: str

    def put(self, turn: int) -> None: ...

    def look_up(self, turn: int) -> None: ...

    def get(self, turn: int) -> None: ...

    def remove(self, turn: int) -> None: ...

    def close(self) -> None: ...


class Ours(OurStore):
    """Its target is cleared after each turn."""

    def __init__(self, config: S3Config, block_bytes: int, source: memoryview, target: memoryview) -> None:
        super().__init__(open_s3(config, IDENTITY, block_bytes), block_bytes, source, target)
        self._whole_source, self._whole_target = source, target

    def look_up(self, turn: int) -> None:
        keys = self.keys(turn)
        assert self.storage.exists(keys).result() == len(keys)

    def get(self, turn: int) -> None:
        assert all(self.storage.read(self.keys(turn), self.target).result())

    def remove(self, turn: int) -> None:
        assert self._whole_source == self._whole_target, "bytes that were never written"
        self._whole_target[:] = bytes(TOTAL)
        self.storage.remove(self.keys(turn)).result()


class Raw:
    """obstore's calls on a pool of threads, as its documentation has it."""

    name = RAW

    def __init__(self, config: S3Config, source: memoryview) -> None:
        import obstore

        self._obstore: Any = obstore
        self._client = S3Client(config)  # the same settings
        self._store = self._client._store
        self._parts = cut(source, OBJECT)
        self._threads = ThreadPoolExecutor(config.concurrency)

    def put(self, turn: int) -> None:
        def put(name: str, part: memoryview) -> None:
            self._obstore.put(self._store, name, part, use_multipart=False)

        list(self._threads.map(put, self._names(turn), self._parts))

    def look_up(self, turn: int) -> None:
        list(self._threads.map(lambda name: self._obstore.head(self._store, name), self._names(turn)))

    def get(self, turn: int) -> None:
        sizes = self._threads.map(lambda name: len(self._obstore.get(self._store, name).bytes()), self._names(turn))
        assert sum(sizes) == TOTAL

    def remove(self, turn: int) -> None:
        self._obstore.delete(self._store, self._names(turn))

    def close(self) -> None:
        self._threads.shutdown()
        self._client.close()

    def _names(self, turn: int) -> list[str]:
        return [f"raw.{turn}.{i}" for i in range(len(self._parts))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    if reason := why_not():
        print(reason)
        return 0
    report = Report("storage_s3")
    source, target = memoryview(mmap.mmap(-1, TOTAL)), memoryview(mmap.mmap(-1, TOTAL))
    source[:] = np.random.default_rng(0).integers(0, 256, TOTAL, dtype=np.uint8).tobytes()
    print(f"{hardware()['cpu']}, {hardware()['cores']} cores; MB/s over loopback, median of {options.repeats}")
    with running_s3() as server, ExitStack() as opened:
        config = _config(server)
        sides: list[Side] = [opened.enter_context(closing(Raw(config, source)))]
        ours = [opened.enter_context(closing(Ours(config, size, source, target))) for size in BLOCK_SIZES]
        sides += ours
        compare(report, measure(sides, options.repeats))
        server.kill()
        report.claim("longest_wait_for_a_dead_server", longest_wait(ours[0]), 100, "ms", "lower")
    report.write(options.json)
    return 0


def measure(sides: Sequence[Side], repeats: int) -> dict[tuple[str, str], list[float]]:
    """MB/s by side and action, of each repeat; the first round is for warming up."""
    rates: dict[tuple[str, str], list[float]] = {(side.name, action): [] for side in sides for action in ACTIONS}
    for turn in range(repeats + 1):
        for side in _rotated(sides, turn):
            for action, call in zip(ACTIONS, (side.put, side.look_up, side.get), strict=True):
                start = time.perf_counter()
                call(turn)
                rate = TOTAL / (time.perf_counter() - start) / 1e6
                if turn:
                    rates[side.name, action].append(rate)
            side.remove(turn)
    return rates


def compare(report: Report, rates: dict[tuple[str, str], list[float]]) -> None:
    """Print and record one line for each side and action, with how ours compares with the library's own calls."""
    for (name, action), values in rates.items():
        low, *_, high = quantiles(values, n=10)
        ratio = median(mine / theirs for mine, theirs in zip(values, rates[RAW, action], strict=True))
        print(f"{name:26} {action:8}: {median(values):7.1f} ({low:.1f}..{high:.1f}), {ratio:.2f} of {RAW}'s own calls")
        row = {"side": name, "action": action, "mb_per_s": median(values), "p10": low, "p90": high}
        report.rows.append(row | {"share_of_obstore": ratio})
        if name != RAW and action != "look up":
            claim = f"{action}_{name.rpartition(' of ')[2].replace(' ', '').lower()}_share_of_obstore"
            report.claim(claim, ratio, 0.8, "", "higher")


def _config(server: S3Server) -> S3Config:
    config = StorageConfig(**s3_settings(server.endpoint)).s3
    assert config is not None
    return config


def _rotated(sides: Sequence[Side], turn: int) -> Iterator[Side]:
    first = turn % len(sides)
    yield from sides[first:]
    yield from sides[:first]


if __name__ == "__main__":
    sys.exit(main())
