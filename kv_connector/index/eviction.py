"""The order in which leaves are evicted, O(log n) an eviction.

Only nodes that can be evicted now (leaves, in practice) wait here, each at most once, so a tree of long chains needs
little memory. They wait in as many heaps as the order has classes, in each the least recently used first; the one that
is worth least of those at the top goes. Recency changes are not pushed into a heap: a node that was used since it was
queued, or is of another class by now, goes back where it belongs when it comes up.

After a leaf its prefix is evicted, from its end, as far as it is due before other leaves. A prefix that was inserted at
once lies in neighbouring rows, which are compared many at once: a small part of what it takes to look at each.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..types import Tier
from .pool import BlockPool
from .terms import NUM_PRIORITIES, PRIORITY_STEP
from .tree import NONE, PrefixTree

Key = tuple[float, float, int]
"""Worth, time of last use, node."""

NEVER = float("inf")
LAST: Key = (NEVER, NEVER, 0)
NO_LIMIT = 1 << 62
_STRETCH = 64  # rows that are compared at once
_LEAST_RUN = 16  # of fewer each is looked at sooner


class EvictionOrder(Protocol):
    """What a copy is worth. Within a class the least recently used is taken to be worth least. Nodes of priority 0 are
    in the first classes, which are few."""

    def resized(self, capacity: int) -> None:
        """The tier has so many blocks."""

    def class_of(self, node: int) -> int:
        """The node's class, from 0 on; it changes only when the node is used."""

    def worth(self, node: int) -> float:
        """The worth now; the lowest is evicted first. Equal for nodes that were `asked` for together and have as many
        `visits`."""


class Recency:
    """Least recently used first, of those of one priority."""

    def __init__(self, tree: PrefixTree) -> None:
        self._priority = tree.terms.priority

    def resized(self, capacity: int) -> None:
        """Does nothing."""

    def class_of(self, node: int) -> int:
        """Those of one priority are alike."""
        return self._priority[node] % NUM_PRIORITIES

    def worth(self, node: int) -> float:
        """Those of one priority are alike."""
        return PRIORITY_STEP * self._priority[node]


