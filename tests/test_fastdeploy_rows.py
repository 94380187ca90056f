"""FastDeploy's Cache Manager V1, row by row: each test fails on the behaviour that its row describes.

The rows are those of a feature-by-feature reading of that system (its pull request #7097). Where a row is about
storage, IPC or RDMA, it waits for those parts. Rows about copies are in
test_fastdeploy_copy_rows.py, row "NUMA" is in test_numa.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from integration.mini_engine.engine import MiniEngine
from kv_connector.base import KVConnectorScheduler, KVConnectorWorker
from kv_connector.config import Config
from kv_connector.index import BlockHasher, BlockPool, BlockState, CacheTier, MultimodalItem, PrefixTree
from kv_connector.scheduler import SchedulerHalf
from kv_connector.types import BlockHash, Direction, Tier
from kv_connector.worker import WorkerHalf
from tests.fakes import LateWorker, PatternModel, check_engine, make_engine
from tests.index.chains import path, resident, store

PROMPT = list(range(24))


def through(num_host_blocks: int = 50, **settings: Any) -> MiniEngine:
    """An engine whose blocks have 4 tokens and take 4 KiB on the host."""
    return make_engine(Config.from_mapping({"host_memory": num_host_blocks * 4096, **settings}))


def answer(engine: MiniEngine, prompt: Sequence[int] = PROMPT, num_tokens: int = 2) -> Any:
    (request,) = engine.generate([prompt], num_tokens)
    check_engine(engine)
    return request


def half_of(engine: MiniEngine) -> SchedulerHalf:
    assert engine.connector is not None
    return engine.connector


def worker_of(engine: MiniEngine) -> LateWorker:
    worker = engine._runner.workers[0]  # type: ignore[union-attr]
    assert isinstance(worker, LateWorker)
    return worker


def push_off_device(engine: MiniEngine) -> None:
    """Fill the device with something else."""
    for other in range(4):
        answer(engine, [500 + other] * 40)
    assert engine.scheduler.device.resident_prefix(engine.scheduler.tree.match(half_hashes(PROMPT))) == 0


def half_hashes(prompt: Sequence[int]) -> list[Any]:
    engine = through()
    return list(engine.add(prompt, 1).block_hashes)


def test_row_prefix_index() -> None:
    """Row "Prefix index". LRU was O(n) per eviction (`nsmallest` over all leaves): ours looks at a handful, however
    many there are."""
    looked_at = []
    for count in (100, 10_000):
        host = CacheTier(PrefixTree(), Tier.HOST, count)
        for name in range(count):
            store(host, [*path(name % 256), *path(name % 256, name // 256)[1:]], now=float(name))
        asked = 0
        inner = host._queue._evictable

        def counting(node: int, inner: Any = inner) -> bool:
            nonlocal asked
            asked += 1
            return bool(inner(node))

        host._queue._evictable = counting
        host.release(host.allocate(1) or [])
        looked_at.append(asked)
    assert max(looked_at) <= 4


def test_row_block_hash() -> None:
    """Row "Block hash". Hashes came from pickle, without LoRA, salt or model (see test_hashing), and every block
    rescanned all items."""

    class CountingItem(MultimodalItem):
        reads = 0

        def __getattribute__(self, name: str) -> Any:
            if name == "start":
                CountingItem.reads += 1
            return super().__getattribute__(name)

    items = [CountingItem(b"i", 4 * index, 4) for index in range(200)]
    BlockHasher(4, BlockHash(bytes(32)), items).update(list(range(800)))
    assert CountingItem.reads < 200 * 8


@pytest.mark.parametrize("end", ["abort", "preempt"])
def test_row_insert(end: str) -> None:
    """Row "Insert". Blocks were matchable from allocation on: an abort before the forward pass left garbage for others
    to read."""
    engine = through(write_policy="write_through")
    engine.add(PROMPT, 2, "doomed")
    step = engine.scheduler.schedule()
    node = engine.scheduler.tree.match(step.requests[0].block_hashes)[0]
    assert engine.scheduler.device.node_state(node) is BlockState.COMPUTING
    if end == "abort":
        engine.scheduler.abort("doomed")
    else:
        engine.scheduler._preempt(step.requests[0], step)
    assert engine.scheduler.device.node_state(node) is BlockState.ABSENT
    check_engine(engine)


def test_row_ref_counts() -> None:
    """Row "Ref counts". References were taken in the first of two matches, so an abort in between leaked them."""
    engine = through(write_policy="write_through")
    answer(engine)
    push_off_device(engine)
    request = engine.add(PROMPT, 2, "asked twice")
    for _ in range(2):
        half_of(engine).get_num_new_matched_tokens(request, 0)
    engine.scheduler.abort("asked twice")
    for tier in (engine.scheduler.device, half_of(engine).host):
        assert all(tier.pool.refs(block_id) == 0 for block_id in tier.pool.live_ids())


def test_row_lru_eviction_heads_first() -> None:
    """Row "LRU eviction". Touching root to leaf made the heads of prefixes the oldest: they went first and orphaned
    their tails."""
    host = CacheTier(PrefixTree(), Tier.HOST, 4)
    store(host, path(1, 2, 3, 4))
    host.release(host.allocate(2) or [])
    assert resident(host, path(1, 2, 3, 4)) == 2


def test_row_lru_eviction_host_parent_of_a_device_child() -> None:
    """Row "LRU eviction". A match split by status and joined device and host blocks in the wrong order."""
    tree = PrefixTree()
    device, host = CacheTier(tree, Tier.DEVICE, 4), CacheTier(tree, Tier.HOST, 3)
    store(host, path(1, 2, 3))
    store(device, path(1, 2, 3, 4))
    device.acquire(device.blocks_of(tree.match(path(1))))
    host.release(host.allocate(2) or [])  # the host's (1, 2, 3) and (1, 2) go, under device children
    nodes = tree.match(path(1, 2, 3, 4))
    assert (device.resident_prefix(nodes), host.resident_prefix(nodes)) == (4, 1)
    assert [tree.hash_of(node) for node in nodes] == path(1, 2, 3, 4)
    for part in (tree, device, host):
        part.check()


def test_row_evict_nodes_selective() -> None:
    """Row "evict_nodes_selective". A shortage returned [] instead of None; and `allocate(0)` handed out every block."""
    host = CacheTier(PrefixTree(), Tier.HOST, 3)
    assert host.allocate(4) is None
    assert host.allocate(0) == []


def test_row_write_through() -> None:
    """Row "write_through". write_through was "selective, threshold 1": a block that is never matched again was never
    saved."""
    engine = through(write_policy="write_through")
    answer(engine)
    assert half_of(engine).metrics.saved_blocks == 6


def test_row_write_through_selective_backed_up_at_issue() -> None:
    """Row "write_through_selective". A block counted as backed up when its copy was issued: a failed or unfinished copy
    could be matched."""
    engine = through(write_policy="write_through")
    worker_of(engine).hold = True
    engine.add(PROMPT, 1)
    for _ in range(3):
        engine.step()
    half = half_of(engine)
    assert half.metrics.saves_on_compute_blocks == 6
    assert half.metrics.saved_blocks == 0
    assert half.host.resident_prefix(half.tree.match(half_hashes(PROMPT))) == 0
    worker_of(engine).hold = False
    engine.run()
    assert half.metrics.saved_blocks == 6


def test_row_write_through_selective_all_or_nothing() -> None:
    """Row "write_through_selective". With room for some candidates none was saved."""
    engine = through(num_host_blocks=4, write_policy="write_through")
    answer(engine)
    assert half_of(engine).metrics.saved_blocks == 4


def test_row_write_through_selective_hidden_copies() -> None:
    """Row "write_through_selective". Host copies of blocks that were on the device as well could not be evicted: the
    pool filled, saving stopped."""
    engine = through(num_host_blocks=4, write_policy="write_through")
    answer(engine, [1] * 17)
    answer(engine, [2] * 17)
    half = half_of(engine)
    assert half.metrics.saved_blocks == 8
    assert half.host.num_evicted == 4


def test_row_write_through_selective_error_path() -> None:
    """Row "write_through_selective". Host blocks of a failed copy leaked."""
    engine = through(num_host_blocks=6, write_policy="write_through")
    path_of = worker_of(engine).path
    assert path_of is not None
    path_of.fail_in[Direction.SAVE] = 0
    answer(engine)
    assert half_of(engine).host.pool.num_free + half_of(engine).host.num_copies == 6
    answer(engine, [7] * 25)
    assert half_of(engine).host.num_copies == 6


def test_row_write_back() -> None:
    """Row "write_back". The tree said "not implemented"; the worker thread waited up to 300 s. Ours saves ahead of
    reuse and waits for nothing: while the copy is late, the engine goes on and the block stays pinned."""
    engine = through(write_policy="write_back", write_back_lookahead=16)
    worker_of(engine).hold = True
    answer_request = engine.add(PROMPT, 2)
    while not answer_request.is_finished:
        engine.step()
    engine.step()  # nothing to compute: the finished blocks are next in line
    assert half_of(engine).metrics.saves_on_reuse_blocks == 6
    other = engine.add([9] * 8, 2)
    while not other.is_finished:
        engine.step()
    worker_of(engine).hold = False
    engine.run()
    assert half_of(engine).host.resident_prefix(half_of(engine).tree.match(half_hashes(PROMPT))) == 6


def test_row_write_back_ordering() -> None:
    """Row "write_back ordering". The host source of a load was freed when it was planned, and another copy of the batch
    was evicted into it."""
    engine = through(num_host_blocks=6, write_policy="write_through")
    expected = answer(engine).output_token_ids
    engine.scheduler.device.reset()
    again = engine.add(PROMPT[:21], 2)  # loads 5 of the 6 host blocks ...
    other = engine.add([3] * 9, 2)  # ... while this one wants to save 2, in the same step
    engine.run()
    check_engine(engine)
    assert again.host_hit_tokens == 20
    model = PatternModel()
    assert again.output_token_ids == model.expected_tokens(PROMPT[:21], 2)
    assert other.output_token_ids == model.expected_tokens([3] * 9, 2)
    assert expected == model.expected_tokens(PROMPT, 2)


def test_row_pending_evicts() -> None:
    """Row "Pending evicts". A failed copy was never marked done, and every later one waited 300 s for it."""
    engine = through(write_policy="write_through")
    path_of = worker_of(engine).path
    assert path_of is not None
    path_of.fail_in[Direction.SAVE] = 0
    answer(engine)
    assert not half_of(engine).has_pending_push_work()
    answer(engine, [8] * 12)
    assert half_of(engine).metrics.failed_save_jobs == 1
    assert half_of(engine).metrics.saved_blocks >= 3


def test_row_failure_marking() -> None:
    """Row "Failure marking". A layer whose copy failed was counted as done: silent garbage."""
    engine = through(write_policy="write_through", layer_group_bytes=1)
    answer(engine)
    engine.scheduler.device.reset()
    path_of = worker_of(engine).path
    assert path_of is not None
    path_of.fail_in[Direction.LOAD] = 1  # the second layer group
    again = answer(engine)
    assert half_of(engine).metrics.failed_load_jobs == 1
    assert again.output_token_ids == PatternModel().expected_tokens(PROMPT, 2)


def test_row_batch_request_merge() -> None:
    """Row "BatchRequest merge". Merging a batch mutated the first request's lists and lost which request failed."""
    engine = through(write_policy="write_through")
    answer(engine)
    answer(engine, [5] * 24)
    engine.scheduler.device.reset()
    requests = [engine.add(PROMPT, 1), engine.add([5] * 24, 1)]
    step = engine.scheduler.schedule()
    assert step.plan is not None
    assert [job.device_ids.tolist() for job in step.plan.loads] == [request.block_ids[:5] for request in requests]
    assert len({job.job_id for job in step.plan.loads}) == 2
    assert all(len(request.block_ids) == 6 for request in requests)


