"""The order in which leaves are evicted: least recently used first, O(log n) an eviction.

Only nodes that can be evicted now (leaves, in practice) wait here, each at most once, so a tree of long chains needs
little memory. Recency changes are not pushed into the heap: a node that was used since it was queued goes back with
its new time when it comes up.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable


class EvictionQueue:
    """Min-heap of (time of last use, node). `evictable(node)` is asked again when a node comes up."""

    __slots__ = ("_evictable", "_heap", "_queued", "_used")

    def __init__(self, used: array[float], evictable: Callable[[int], bool]) -> None:
        self._used = used
        self._evictable = evictable
        self._heap: list[tuple[float, int]] = []
        self._queued = bytearray()

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, node: int) -> None:
        """Queue a node that has become evictable; does nothing where it waits already."""
        if node >= len(self._queued):
            self._queued.extend(bytes(len(self._used) - len(self._queued)))
        if not self._queued[node]:
            self._queued[node] = 1
            heapq.heappush(self._heap, (self._used[node], node))

    def first(self, older_than: float = float("inf")) -> int | None:
        """The least recently used evictable node that was last used before `older_than`, if there is one; it stays."""
        heap, used = self._heap, self._used
        while heap:
            time, node = heap[0]
            if not self._evictable(node):
                heapq.heappop(heap)
                self._queued[node] = 0
            elif time < used[node]:
                heapq.heapreplace(heap, (used[node], node))
            else:
                return node if time < older_than else None
        return None

    def pop(self, older_than: float = float("inf")) -> int | None:
        """Take out the node that `first` names."""
        node = self.first(older_than)
        if node is not None:
            heapq.heappop(self._heap)
            self._queued[node] = 0
        return node

    def head(self) -> tuple[float, int]:
        """No node that waits comes up before this (time of last use, node)."""
        return self._heap[0] if self._heap else (float("inf"), 0)

    def clear(self) -> None:
        """Nothing can be evicted any more."""
        self._heap.clear()
        self._queued = bytearray()

    def check(self) -> None:
        """Verify that the flags and the heap agree."""
        waiting = sorted(node for _, node in self._heap)
        assert waiting == [node for node, flag in enumerate(self._queued) if flag], "queue flags and heap disagree"

    def __contains__(self, node: int) -> bool:
        return node < len(self._queued) and bool(self._queued[node])