class EvictionQueue:
    """Heaps of (time of last use, node), one for each class. `evictable(node)` is checked again when a node is at the
    top."""

    def __init__(
        self,
        tree: PrefixTree,
        tier: Tier,
        ref_counts: Sequence[int],
        order: EvictionOrder,
        evictable: Callable[[int], bool],
    ) -> None:
        self._tree = tree
        self._used = tree.used
        self._block = tree.block[tier]
        self._kids = tree.kids[tier]
        self._refs = ref_counts
        self._keeps_pinned = tier is not Tier.DEVICE
        self._order = order
        self._evictable = evictable
        self._heaps: list[list[tuple[float, int]]] = []  # by class, as many as there were any of
        self._queued = bytearray()

    def __len__(self) -> int:
        return sum(map(len, self._heaps))

    # What several tenants need, see `TenantQueues`: here there is one, and nothing to count.

    def resized(self, capacity: int) -> None:
        """All of it is for this one."""

    def handed_out(self, block_ids: Sequence[int], tenant: int) -> None:
        """To this one."""

    def attached(self, block_ids: Sequence[int], nodes: Sequence[int]) -> None:
        """They stay this one's."""

    def freed(self, block_ids: Sequence[int]) -> None:
        """By this one."""

    def all_freed(self, pool: BlockPool) -> None:
        """By this one."""

    def check_owners(self, block_ids: NDArray[np.intp], nodes: NDArray[np.intc]) -> None:
        """They are this one's."""

    # Eviction.

    def push(self, node: int) -> None:
        """Queue a node that has become evictable; does nothing if it is queued already."""
        if node >= len(self._queued):
            self._queued.extend(bytes(len(self._used) - len(self._queued)))
        if not self._queued[node]:
            self._queued[node] = 1
            self._put(self._order.class_of(node), node)

    def key(self, node: int) -> Key:
        """The key by which nodes are ordered."""
        return self._order.worth(node), self._used[node], node

    def first(self, older_than: float = NEVER, tenant: int | None = None) -> Key:
        """The key of the evictable node of least worth, of those that were last used before `older_than`; it stays
        queued. Greater than all keys if there is none."""
        for index, heap in enumerate(self._heaps):
            if heap:
                self._settle(index)
        return self._head(older_than)

    def _head(self, older_than: float) -> Key:
        """As `first`, where nothing has changed since it or `pop`."""
        # Of those that went to a lower class, too: each is in order there.
        keys = [self.key(heap[0][1]) for heap in self._heaps if heap and heap[0][0] < older_than]
        return min(keys, default=LAST)

    def pop(self, older_than: float = NEVER, most: float = NEVER) -> Key | None:
        """Remove the node that `first` names, unless it is worth more than `most`."""
        worth, time, node = first = self.first(older_than)
        if time == NEVER or worth > most:
            return None
        index = self._order.class_of(node)
        heapq.heappop(self._heaps[index])
        self._queued[node] = 0
        self._settle(index)  # what is of another class by now goes there before others come on top of it
        return first

    def take(
        self,
        num_nodes: int,
        older_than: float = NEVER,
        most: float = NEVER,
        tenant: int | None = None,
        num_free: int = 0,
    ) -> list[int]:
        """Remove up to this many victims, in eviction order, and decrement their parents' counts of children; none that
        is worth more than `most`."""
        tree, kids, block, refs, worth_of = self._tree, self._kids, self._block, self._refs, self._order.worth
        used, parents, pins, asked, visits = tree.used, tree.parent, tree.pins, tree.asked, tree.visits
        priorities = tree.terms.priority
        self._queued.extend(bytes(len(used) - len(self._queued)))
        victims, queued, keeps_pinned, left = list[int](), self._queued, self._keeps_pinned, num_nodes
        while left and (first := self.pop(older_than, most)) is not None:
            worth, time, node = first
            time_asked, num_visits, priority = asked[node], visits[node], priorities[node]
            # Whatever comes after the last one.
            due = min(self._head(older_than), (most, NEVER, 0)) if left > 1 else first
            is_ahead = (worth, time) < due[:2]  # and so are those in front that are worth the same
            while is_ahead and (num_run := self._run_ending_at(node, left - 1)):
                victims += range(node, node - num_run, -1)
                node -= num_run
                left -= num_run
            while True:  # up its prefix, the usual case without a detour through the heaps
                victims.append(node)
                left -= 1
                parent = parents[node]
                num_kids = kids[parent] = kids[parent] - 1
                own_time = used[parent]
                if own_time < time:
                    own_time = used[parent] = time
                # As `evictable`, for a copy without references is resident.
                block_id = block[parent]
                if num_kids or block_id == NONE or refs[block_id] or (keeps_pinned and pins[parent]):
                    break
                is_alike = own_time == time and asked[parent] == time_asked and visits[parent] == num_visits
                if not (is_alike and priorities[parent] == priority):
                    worth, time, time_asked, num_visits = worth_of(parent), own_time, asked[parent], visits[parent]
                    priority = priorities[parent]
                    is_ahead = time < older_than and (worth, time) < due[:2]
                # One that waits already, since it was a leaf before, comes up by itself.
                if not (left and (is_ahead or (time < older_than and (worth, time, parent) < due))) or queued[parent]:
                    self.push(parent)
                    break
                node = parent
        return victims

    def clear(self) -> None:
        """Empty the queue."""
        for heap in self._heaps:
            heap.clear()
        self._queued = bytearray()

    def check(self, pool: BlockPool) -> None:
        """Verify that the flags and the heaps agree."""
        waiting = [node for heap in self._heaps for _, node in heap]
        flagged = [node for node in set(waiting) if node in self]
        assert len(flagged) == len(waiting) == self._queued.count(1), "queue flags and heaps disagree"

    def _put(self, index: int, node: int) -> None:
        while index >= len(self._heaps):
            self._heaps.append([])
        heapq.heappush(self._heaps[index], (self._used[node], node))

    def _settle(self, index: int) -> None:
        """Bring the node of a class to its top that was used longest ago and can be evicted."""
        heap, used = self._heaps[index], self._used
        while heap:
            time, node = heap[0]
            if not self._evictable(node):
                heapq.heappop(heap)
                self._queued[node] = 0
            elif (found := self._order.class_of(node)) != index:
                heapq.heappop(heap)
                self._put(found, node)
            elif time < used[node]:
                heapq.heapreplace(heap, (used[node], node))
            else:
                return

    def _run_ending_at(self, node: int, most: int) -> int:
        """How many blocks up from a victim go together, by comparing many at once: they lie in neighbouring rows, are
        worth the same, and only the one behind keeps each in front. None where that has to be looked at one by one."""
        tree, kids = self._tree, self._kids
        count = min(most, tree.depth[node], node - 1, _STRETCH)
        first = node - count
        if count < _LEAST_RUN or kids[first:node].count(1) < count or not tree.is_run(first, node):
            return 0
        block_ids = self._block[first:node]
        is_kept = NONE in block_ids or any(map(self._refs.__getitem__, block_ids)) or any(tree.pins[first:node])
        if is_kept or 1 in self._queued[first:node]:
            return 0
        kids[first:node] = array("i", bytes(count * kids.itemsize))
        return count

    def __contains__(self, node: int) -> bool:
        return node < len(self._queued) and bool(self._queued[node])
