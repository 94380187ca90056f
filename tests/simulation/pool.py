"""The device blocks of a simulated engine, after vLLM's `BlockPool`: one flat pool, reference counts, a queue of free
blocks.

Block 0 stands for no block. A block keeps its name (its hash) when it is freed, and is matched until it is handed out
again; blocks without a name are handed out first, those with one in the order in which they were freed. `ConnectorView`
is what the connector is given of it; what that has pinned is counted apart, so that checks can tell a lease from a
request's own hold.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

from kv_connector.index import group_key
from kv_connector.types import BlockHash

from .checks import Violation

NULL_BLOCK = 0


class BlockPool:
    """`num_blocks` blocks, the null block among them. Only the engine's scheduler and the connector call."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.pins = [0] * num_blocks  # those of the connector among them
        self.names: list[BlockHash | None] = [None] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._cached: dict[BlockHash, dict[int, None]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def find(self, block_hash: BlockHash, group: int) -> int | None:
        """A block of this name, the first that got it."""
        blocks = self._cached.get(group_key(block_hash, group))
        return next(iter(blocks)) if blocks else None

    def allocate(self, count: int) -> list[int]:
        """The next `count` free blocks, which lose their names."""
        if count > len(self._free):
            raise Violation("pool", f"{count} blocks were asked for and {len(self._free)} are free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self.forget(block)
            self.refs[block] = 1
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Hold each block once more."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if self.refs[block] == 0:
                del self._free[block]
            self.refs[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Hold each block once less, in the order in which they are to be handed out again."""
        named, nameless = [], []
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if self.refs[block] == 0:
                raise Violation("pool", f"device block {block} is freed more often than it was held")
            self.refs[block] -= 1
            if self.refs[block] == 0:
                (nameless if self.names[block] is None else named).append(block)
        for block in reversed(nameless):
            self._free[block] = None
            self._free.move_to_end(block, last=False)
        self._free.update(dict.fromkeys(named))

    def name(self, block: int, block_hash: BlockHash, group: int) -> None:
        """The block is matched by this name from now on."""
        key = group_key(block_hash, group)
        if self.names[block] == key:
            return
        if self.names[block] is not None:
            raise Violation("pool", f"device block {block} has a name and gets another one")
        self.names[block] = key
        self._cached.setdefault(key, {})[block] = None

    def forget(self, block: int) -> None:
        """The block is matched no more."""
        key, self.names[block] = self.names[block], None
        if key is not None:
            blocks = self._cached[key]
            del blocks[block]
            if not blocks:
                del self._cached[key]

    def reset(self, even_if_held: bool = False) -> bool:
        """Forget every name; False, and nothing is done, where blocks are held, unless that is no matter."""
        if not even_if_held and len(self._free) != self.num_blocks - 1:
            return False
        for block in range(1, self.num_blocks):
            self.forget(block)
        return True

    def next_reused(self, limit: int) -> list[tuple[int, BlockHash]]:
        """Named blocks among the next `limit` to be handed out."""
        found = []
        for block in self._free:
            if limit <= 0:
                break
            limit -= 1
            name = self.names[block]
            if name is not None:
                found.append((block, name))
        return found

    def check(self) -> None:
        """Free blocks are those that nobody holds, and names lead to the blocks that have them."""
        free = {block for block, refs in enumerate(self.refs) if refs == 0 and block != NULL_BLOCK}
        if free != self._free.keys():
            raise Violation("pool", f"free blocks are {sorted(self._free)}, blocks that nobody holds {sorted(free)}")
        for block, (pins, refs) in enumerate(zip(self.pins, self.refs, strict=True)):
            if not 0 <= pins <= refs:
                raise Violation("pool", f"device block {block} is pinned {pins} and held {refs} times")


class ConnectorView:
    """See `kv_connector.base.DeviceBlocks`."""

    def __init__(self, pool: BlockPool, on_freed: Callable[[Sequence[int]], None]) -> None:
        self._pool = pool
        self._on_freed = on_freed

    def touch(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            self._pool.pins[block] += 1
        self._pool.touch(block_ids)

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        self._on_freed(block_ids)
        for block in block_ids:
            if self._pool.pins[block] == 0:
                raise Violation("pool", f"the connector frees device block {block}, which it has not pinned")
            self._pool.pins[block] -= 1
        self._pool.free(reversed(block_ids))

    def next_reused(self, limit: int) -> Sequence[tuple[int, BlockHash]]:
        return self._pool.next_reused(limit)

    @property
    def num_available(self) -> int:
        return self._pool.num_free

    def forget(self, block_ids: Collection[int]) -> None:
        for block in block_ids:
            self._pool.forget(block)