def test_row_reset_with_copies_in_flight() -> None:
    """Row "reset/free". Reset did not drain copies and kept pending maps: ours forgets at once and keeps the memory
    until they end."""
    engine = through(write_policy="write_through")
    worker_of(engine).hold = True
    engine.add(PROMPT, 1)
    for _ in range(4):
        engine.step()
    assert engine.scheduler.reset_cache()
    host = half_of(engine).host
    assert host.num_copies == 0
    assert host.pool.num_live == 6, "blocks that a copy still writes"
    assert {host.state(block_id) for block_id in host.pool.live_ids()} == {BlockState.DELETING}
    worker_of(engine).hold = False
    engine.run()
    assert host.pool.num_live == 0
    assert half_of(engine).metrics.saved_blocks == 0
    assert answer(engine).host_hit_tokens == 0


def test_row_start_stop() -> None:
    """Row "start/stop (pause)". Pausing called methods that did not exist: every method of the interface is there, and
    stopping twice is fine."""
    assert not SchedulerHalf.__abstractmethods__
    assert not WorkerHalf.__abstractmethods__
    for interface, half in ((KVConnectorScheduler, SchedulerHalf), (KVConnectorWorker, WorkerHalf)):
        assert issubclass(half, interface)
    engine = through(write_policy="write_through")
    answer(engine)
    engine.shutdown()
    engine.shutdown()


