"""vLLM's device block pool as the scheduler half needs it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, make_block_hash_with_group_id

from ...index import group_key
from ...types import BlockHash

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


class PoolBlocks:
    """See `base.DeviceBlocks`. `groups` maps vLLM's group numbers to ours, where we keep the group; `is_held` says
    whether any request may hold blocks.

    vLLM refuses a reset of the device cache while a block is in use, without asking connectors first: our pins would
    make it fail, and `reset_running_requests=True` raises then. So `reset_prefix_cache` of this pool instance is
    wrapped: our pins are released during the call.
    """

    def __init__(self, pool: BlockPool, groups: Mapping[int, int], is_held: Callable[[], bool]) -> None:
        self._pool = pool
        self._groups = groups
        self._is_held = is_held
        self._reset: Callable[[], bool] = pool.reset_prefix_cache
        pool.reset_prefix_cache = self._reset_prefix_cache

    def touch(self, block_ids: Sequence[int]) -> None:
        blocks = self._pool.blocks
        self._pool.touch([blocks[block_id] for block_id in block_ids])

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        """See `base.DeviceBlocks`. Blocks without other references are freed from the tail of a prefix to its head, as
        vLLM frees a request."""
        blocks = self._pool.blocks
        self._pool.free_blocks([blocks[block_id] for block_id in reversed(block_ids)])

    def next_reused(self, limit: int) -> Sequence[tuple[int, BlockHash]]:
        queue = self._pool.free_block_queue
        block, tail = queue.fake_free_list_head.next_free_block, queue.fake_free_list_tail
        cached = []
        while block is not None and block is not tail and limit > 0:
            group = self._groups.get(get_group_id(block.block_hash)) if block.block_hash is not None else None
            if group is not None:
                cached.append((block.block_id, group_key(BlockHash(get_block_hash(block.block_hash)), group)))
            block = block.next_free_block
            limit -= 1
        return cached

    def is_cached_as(self, block_id: int, block_hash: BlockHash, group_id: int) -> bool:
        """Whether vLLM's prefix cache still has this block of its group under this hash."""
        return bool(self._pool.blocks[block_id].block_hash == make_block_hash_with_group_id(block_hash, group_id))

    @property
    def num_available(self) -> int:
        return int(self._pool.get_num_free_blocks())

    def forget(self, block_ids: Collection[int]) -> None:
        self._pool.evict_blocks(set(block_ids))

    def _reset_prefix_cache(self) -> bool:
        """As vLLM's, but only blocks that requests hold make it refuse.

        What no request holds is pinned: by copies of ours, or by vLLM itself, which frees the blocks of a preempted
        request only when the steps under way have ended. Every pin is given back as it was before anybody can ask for
        a block, so what a copy or a step reads or writes is never handed out, and no byte changes hands here: only the
        block hashes are forgotten.
        """
        if self._is_held():
            return self._reset()
        pinned = [block for block in self._pool.blocks if block.ref_cnt > 0 and not block.is_null]
        pins = [block for block in pinned for _ in range(block.ref_cnt)]
        while held := [block for block in pinned if block.ref_cnt > 0]:
            self._pool.free_blocks(held)  # vLLM before 0.25 queues a block twice that is named twice in one call
        try:
            return self._reset()
        finally:
            self._pool.touch(pins)
