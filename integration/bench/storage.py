"""The folder of packs beside the disk it lies on: throughput against fio, recovery of a large index, look-ups.

Throughput: our storage and fio write new files and read them again in one folder, in blocks of one size, as many in
flight on either side, both past the page cache or neither; they take turns, `--rounds` times, and medians count. fio
runs in both of its usual ways, one process with asynchronous calls (`libaio`) and as many threads as we have
(`psync`), and the better one is what ours is compared with: on a machine that others use too, threads get more. Ours
is asked as the scheduler half asks, for batches of 64 blocks to read and 256 to write, and verifies a checksum of all
that it reads. `shuffled` are blocks of all packs in random order. Recovery: how long a new process takes to know what
`--blocks` blocks lie in a folder. Look-ups: what is known, and what is missing, which makes it look at the folder for
blocks of other processes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np

from integration.report import Report, hardware
from kv_connector.storage.filesystem.backend import NUM_THREADS, FilesystemStorage
from kv_connector.storage.filesystem.layout import FolderLayout
from kv_connector.storage.filesystem.packs import PackHeader

GOALS = {1 << 20: 0.95, 128 << 10: 0.9}
"""Throughput of ours over fio's, by block size."""
SIDES = ("ours", "libaio", "psync")
READ_BATCH, WRITE_BATCH, WRITES_UNDER_WAY = 64, 256, 2  # as `storing.py` has them
INDEX_BLOCK = 1 << 20  # bytes
IDENTITY = hashlib.sha256(b"bench").digest()
T = TypeVar("T")
NO_FIO = "no fio here: nothing to compare with. It is the package `fio` of Debian and others: apt-get install fio"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    parser.add_argument("--mib", type=int, default=1024, help="written and read by each side in each round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--blocks", type=int, default=100_000, help="in the folder that is recovered")
    options = parser.parse_args()
    if shutil.which("fio") is None:
        print(NO_FIO)
        return 0
    report = Report("storage")
    root = Path(tempfile.mkdtemp(prefix="storage_bench_", dir=options.folder))
    try:
        print(f"{hardware()['cpu']}, {os.cpu_count()} cores; {options.folder} on {_file_system(options.folder)}")
        for block_bytes in GOALS:
            measure_throughput(report, root, block_bytes, options.mib << 20, options.rounds)
        for per_pack in (8, 1):
            measure_index(report, root, options.blocks, per_pack)
    finally:
        shutil.rmtree(root)
    report.write(options.json)
    return 0


class Ours:
    """Our storage, and the host's memory that it reads into and writes from."""

    def __init__(self, root: Path, block_bytes: int, memory: list[memoryview]) -> None:
        self.root, self.block_bytes, self.memory = root, block_bytes, memory
        self.storage = FilesystemStorage(root, IDENTITY, block_bytes, 2 * len(memory) * (block_bytes + 4096))
        self.storage.recovered.result()
        self.keys = [block_key(i) for i in range(len(memory))]

    def run(self, kind: str) -> float:
        """Bytes a second."""
        order = list(range(len(self.keys)))
        if kind == "shuffled":
            random.Random(0).shuffle(order)
        start = time.perf_counter()
        done = self._write(order) if kind == "write" else self._read(order)
        seconds = time.perf_counter() - start
        assert all(done), f"{kind}: {done.count(False)} blocks failed"
        return len(done) * self.block_bytes / seconds

    def _write(self, order: Sequence[int]) -> list[bool]:
        done: list[bool] = []
        futures = []
        for batch in batches(order, WRITE_BATCH):
            if len(futures) >= WRITES_UNDER_WAY:
                done += futures.pop(0).result()
            futures.append(self.storage.write([self.keys[i] for i in batch], [self.memory[i] for i in batch]))
        return done + [good for future in futures for good in future.result()]

    def _read(self, order: Sequence[int]) -> list[bool]:
        futures = [
            self.storage.read([self.keys[i] for i in batch], [self.memory[i] for i in batch])
            for batch in batches(order, READ_BATCH)
        ]
        return [good for future in futures for good in future.result()]

    def close(self) -> None:
        """Release and delete everything."""
        self.storage.close()
        shutil.rmtree(self.root)


def run_fio(file: Path, block_bytes: int, size: int, kind: str, is_direct: bool, engine: str) -> float:
    """Bytes a second of one file; "write" makes it anew. With `libaio` one process has as many calls under way as we
    have threads; with `psync` as many threads have one each, in a part of the file of their own."""
    if kind == "write":
        file.unlink(missing_ok=True)
    rw = {"write": "write", "read": "read", "shuffled": "randread"}[kind]
    command = ["fio", "--name=kv", f"--filename={file}", f"--bs={block_bytes}", f"--rw={rw}", f"--ioengine={engine}"]
    command += [f"--direct={is_direct:d}", "--group_reporting", "--output-format=json"]
    if engine == "psync":
        part = size // NUM_THREADS
        command += ["--thread", f"--numjobs={NUM_THREADS}", f"--size={part}", f"--offset_increment={part}"]
    else:
        command += [f"--size={size}", f"--iodepth={NUM_THREADS}"]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    job = json.loads(result.stdout)["jobs"][0]
    return float(job["write" if kind == "write" else "read"]["bw_bytes"])


