"""vLLM's block pool, shown to the scheduler half."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="real vLLM runs in a virtual environment of its own: make test-vllm")

from vllm.v1.core.block_pool import BlockPool

from kv_connector.engines.vllm.blocks import PoolBlocks


def test_a_reset_gives_back_blocks_that_are_pinned_more_than_once() -> None:
    """A block that is saved and sent to another engine at once has two pins. vLLM before 0.25 queues a block twice that
    is freed twice in one call, and hands it out twice."""
    pool = BlockPool(num_gpu_blocks=8, enable_caching=True, hash_block_size=16)
    blocks = PoolBlocks(pool, {0: 0}, is_held=lambda: False)
    used = [block.block_id for block in pool.get_new_blocks(3)]
    blocks.touch(used)
    assert pool.reset_prefix_cache(), "no request holds a block"
    assert [pool.blocks[block_id].ref_cnt for block_id in used] == [2, 2, 2]
    assert pool.get_num_free_blocks() == 4
    blocks.free_blocks(used)
    blocks.free_blocks(used)
    handed_out = [block.block_id for block in pool.get_new_blocks(7)]
    assert sorted(handed_out) == [1, 2, 3, 4, 5, 6, 7]
