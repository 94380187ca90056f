"""vLLM's device block pool as the scheduler half needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

from ...index import group_key
from ...types import BlockHash

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


class PoolBlocks:
    """See `base.DeviceBlocks`. `groups` maps vLLM's group numbers to ours."""

    def __init__(self, pool: BlockPool, groups: Mapping[int, int]) -> None:
        self._pool = pool
        self._groups = groups

    def touch(self, block_ids: Sequence[int]) -> None:
        blocks = self._pool.blocks
        self._pool.touch([blocks[block_id] for block_id in block_ids])

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        """Blocks that nobody else holds are reused from the tail of a prefix to its head, as vLLM frees a request."""
        blocks = self._pool.blocks
        self._pool.free_blocks([blocks[block_id] for block_id in reversed(block_ids)])

    def next_reused(self, limit: int) -> Sequence[tuple[int, BlockHash]]:
        queue = self._pool.free_block_queue
        block, tail = queue.fake_free_list_head.next_free_block, queue.fake_free_list_tail
        cached = []
        while block is not None and block is not tail and limit > 0:
            if block.block_hash is not None:
                group = self._groups[get_group_id(block.block_hash)]
                cached.append((block.block_id, group_key(BlockHash(get_block_hash(block.block_hash)), group)))
            block = block.next_free_block
            limit -= 1
        return cached
