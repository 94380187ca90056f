"""Blocks that are dropped from the host when nobody has used them for as long as their last request said."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from ...types import BlockHash
from ..shared import Shared

_MOST, _MOST_HASHES = 1 << 16, 1 << 21
"""Prefixes that are remembered, and hashes of all of them, some 150 MB; beyond that the one that is due next goes
before its time."""


class Expiries:
    """Prefixes in the order in which they are due, O(log n) each. What is in use, pinned, or in front of what stays is
    not dropped, and nor is what has been used since by anybody, or what somebody ever asked for who set no time: it is
    his. They outlast a reset: what that leaves on the device may come to the host before the device reuses it."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._due: list[tuple[float, int, float, Sequence[BlockHash]]] = []  # a heap; when, a number, used, prefix
        self._num_added = 0
        self._num_hashes = 0
        # By node of a window, the number of the last of these prefixes that it is in. Where the row is another block's
        # by now it matters to nobody: that one was used since, or has a number of its own.
        self._last: dict[int, int] = {}

    def add(self, block_hashes: Sequence[BlockHash], used: float, ttl_s: float) -> None:
        """A request with this prefix has ended, and used it last."""
        self._num_added += 1
        heapq.heappush(self._due, (used + ttl_s, self._num_added, used, tuple(block_hashes)))
        self._num_hashes += len(block_hashes)
        grouped = self._shared.grouped
        for group in grouped.windows:  # of two who computed them at a time, the last to end says how long they live
            nodes = grouped.find_of(group, grouped.keys(block_hashes, group))
            self._last |= dict.fromkeys(nodes, self._num_added)
        while len(self._due) > _MOST or self._num_hashes > _MOST_HASHES:
            self._drop()

    def expire(self, now: float) -> None:
        """Drop what is due."""
        while self._due and self._due[0][0] <= now:
            self._drop()

    def _drop(self) -> None:
        _, number, used, block_hashes = heapq.heappop(self._due)
        self._num_hashes -= len(block_hashes)
        grouped, host, tree = self._shared.grouped, self._shared.host, self._shared.grouped.tree
        for group in range(len(grouped.groups)):
            known = grouped.find_of(group, grouped.keys(block_hashes, group))
            nodes = [node for node in known if tree.terms.transient[node] and tree.used[node] <= used]
            if group in grouped.windows:
                nodes = [node for node in nodes if self._last.get(node, 0) <= number]
            tree.terms.bar(nodes)
            parts = [nodes] if group in grouped.full else [[node] for node in nodes]
            self._shared.metrics.expired_blocks += sum(host.discard_tail(part) for part in parts)
        if not self._due:
            self._last.clear()
