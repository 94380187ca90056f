"""Drives both halves of the package named on the command line; run by test_packaging.py on a vendored copy.

A prompt is computed and saved, then a second request with the same prompt loads it into other device blocks.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

sys.modules["kv_connector"] = sys.modules["triton_kernels"] = None  # type: ignore[assignment]  # an import raises

NAME = sys.argv[1]
kvc: Any = import_module(NAME)
base: Any = import_module(f"{NAME}.base")
BLOCK_SIZE, NUM_BLOCKS, LAYERS = 16, 8, ["layers.0", "layers.1", "layers.2"]


@dataclass
class Request:
    request_id: str
    num_tokens: int
    block_hashes: list[bytes]


class Blocks:
    """The engine's device blocks: how often each is pinned."""

    def __init__(self) -> None:
        self.pins = [0] * NUM_BLOCKS

    def touch(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.pins[block_id] += 1

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.pins[block_id] -= 1

    def next_reused(self, limit: int) -> list[tuple[int, bytes]]:
        return []

    num_available = NUM_BLOCKS

    def forget(self, block_ids: Sequence[int]) -> None:
        pass


def step(scheduler: Any, worker: Any, scheduled: Sequence[Any] = ()) -> None:
    """One step of an engine, with plan and report pickled as between processes."""
    plan = pickle.loads(pickle.dumps(scheduler.build_connector_meta(base.SchedulerOutput(scheduled=tuple(scheduled)))))
    worker.handle_preemptions(plan)
    worker.bind_connector_metadata(plan)
    worker.start_load_kv()
    for layer in LAYERS:
        worker.wait_for_layer_load(layer)
        worker.save_kv_layer(layer)
    worker.wait_for_save()
    worker.get_finished()
    assert worker.get_block_ids_with_load_errors() == set()
    report = worker.build_connector_worker_meta()
    worker.clear_connector_metadata()
    scheduler.update_connector_output([pickle.loads(pickle.dumps(report))])


def serve(scheduler: Any, worker: Any, request: Request, block_ids: list[int]) -> int:
    """Runs a request in one step and waits for its copies; returns the tokens that came from the host."""
    num_loaded, asynchronous = scheduler.get_num_new_matched_tokens(request, 0)
    assert not asynchronous
    scheduler.update_state_after_alloc(request, [block_ids], 0, num_loaded)
    count = request.num_tokens - num_loaded
    step(scheduler, worker, [base.ScheduledRequest(request.request_id, num_loaded, count)])
    deadline = time.monotonic() + 60
    while scheduler.has_pending_push_work():
        assert time.monotonic() < deadline
        step(scheduler, worker)
    assert scheduler.request_finished(request) == (False, None)
    return int(num_loaded)


def main() -> None:
    config = kvc.Config.from_mapping({"host_memory": "1MiB", "write_policy": "write_through"})
    scheduler, worker, blocks = kvc.build_scheduler(config, BLOCK_SIZE), kvc.build_worker(config), Blocks()
    scheduler.bind_block_pool(blocks)
    caches = {name: torch.randint(0, 256, (NUM_BLOCKS, 1000), dtype=torch.uint8) for name in LAYERS}
    worker.register_kv_caches(caches, NUM_BLOCKS)
    step(scheduler, worker)  # the worker tells how many host blocks it has
    hashes = [hashlib.sha256(bytes([index])).digest() for index in range(3)]
    assert serve(scheduler, worker, Request("first", 3 * BLOCK_SIZE + 1, hashes), [0, 1, 2, 3]) == 0
    assert serve(scheduler, worker, Request("second", 3 * BLOCK_SIZE + 1, hashes), [4, 5, 6, 7]) == 3 * BLOCK_SIZE
    assert all(torch.equal(cache[4:7], cache[0:3]) for cache in caches.values())
    assert blocks.pins == [0] * NUM_BLOCKS
    worker.shutdown()
    scheduler.shutdown()
    import_module(f"{NAME}.triton_kernels")
    print("ran", kvc.__name__)


main()
