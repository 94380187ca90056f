"""A flat block pool with prefix caching, as vLLM 0.32 has it, for machines without vLLM.

Modelled on `vllm/v1/core/block_pool.py` and `kv_cache_utils.py`, call by call and with the same data: objects for
blocks, a doubly linked list of free ones in eviction order, one dictionary from hash and group to block. What a
benchmark does not reach (events, partial blocks, metrics) is left out, the tests for it are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class FlatBlock:
    """`KVCacheBlock`."""

    block_id: int
    ref_cnt: int = 0
    _block_hash: bytes | None = None
    _num_tokens: int | None = None
    prev_free: FlatBlock | None = None
    next_free: FlatBlock | None = None
    is_null: bool = False

    @property
    def block_hash(self) -> bytes | None:
        return self._block_hash

    def set_block_hash(self, block_hash: bytes, num_tokens: int) -> None:
        assert self.block_hash is None and self._num_tokens is None
        self._block_hash = block_hash
        self._num_tokens = num_tokens

    def reset_hash(self) -> None:
        self._block_hash = None
        self._num_tokens = None


class _FreeQueue:
    """`FreeKVCacheBlockQueue`."""

    def __init__(self, blocks: Sequence[FlatBlock]) -> None:
        self.num_free = len(blocks)
        self._head, self._tail = FlatBlock(-1), FlatBlock(-1)
        last = self._head
        for block in (*blocks, self._tail):
            last.next_free, block.prev_free = block, last
            last = block

    def popleft_n(self, count: int) -> list[FlatBlock]:
        assert self.num_free >= count
        self.num_free -= count
        block, popped = self._head.next_free, []
        for _ in range(count):
            assert block is not None
            popped.append(block)
            last, block = block, block.next_free
            last.prev_free = None
            last.next_free = None
        if block is not None:
            self._head.next_free, block.prev_free = block, self._head
        return popped

    def append_n(self, blocks: Sequence[FlatBlock]) -> None:
        last = self._tail.prev_free
        assert last is not None
        for block in blocks:
            block.prev_free = last
            last.next_free = block
            last = block
        last.next_free, self._tail.prev_free = self._tail, last
        self.num_free += len(blocks)


class _HashMap:
    """`BlockHashToBlockMap`: one block of a key, or a dictionary of several."""

    def __init__(self) -> None:
        self._cache: dict[bytes, FlatBlock | dict[int, FlatBlock]] = {}

    def get_one_block(self, key: bytes) -> FlatBlock | None:
        found = self._cache.get(key)
        if found is not None:
            if isinstance(found, FlatBlock):
                return found
            return next(iter(found.values()))
        return None

    def contain(self, key: bytes, block_id: int) -> bool:
        found = self._cache.get(key)
        if found is None:
            return False
        if isinstance(found, FlatBlock):
            return found.block_id == block_id
        return block_id in found

    def insert(self, key: bytes, block: FlatBlock) -> None:
        found = self._cache.get(key)
        if found is None:
            self._cache[key] = block
        elif isinstance(found, FlatBlock):
            self._cache[key] = {found.block_id: found, block.block_id: block}
        else:
            found[block.block_id] = block

    def pop(self, key: bytes, block_id: int) -> FlatBlock | None:
        found = self._cache.pop(key, None)
        if found is None:
            return None
        if isinstance(found, FlatBlock):
            if found.block_id == block_id:
                return found
            self._cache[key] = found
            return None
        block = found.pop(block_id, None)
        if found:
            self._cache[key] = found
        return block


class FlatPool:
    """`BlockPool`."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [FlatBlock(index) for index in range(num_blocks)]
        self._free = _FreeQueue(self.blocks)
        self._map = _HashMap()
        self._more_hashes: dict[int, set[bytes]] = {}  # of partial blocks, which a benchmark has none of
        self._events: list[bytes] | None = None

    def get_cached_block(self, block_hash: bytes, group_ids: Sequence[int]) -> list[FlatBlock] | None:
        found = []
        for group_id in group_ids:
            block = self._map.get_one_block(_key(block_hash, group_id))
            if not block:
                return None
            found.append(block)
        return found

    def get_new_blocks(self, count: int) -> list[FlatBlock]:
        if count > self._free.num_free:
            raise ValueError(f"{count} blocks are not free")
        blocks = self._free.popleft_n(count)
        for block in blocks:
            self._maybe_evict(block)
            assert block.ref_cnt == 0
            block.ref_cnt += 1
        return blocks

    def cache_full_blocks(self, hashes: Sequence[bytes], blocks: Sequence[FlatBlock], block_size: int) -> None:
        for index, block in enumerate(blocks):
            if block.is_null:
                continue
            block_hash = hashes[index]
            num_tokens = (index + 1) * block_size
            key = _key(block_hash, 0)
            assert block.block_hash is None, "a full block is cached twice"
            self._insert(key, block, num_tokens)
            if self._events is not None:
                self._events.append(block_hash)

    def free_blocks(self, ordered_blocks: Iterable[FlatBlock]) -> None:
        cached, others = [], []
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and not block.is_null:
                if block.block_hash is None:
                    others.append(block)
                else:
                    cached.append(block)
        assert not others, "a benchmark frees blocks that are cached"
        self._free.append_n(cached)

    def _insert(self, key: bytes, block: FlatBlock, num_tokens: int) -> None:
        if block.block_hash == key:
            return
        if self._map.contain(key, block.block_id):
            return
        block.set_block_hash(key, num_tokens)
        self._map.insert(key, block)

    def _maybe_evict(self, block: FlatBlock) -> bool:
        evicted = self._remove_hashes(block)
        if not evicted:
            return False
        self._emit_removed(evicted)
        return True

    def _remove_hashes(self, block: FlatBlock) -> list[bytes]:
        keys: list[bytes] = []
        if block.block_hash is not None:
            keys.append(block.block_hash)
        keys.extend(self._more_hashes.pop(block.block_id, ()))
        if not keys:
            return []
        removed = []
        for key in keys:
            if self._map.pop(key, block.block_id) is not None:
                removed.append(key)
        block.reset_hash()
        return removed

    def _emit_removed(self, keys: Sequence[bytes]) -> None:
        if self._events is not None:
            self._events += keys


def _key(block_hash: bytes, group_id: int) -> bytes:
    return block_hash + group_id.to_bytes(4, "big", signed=False)