def measure_throughput(report: Report, root: Path, block_bytes: int, size: int, rounds: int) -> None:
    """Both sides in turn, one after the other first; a row and a claim for each kind of access."""
    whole = memoryview(mmap.mmap(-1, size))
    whole[:] = np.random.default_rng(0).bytes(size)
    memory = [whole[at : at + block_bytes] for at in range(0, size, block_bytes)]
    file = root / "fio.bin"
    kinds = ("write", "read", "shuffled")
    rates: dict[tuple[str, str], list[float]] = {(kind, side): [] for kind in kinds for side in SIDES}
    is_direct = False
    for turn in range(rounds):
        ours = Ours(root / "ours", block_bytes, memory)
        is_direct = ours.storage.is_direct
        for kind in kinds:
            for side in SIDES[turn % len(SIDES) :] + SIDES[: turn % len(SIDES)]:
                if side == "ours":
                    rate = ours.run(kind)
                else:
                    rate = run_fio(file, block_bytes, size, kind, is_direct, side)
                rates[kind, side].append(rate)
        ours.close()
    file.unlink()
    how = "past the page cache" if is_direct else "through the page cache"
    print(f"\n{size >> 20} MiB in blocks of {block_bytes >> 10} KiB, {NUM_THREADS} in flight, {how}, {rounds} rounds")
    print("MB/s, median (least to most)")
    for kind in kinds:
        sides = {side: rates[kind, side] for side in SIDES}
        best = max(SIDES[1:], key=lambda side: median(sides[side]))
        ratios = [ours / fio for ours, fio in zip(sides["ours"], sides[best], strict=True)]
        value = median(sides["ours"]) / median(sides[best])
        shown = "; ".join(f"{side} {spread(values, 1e6)}" for side, values in sides.items())
        print(f"{kind:9} {shown}; over {best} {value:.2f} (round by round {min(ratios):.2f} to {max(ratios):.2f})")
        row = {"part": "throughput", "kind": kind, "block_bytes": block_bytes, "bytes": size, "direct": is_direct}
        report.rows.append(row | {f"{side}_bytes_per_second": values for side, values in sides.items()})
        report.claim(f"{kind}_over_fio_{block_bytes >> 10}_kib", value, GOALS[block_bytes], "of 1", "higher")


def measure_index(report: Report, root: Path, num_blocks: int, per_pack: int) -> None:
    """Recovery and look-ups of a folder with so many blocks. Their bytes are holes: nothing here reads them."""
    folder = root / "many"
    keys = [block_key(i) for i in range(num_blocks)]
    fill_folder(folder, keys, per_pack)
    num_packs = -(-num_blocks // per_pack)
    seconds = []
    for turn in range(4):  # the first has no journal yet
        drop_caches()
        start = time.perf_counter()
        storage = FilesystemStorage(folder, IDENTITY, INDEX_BLOCK, 1 << 50)
        storage.recovered.result()
        seconds.append(time.perf_counter() - start)
        assert storage.stats()["stored_blocks"] == num_blocks
        if turn < 3:
            storage.close()
    without, seconds = seconds[0], seconds[1:]
    caches = "dropped" if os.geteuid() == 0 else "warm"
    print(f"\n{num_blocks} blocks in {num_packs} packs, the system's caches {caches}")
    print(f"known after {spread(seconds, 1)} s, and where the journal is lost after {without:.4g} s")
    row = {"part": "recovery", "blocks": num_blocks, "packs": num_packs, "caches": caches}
    report.rows.append(row | {"seconds": seconds, "seconds_without_journal": without})
    report.claim(f"recovery_of_{num_blocks}_blocks_in_{num_packs}_packs", median(seconds), 5, "s", "lower")
    hit = _milliseconds(lambda: storage.exists(keys[:64]).result(), 200)
    missed = _milliseconds(lambda: storage.exists([b"x" * 32]).result(), 200)
    print(f"look-up of 64 blocks: {spread(hit, 1)} ms; of one that is missing: {spread(missed, 1)} ms")
    report.rows.append({"part": "look_up", "packs": num_packs, "hit_ms": median(hit), "missed_ms": median(missed)})
    storage.close()
    shutil.rmtree(folder)


def fill_folder(folder: Path, keys: Sequence[bytes], per_pack: int, block_bytes: int = INDEX_BLOCK) -> None:
    """Packs as our storage writes them, their blocks never written and no journal."""
    layout = FolderLayout(folder)
    layout.claim()
    for batch in batches(keys, per_pack):
        header = PackHeader(IDENTITY, block_bytes, tuple(batch), (bytes(4),) * len(batch))
        path = layout.path(header.name)
        path.write_bytes(header.encode())
        os.truncate(path, header.file_bytes)


def batches(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """In order, the last one shorter."""
    return [items[i : i + size] for i in range(0, len(items), size)]


def block_key(number: int) -> bytes:
    """What storage knows this block by."""
    return hashlib.sha256(f"block {number}".encode()).digest()


def _milliseconds(call: Callable[[], object], count: int) -> list[float]:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def spread(values: Sequence[float], unit: float) -> str:
    """Median, least and most, in this unit."""
    return f"{median(values) / unit:.4g} ({min(values) / unit:.4g} to {max(values) / unit:.4g})"


def drop_caches() -> None:
    """Of the system, where we may: what was just written is to be read from the disk."""
    os.sync()
    if os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("3")


def _file_system(folder: Path) -> str:
    shown = subprocess.run(["df", "--output=fstype,source", folder], check=True, capture_output=True, text=True)
    return " ".join(shown.stdout.splitlines()[-1].split())


if __name__ == "__main__":
    sys.exit(main())
