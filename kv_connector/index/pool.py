"""Pool of block ids with reference counts: who may use which block, in O(1) a block."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from ..errors import InvalidBlockError
from .columns import column

_FREE = -1


class BlockPool:
    """Ids 0 to capacity - 1. An id is free, or live with a count of references; a live id may have none (it is idle).

    `allocate` hands out ids with one reference, `acquire` adds one, `release` takes one away, `free` gives an idle id
    back. Ids are made on first use, so a pool of a million blocks costs nothing until they are used. An error changes
    nothing. `ref_counts`, by id, is for reading only.
    """

    __slots__ = ("_free", "_fresh", "capacity", "num_live", "ref_counts")

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise InvalidBlockError(f"a pool of {capacity} blocks is impossible: give 0 or more")
        self.capacity = capacity
        self.num_live = 0
        self.ref_counts = array("i")  # by id, for every id below _fresh; _FREE where the id is not live
        self._free = array("i")  # ids below both _fresh and capacity that are not live
        self._fresh = 0  # ids from here on have never been used

    @property
    def num_free(self) -> int:
        """Ids that `allocate` could hand out now."""
        return len(self._free) + max(0, self.capacity - self._fresh)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """`num_blocks` ids with one reference each, or None (and nothing changed) where fewer are free."""
        if num_blocks < 0:
            raise InvalidBlockError(f"cannot allocate {num_blocks} blocks: give 0 or more")
        if num_blocks > self.num_free:
            return None
        if not num_blocks:
            return []
        from_free = min(num_blocks, len(self._free))
        split = len(self._free) - from_free
        ids = self._free[split:].tolist()
        del self._free[split:]
        for block_id in ids:
            self.ref_counts[block_id] = 1
        fresh = num_blocks - from_free
        ids.extend(range(self._fresh, self._fresh + fresh))
        self.ref_counts.extend([1] * fresh)
        self._fresh += fresh
        self.num_live += num_blocks
        return ids

    def refs(self, block_id: int) -> int:
        """References of a live id; raises InvalidBlockError for one that is not live."""
        if not self.is_live(block_id):
            raise InvalidBlockError(f"block {block_id} is not live (capacity {self.capacity})")
        return self.ref_counts[block_id]

    def is_live(self, block_id: int) -> bool:
        """Whether the id has been allocated and not freed since."""
        return 0 <= block_id < self._fresh and self.ref_counts[block_id] != _FREE

    def acquire(self, block_ids: Sequence[int]) -> list[int]:
        """Add one reference to each live id; returns those that were idle."""
        counts, fresh, idle = self.ref_counts, self._fresh, []
        for done, block_id in enumerate(block_ids):
            count = counts[block_id] if 0 <= block_id < fresh else _FREE
            if count <= 0:
                if count < 0:
                    self.release(block_ids[:done])
                    raise InvalidBlockError(f"block {block_id} is acquired but not live (capacity {self.capacity})")
                idle.append(block_id)
            counts[block_id] = count + 1
        return idle

    def reuse(self, block_ids: Sequence[int]) -> None:
        """Give ids that the caller knows to be idle one reference each: as `free` and `allocate` of the same ids."""
        counts = self.ref_counts
        for block_id in block_ids:
            counts[block_id] = 1

    def release(self, block_ids: Sequence[int]) -> list[int]:
        """Take one reference from each id; returns those that became idle, in the order given."""
        counts, fresh, idle = self.ref_counts, self._fresh, []
        for done, block_id in enumerate(block_ids):
            count = counts[block_id] if 0 <= block_id < fresh else 0
            if count <= 1:
                if count < 1:
                    self.acquire(block_ids[:done])
                    raise InvalidBlockError(f"block {block_id} is released more often than it was acquired")
                idle.append(block_id)
            counts[block_id] = count - 1
        return idle

    def free(self, block_ids: Sequence[int]) -> None:
        """Give idle ids back; raises InvalidBlockError, and frees none, for a double free or an id in use."""
        counts = self.ref_counts
        for done, block_id in enumerate(block_ids):
            if not (0 <= block_id < self._fresh and counts[block_id] == 0):
                fault = f"is freed while {counts[block_id]} still use it" if self.is_live(block_id) else "is not live"
                for earlier in block_ids[:done]:
                    counts[earlier] = 0
                raise InvalidBlockError(f"block {block_id} {fault}")
            counts[block_id] = _FREE
        self.num_live -= len(block_ids)
        self._free.extend([block_id for block_id in block_ids if block_id < self.capacity])

    def free_idle(self) -> None:
        """Give every idle id back, as fast as arrays are written. Ids from the first on behind which none is live are
        new again."""
        column(self.ref_counts)[column(self.ref_counts) == 0] = _FREE
        live = np.flatnonzero(column(self.ref_counts) != _FREE)
        self.num_live = len(live)
        self._fresh = int(live[-1]) + 1 if len(live) else 0
        free = np.flatnonzero(column(self.ref_counts)[: min(self._fresh, self.capacity)] == _FREE)
        self._free = array("i", free.astype(np.intc).tobytes())
        del self.ref_counts[self._fresh :]

    def resize(self, capacity: int) -> None:
        """Change the capacity. Live ids at or above a smaller one stay valid and leave the pool when freed.

        O(ids between the old and the new capacity).
        """
        if capacity < 0:
            raise InvalidBlockError(f"a pool of {capacity} blocks is impossible: give 0 or more")
        if capacity < self.capacity:
            self._free = array("i", [block_id for block_id in self._free if block_id < capacity])
        else:
            returning = range(self.capacity, min(capacity, self._fresh))
            self._free.extend(block_id for block_id in returning if self.ref_counts[block_id] == _FREE)
        # Ids between the first unused one and a capacity that shrank and grew again are simply still unused.
        self.capacity = capacity

    def live_ids(self, first: int = 0) -> Sequence[int]:
        """Live ids from `first` on, ascending."""
        live: list[int] = (np.flatnonzero(np.array(self.ref_counts[first:]) != _FREE) + first).tolist()
        return live

    def check(self) -> None:
        """Verify every invariant; O(ids ever used)."""
        live = self.live_ids()
        assert len(live) == self.num_live, f"{len(live)} ids are live, {self.num_live} counted"
        free = set(self._free)
        assert len(free) == len(self._free), "an id is on the free list twice"
        assert not free & set(live), f"live and free at once: {sorted(free & set(live))}"
        below = set(range(min(self._fresh, self.capacity)))
        assert free == below - set(live), f"lost or foreign ids: {sorted(free ^ (below - set(live)))}"
