"""The order in which leaves are evicted, O(log n) an eviction.

Only nodes that can be evicted now (leaves, in practice) wait here, each at most once, so a tree of long chains needs
little memory. They wait in as many heaps as the order has classes, in each the least recently used first; the one that
is worth least of those at the top goes. Recency changes are not pushed into a heap: a node that was used since it was
queued, or is of another class by now, goes back where it belongs when it comes up.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

from .tree import PrefixTree

Key = tuple[float, float, int]
"""Worth, time of last use, node."""

_LAST: Key = (float("inf"), float("inf"), 0)


class EvictionOrder(Protocol):
    """What a copy is worth. Within a class, what was used longest ago is taken to be worth least."""

    @property
    def num_classes(self) -> int:
        """At least one."""

    def resized(self, capacity: int) -> None:
        """The tier has so many blocks."""

    def class_of(self, node: int) -> int:
        """From 0 on; another one only for a node that was used since."""

    def worth(self, node: int) -> float:
        """Now; the lowest goes first."""

    def alike(self, node: int, other: int) -> bool:
        """Whether it can be told at a glance that both are worth the same, as most neighbours in a prefix are."""


class Recency:
    """Least recently used first."""

    num_classes = 1

    def resized(self, capacity: int) -> None:
        """However many there are."""

    def class_of(self, node: int) -> int:
        """All alike."""
        return 0

    def worth(self, node: int) -> float:
        """All alike."""
        return 0.0

    def alike(self, node: int, other: int) -> bool:
        """All alike."""
        return True


class EvictionQueue:
    """Heaps of (time of last use, node). `evictable(node)` is asked again when a node comes up."""

    __slots__ = ("_evictable", "_heaps", "_order", "_queued", "_used")

    def __init__(self, tree: PrefixTree, order: EvictionOrder, evictable: Callable[[int], bool]) -> None:
        self._used = tree.used
        self._order = order
        self._evictable = evictable
        self._heaps: list[list[tuple[float, int]]] = [[] for _ in range(order.num_classes)]
        self._queued = bytearray()

    def __len__(self) -> int:
        return sum(map(len, self._heaps))

    def push(self, node: int) -> None:
        """Queue a node that has become evictable; does nothing where it waits already."""
        if node >= len(self._queued):
            self._queued.extend(bytes(len(self._used) - len(self._queued)))
        if not self._queued[node]:
            self._queued[node] = 1
            heapq.heappush(self._heaps[self._order.class_of(node)], (self._used[node], node))

    def key(self, node: int) -> Key:
        """By which nodes are ordered."""
        return self._order.worth(node), self._used[node], node

    def first(self, older_than: float = float("inf")) -> Key:
        """The evictable node that is worth least, of those that were last used before `older_than`; it stays. Behind
        all keys where there is none."""
        for index, heap in enumerate(self._heaps):
            if heap:
                self._settle(index)
        # Of those that went to a lower class, too: each is in order there.
        keys = [self.key(heap[0][1]) for heap in self._heaps if heap and heap[0][0] < older_than]
        return min(keys, default=_LAST)

    def pop(self, older_than: float = float("inf"), most: float = float("inf")) -> Key | None:
        """Take out the node that `first` names, unless it is worth more than `most`."""
        worth, time, node = first = self.first(older_than)
        if time == float("inf") or worth > most:
            return None
        index = self._order.class_of(node)
        heapq.heappop(self._heaps[index])
        self._queued[node] = 0
        self._settle(index)  # what is of another class by now goes there before others come on top of it
        return first

    def clear(self) -> None:
        """Nothing can be evicted any more."""
        for heap in self._heaps:
            heap.clear()
        self._queued = bytearray()

    def check(self) -> None:
        """Verify that the flags and the heaps agree."""
        waiting = sorted(node for heap in self._heaps for _, node in heap)
        assert waiting == [node for node, flag in enumerate(self._queued) if flag], "queue flags and heaps disagree"

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
                heapq.heappush(self._heaps[found], (used[node], node))
            elif time < used[node]:
                heapq.heapreplace(heap, (used[node], node))
            else:
                return

    def __contains__(self, node: int) -> bool:
        return node < len(self._queued) and bool(self._queued[node])
