"""How soon a large host pool serves, and how fast the rest of it is page-locked while it does.

Steps of a server run from the moment the pool is made: the model computes, a few blocks that are ready are saved and
loaded back, and their bytes are compared. The same steps run once more when all of the pool is locked. Needs a GPU;
`--tiny` runs through all of it anywhere.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

from integration.bench.copy_cases import synchronize
from integration.report import Report, hardware
from kv_connector.config import Config
from kv_connector.transfer.engine import TransferEngine
from kv_connector.transfer.memory.host_form import raw_form
from kv_connector.transfer.memory.host_pool import HostPool
from kv_connector.transfer.memory.layout import CacheLayout
from kv_connector.types import CopyJob, Direction

LAYERS = 32
PIECE_BYTES = 64 << 10
MOVED_BLOCKS = 64
"""Saved and loaded back in a step: 128 MiB each way, 1,024 tokens of an 8B model."""


class Steps:
    """Steps of a server with a pool whose first blocks are ready."""

    def __init__(self, host: HostPool, layout: CacheLayout, caches: list[torch.Tensor], size: int) -> None:
        self._host = host
        self._engine = TransferEngine(raw_form(layout), host, Config())
        self._caches = caches
        self._matrix = torch.randn((size, size), device=layout.device).to(torch.bfloat16)
        self._rng = np.random.default_rng(0)
        self._next_job = 0
        self.ms: list[float] = []  # of the host, for each step
        self.launching_ms: list[float] = []  # of that, until the save, and later the load, was submitted

    def run(self) -> None:
        """One step: compute, save from one half of the cache, load into the other one, compare."""
        count = min(MOVED_BLOCKS, self._host.num_ready_blocks)
        sources = np.arange(count, dtype=np.int64)
        targets = sources + MOVED_BLOCKS
        host_ids = self._rng.permutation(self._host.num_ready_blocks)[:count].astype(np.int64)
        for cache in self._caches:
            cache.random_(0, 256)
        synchronize()
        begin = time.perf_counter()
        for _ in range(8):
            torch.mm(self._matrix, self._matrix)
        self._engine.submit_save([CopyJob(self._next_job, Direction.SAVE, sources, host_ids)])
        saving = time.perf_counter() - begin
        ended = self._engine.drain()  # a load may read host blocks at once: what is in them has been saved by then
        saved = time.perf_counter()
        self._engine.submit_load([CopyJob(self._next_job + 1, Direction.LOAD, targets, host_ids)])
        self._engine.wait_all()
        self._next_job += 2
        self.launching_ms.append(1e3 * (saving + time.perf_counter() - saved))
        ended += self._engine.drain()
        synchronize()
        self.ms.append(1e3 * (time.perf_counter() - begin))
        assert [completion.ok for completion in ended] == [True, True]
        assert all(torch.equal(cache[:count], cache[MOVED_BLOCKS:][:count]) for cache in self._caches), "bytes differ"

    def close(self) -> None:
        """Let go of streams and staging."""
        self._engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--gib", type=float, default=64.0, help="of the pool")
    parser.add_argument("--tiny", action="store_true", help="a few MiB, to see that it works")
    options = parser.parse_args()
    if not (torch.cuda.is_available() or options.tiny):
        print("no GPU: there is nothing to lock memory for")
        return 0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    piece_bytes, matrix = (1 << 10, 64) if options.tiny else (PIECE_BYTES, 4096)
    caches = [torch.zeros((2 * MOVED_BLOCKS, piece_bytes), dtype=torch.uint8, device=device) for _ in range(LAYERS)]
    layout = CacheLayout.from_tensors({f"layer {i}": cache for i, cache in enumerate(caches)}, 2 * MOVED_BLOCKS)
    torch.mm(torch.zeros((2, 2), device=device), torch.zeros((2, 2), device=device))
    synchronize()
    num_bytes = 8 << 20 if options.tiny else int(options.gib * 2**30)

    begin = time.perf_counter()
    block_bytes = raw_form(layout).block_bytes
    host = HostPool(num_bytes // block_bytes, block_bytes, device=device)
    made = time.perf_counter() - begin
    while host.num_ready_blocks == 0:
        time.sleep(1e-3)
    usable = time.perf_counter() - begin
    steps = Steps(host, layout, caches, matrix)
    while host.num_ready_blocks < host.num_blocks:
        steps.run()
    locked = time.perf_counter() - begin
    num_beside = len(steps.ms)
    for _ in range(max(20, min(num_beside, 200))):
        steps.run()
    report(options.json, num_bytes, host.is_pinned, (made, usable, locked), steps, num_beside)
    steps.close()
    host.close()
    return 0


def report(
    path: Path | None,
    num_bytes: int,
    is_pinned: bool,
    seconds: tuple[float, float, float],
    steps: Steps,
    num_beside: int,
) -> None:
    """Print, claim and write what was found."""
    made, usable, locked = seconds
    rate = num_bytes / locked / 1e9
    print(f"{hardware()['gpu'] or hardware()['cpu']}: a pool of {num_bytes / 2**30:.3g} GiB, page-locked: {is_pinned}")
    print(f"made after {made:.3f} s, its first blocks after {usable:.3f} s, all of it after {locked:.1f} s")
    rows = {}
    for name, part in (("beside", slice(1, num_beside)), ("after", slice(num_beside + 1, None))):
        ms, launching = steps.ms[part] or steps.ms, steps.launching_ms[part] or steps.launching_ms
        rows[name] = {"steps": len(ms), "step_ms": ms, "launching_ms": launching}
        print(
            f"{len(ms)} steps {name}: {median(ms):.2f} ms, at most {max(ms):.2f}; the launching thread's part "
            f"{median(launching):.2f} ms, at most {max(launching):.2f}"
        )
    found = Report("host_pool")
    found.rows.append({"bytes": num_bytes, "made_s": made, "usable_s": usable, "locked_s": locked, **rows})
    found.claim("pool_usable_after", usable, 1.0, "s", "lower")
    found.claim("page_locked_with_service_running", rate, 2.0, "GB/s", "higher")
    slower = median(rows["beside"]["step_ms"]) / median(rows["after"]["step_ms"]) - 1
    print(f"steps take {slower:+.1%} while memory is locked")
    found.write(path)


if __name__ == "__main__":
    sys.exit(main())
