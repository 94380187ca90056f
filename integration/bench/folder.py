"""A folder of many packs beside an empty one: what a write, a start and the statistics take.

Writes of one block into a full folder of `--packs` packs, each of which evicts one, and writes into an empty folder
that never fills, take turns; medians count. Beside them a thread asks for statistics, as the one that launches the
model does. A start is how long a new process takes to know what lies there, where the index and the names are in the
system's page cache; `storage.py` measures one from the disk.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import shutil
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median

from integration.bench.storage import IDENTITY, fill_folder
from integration.report import Report, hardware
from kv_connector.storage.filesystem.backend import FilesystemStorage
from kv_connector.storage.filesystem.folder import room_bytes

BLOCK = 4096  # bytes
STATS_PAUSE = 0.001  # seconds between two questions for statistics


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    parser.add_argument("--packs", type=int, default=100_000)
    parser.add_argument("--writes", type=int, default=300, help="into each folder")
    parser.add_argument("--starts", type=int, default=5)
    options = parser.parse_args()
    report = Report("folder")
    root = Path(tempfile.mkdtemp(prefix="folder_bench_", dir=options.folder))
    try:
        print(f"{hardware()['cpu']}, {os.cpu_count()} cores; {options.folder}; {options.packs} packs of one block")
        fill_folder(root / "many", [_key(f"old {i}") for i in range(options.packs)], 1, BLOCK)
        capacity = measure_starts(report, root / "many", options.starts)
        measure_writes(report, root, capacity, options.writes)
    finally:
        shutil.rmtree(root)
    report.write(options.json)
    return 0


def measure_starts(report: Report, folder: Path, count: int) -> int:
    """A row and a claim; what the folder takes with all that is written of its packs."""
    seconds, cpu_seconds = [], []
    taken = 0
    for _ in range(count + 1):
        start, cpu_start = time.perf_counter(), time.process_time()
        with closing(_open(folder, 1 << 50)) as storage:
            seconds.append(time.perf_counter() - start)
            cpu_seconds.append(time.process_time() - cpu_start)
            taken = int(storage.stats()["stored_bytes"]) + 2 * (folder / "index").stat().st_size
    first, seconds = seconds[0], seconds[1:]  # the first has no journal
    print(f"known after {median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f}), {first:.3f} s by listing")
    print(f"of these on the processor: {median(cpu_seconds[1:]):.3f} s")
    report.rows.append(
        {"part": "start", "seconds": seconds, "cpu_seconds": cpu_seconds[1:], "seconds_without_journal": first}
    )
    report.claim("start_seconds", median(seconds), 1.0, "s", "lower")
    return taken


def measure_writes(report: Report, root: Path, capacity: int, count: int) -> None:
    """Into the full folder and into an empty one, in turn."""
    places = {"full": (root / "many", capacity + room_bytes(1, BLOCK)), "empty": (root / "empty", 1 << 50)}
    milliseconds: dict[str, list[float]] = {name: [] for name in places}
    asked: list[float] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.wait(STATS_PAUSE):
            start = time.perf_counter()
            sides["full"].stats()
            asked.append(1e3 * (time.perf_counter() - start))

    with ExitStack() as opened:
        sides = {name: opened.enter_context(closing(_open(*place))) for name, place in places.items()}
        model = threading.Thread(target=ask)
        model.start()
        opened.callback(model.join)
        opened.callback(is_over.set)
        buffer = [memoryview(mmap.mmap(-1, BLOCK))]
        for turn in range(count):
            for name in ("full", "empty") if turn % 2 else ("empty", "full"):
                start = time.perf_counter()
                done = sides[name].write([_key(f"new {turn}")], buffer).result()
                milliseconds[name].append(1e3 * (time.perf_counter() - start))
                assert done == [True], f"the write into the {name} folder failed"
        evicted = sides["full"].stats()["evicted_blocks"]
        assert evicted >= count // 2, f"{evicted} blocks were evicted: the folder was not full"
    for name, values in milliseconds.items():
        print(f"write into the {name} folder: {median(values):.2f} ms ({min(values):.2f} to {max(values):.2f})")
    print(f"statistics beside it: {median(asked):.4f} ms, most {max(asked):.3f} ms, {len(asked)} times")
    ratio = median(milliseconds["full"]) / median(milliseconds["empty"])
    report.rows.append({"part": "writes", "milliseconds": milliseconds, "evicted_blocks": evicted})
    report.rows.append({"part": "statistics", "milliseconds": {"median": median(asked), "most": max(asked)}})
    report.claim("full_over_empty_write", ratio, 2.0, "of 1", "lower")


def _open(folder: Path, capacity: int) -> FilesystemStorage:
    storage = FilesystemStorage(folder, IDENTITY, BLOCK, capacity)
    storage.recovered.result()
    return storage


def _key(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


if __name__ == "__main__":
    sys.exit(main())