def test_row_resize() -> None:
    """Row "resize". After shrinking, a live id above the new size came back to the free list."""
    pool = BlockPool(4)
    ids = pool.allocate(4) or []
    pool.resize(2)
    pool.free(pool.release(ids))
    assert sorted(pool.allocate(2) or []) == [0, 1]
    assert pool.allocate(1) is None
    pool.check()


def test_row_stats() -> None:
    """Row "Stats". There were counts, but no bytes, no policy and nothing of what was waited for."""
    engine = through(write_policy="write_through", trace_loads=True)
    answer(engine)
    engine.scheduler.device.reset()
    answer(engine)
    stats = half_of(engine).get_kv_connector_stats()
    row_bytes = 3 * 2 * 4 * 4  # layers, tensors, tokens, bytes
    assert stats["loaded_bytes"] == 5 * row_bytes
    assert stats["saved_bytes"] == 6 * row_bytes
    assert stats["host_hit_tokens"] == 20
    assert stats["saves_on_compute_blocks"] == 6
    assert stats["load_milliseconds"] > 0


def test_row_rank_naming() -> None:
    """Row "Rank naming". One side named tensors by rank modulo TP size, the other by rank: here a rank is an index on
    both sides."""
    engine = make_engine(Config(host_memory="1MiB", write_policy="write_through"), model=PatternModel(num_ranks=3))
    answer(engine)
    engine.scheduler.device.reset()
    again = answer(engine)
    assert again.host_hit_tokens == 20
    assert again.output_token_ids == PatternModel(num_ranks=3).expected_tokens(PROMPT, 2)
