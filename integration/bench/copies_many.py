"""How fast blocks move when every GPU of a host copies at once: a process each, as tensor-parallel ranks are.

Every rank has its own streams, staging and host pool on its GPU's NUMA node. Each is measured alone, then all together,
between barriers, beside one large pinned copy in the same way. Needs two GPUs or more.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median
from typing import Any

import torch

from integration.bench.copies import size
from integration.bench.copy_cases import make_case, ways_of
from integration.report import Report, hardware
from kv_connector.types import Direction

_LIMIT = 120.0
"""Seconds that a rank waits for the others."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pieces", default="16,64,2048", help="KiB")
    parser.add_argument("--bytes", type=int, default=1 << 30, help="of one copy and rank")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    count = torch.cuda.device_count()
    if count < 2:
        print(f"{count} GPUs here: there is nothing to add up")
        return 0
    report = Report("copies_many")
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(count), context.Queue()
    ranks = [context.Process(target=run_rank, args=(rank, count, options, barrier, queue)) for rank in range(count)]
    for process in ranks:
        process.start()
    rows = [queue.get(timeout=_LIMIT * 3) for _ in ranks]
    for process in ranks:
        process.join(_LIMIT)
    print(f"{count} x {hardware()['gpu']}, GB/s over all ranks")
    for key in rows[0]:
        piece, way, direction = key
        alone, together = (sum(row[key][part] for row in rows) for part in ("alone", "together"))
        print(f"{size(piece):>9} {way:>5} {direction:>5}: {alone:6.1f} one at a time, {together:6.1f} at once")
        report.rows.append({"piece_bytes": piece, "way": way, "direction": direction, "alone": alone, "all": together})
    for key in rows[0]:
        piece, way, direction = key
        if way == "ours":
            link, ours = (sum(row[piece, name, direction]["together"] for row in rows) for name in ("link", "ours"))
            label = f"{direction}_{size(piece).replace(' ', '')}"
            report.claim(f"share_of_all_links_{label}", ours / link, 0.95, "of 1", "higher")
    report.write(options.json)
    return 0


def run_rank(rank: int, count: int, options: argparse.Namespace, barrier: Barrier, queue: Any) -> None:
    """GB/s of each way alone, while the other ranks rest, and together with them."""
    torch.cuda.set_device(rank)
    found: dict[tuple[int, str, str], dict[str, float]] = {}
    for piece in (int(float(text) * 1024) for text in options.pieces.split(",")):
        case = make_case(piece, 64, options.bytes)
        ours = ways_of(case, [])["ours"]
        for name, copy in (("link", case.large_copy), ("ours", ours.copy)):
            for direction in Direction:
                rates = {}
                for part in [*range(count), "together"]:
                    barrier.wait(_LIMIT)
                    if part in (rank, "together"):
                        seconds = [_seconds(copy, direction) for _ in range(options.repeats + 1)][1:]
                        rates["alone" if part == rank else "together"] = case.num_bytes / median(seconds) / 1e9
                found[piece, name, direction.value] = rates
        ours.close()
        case.close()
    queue.put(found)


def _seconds(copy: Any, direction: Direction) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    with torch.cuda.stream(_own_stream()):
        copy(direction)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


_streams: list[torch.cuda.Stream] = []


def _own_stream() -> torch.cuda.Stream:
    if not _streams:
        _streams.append(torch.cuda.Stream())
    return _streams[0]


if __name__ == "__main__":
    sys.exit(main())
