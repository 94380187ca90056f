"""The policies that `integration/bench/policies.py` compares with: LRU, SLRU, S3-FIFO, GDSF, and what no policy beats.

All but the last save every block of every request and evict leaves only, so that what is cached of a prompt is a
prefix; they differ in the priority of a leaf. Nothing of the request that is being saved makes room for its own tail:
where only that is left, the tail is not saved.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Protocol

from kv_connector.types import BlockHash

Priority = tuple[float, float]
_NEVER = 1 << 60


class HostCache(Protocol):
    """A host tier under some policy."""

    def request(self, hashes: Sequence[BlockHash], first: int, now: int) -> int:
        """Serve one request of which the device has the `first` leading blocks: returns how many of those behind them
        are found, without a gap, and saves what the policy wants. `now` counts requests from 0."""


class LRU:
    """The leaf that was used least recently goes first. The others differ from it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._used: dict[BlockHash, int] = {}

    def hit(self, block: BlockHash, depth: int, now: int) -> None:
        """A request asks for a cached block, `depth` blocks behind the first."""
        self._used[block] = now

    def inserted(self, block: BlockHash, depth: int, now: int) -> None:
        """A block is cached."""
        self._used[block] = now

    def priority(self, block: BlockHash) -> Priority:
        """The leaf of the smallest goes first."""
        return (self._used[block], 0)

    def spared(self, block: BlockHash) -> bool:
        """Whether the leaf that would go now stays, with another priority from then on."""
        return False

    def evicted(self, block: BlockHash) -> None:
        """A block has gone."""
        del self._used[block]


class Ghosts:
    """The last `capacity` blocks that went; of those that went twice the last time counts."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[BlockHash, None] = OrderedDict()

    def __contains__(self, block: BlockHash) -> bool:
        return block in self._blocks

    def add(self, block: BlockHash) -> None:
        """Remember one that goes."""
        self._blocks[block] = None
        self._blocks.move_to_end(block)
        if len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


class SLRU(LRU):
    """Segmented LRU: newcomers go before blocks that were asked for again, of which it protects at most `protected` of
    the capacity. A block that comes back while it is among the ghosts, as many as blocks, is protected at once. A leaf
    that is protected no more is a newcomer again from when it comes up in the order that it had."""

    def __init__(self, capacity: int, protected: float = 0.8) -> None:
        super().__init__(capacity)
        self._most_protected = protected * capacity
        self._protected: OrderedDict[BlockHash, None] = OrderedDict()
        self._ghosts = Ghosts(capacity)

    def hit(self, block: BlockHash, depth: int, now: int) -> None:
        self._used[block] = now
        self._protected[block] = None
        self._protected.move_to_end(block)
        while len(self._protected) > self._most_protected:
            self._protected.popitem(last=False)

    def inserted(self, block: BlockHash, depth: int, now: int) -> None:
        self._used[block] = now
        if block in self._ghosts:
            self.hit(block, depth, now)

    def priority(self, block: BlockHash) -> Priority:
        return (block in self._protected, self._used[block])

    def evicted(self, block: BlockHash) -> None:
        super().evicted(block)
        self._protected.pop(block, None)
        self._ghosts.add(block)


class S3FIFO(LRU):
    """S3-FIFO: a small queue for newcomers, a main one for those that were asked for while they were in it, and ghosts,
    as many as blocks, which return to the main one. The small queue's leaves go before the main one's; those of the
    main one have as many second chances as they had hits, at most three. A leaf moves on when it comes up."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._hits: dict[BlockHash, int] = {}
        self._queued: dict[BlockHash, int] = {}
        self._main: set[BlockHash] = set()
        self._ghosts = Ghosts(capacity)
        self._num_queued = 0

    def hit(self, block: BlockHash, depth: int, now: int) -> None:
        self._hits[block] = min(3, self._hits[block] + 1)

    def inserted(self, block: BlockHash, depth: int, now: int) -> None:
        self._hits[block] = 0
        self._enqueue(block)
        if block in self._ghosts:
            self._main.add(block)

    def priority(self, block: BlockHash) -> Priority:
        return (block in self._main, self._queued[block])

    def spared(self, block: BlockHash) -> bool:
        if not self._hits[block]:
            return False
        self._hits[block] = self._hits[block] - 1 if block in self._main else 0
        self._main.add(block)
        self._enqueue(block)
        return True

    def evicted(self, block: BlockHash) -> None:
        if block not in self._main:
            self._ghosts.add(block)
        self._main.discard(block)
        del self._hits[block], self._queued[block]

    def _enqueue(self, block: BlockHash) -> None:
        self._num_queued += 1
        self._queued[block] = self._num_queued


class GDSF(LRU):
    """Greedy dual size frequency: hits times what a block costs, on top of the priority of the last that went.

    A block's cost grows with its depth, as attention's does: twice as much at `DEPTH` blocks as at none. How often a
    block was asked for is remembered for ever, and halved when it comes back.
    """

    DEPTH = 2000

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._inflation = 0.0
        self._frequency: dict[BlockHash, float] = {}
        self._value: dict[BlockHash, float] = {}

    def hit(self, block: BlockHash, depth: int, now: int) -> None:
        self._count(block, depth, self._frequency[block] + 1)

    def inserted(self, block: BlockHash, depth: int, now: int) -> None:
        self._count(block, depth, self._frequency.get(block, 0.0) / 2 + 1)

    def priority(self, block: BlockHash) -> Priority:
        return (self._value[block], 0)

    def evicted(self, block: BlockHash) -> None:
        self._inflation = max(self._inflation, self._value.pop(block))

    def _count(self, block: BlockHash, depth: int, frequency: float) -> None:
        self._frequency[block] = frequency
        self._value[block] = self._inflation + frequency * (1 + depth / self.DEPTH)


class PrefixCache:
    """Blocks under one of the policies above: leaves wait in a heap, whose priorities are renewed when they come up."""

    def __init__(self, policy: LRU) -> None:
        self._policy = policy
        self._parent: dict[BlockHash, BlockHash | None] = {}  # of each cached block
        self._num_children: dict[BlockHash, int] = {}
        self._leaves: list[tuple[Priority, BlockHash]] = []

    def __contains__(self, block: BlockHash) -> bool:
        return block in self._parent

    def request(self, hashes: Sequence[BlockHash], first: int, now: int) -> int:
        """As `HostCache` says."""
        end = first
        while end < len(hashes) and hashes[end] in self._parent:
            end += 1
        known = 0
        while known < len(hashes) and hashes[known] in self._parent:
            self._policy.hit(hashes[known], known, now)
            known += 1
        end_of_saved = self._save(hashes, known, now)
        if end_of_saved:  # of one path only the last can be a leaf
            self._offer(hashes[end_of_saved - 1])
        return end - first

    def _save(self, hashes: Sequence[BlockHash], first: int, now: int) -> int:
        """Cache the blocks from `first` on, as far as there is room; returns where that ends."""
        path = set(hashes)
        for depth in range(first, len(hashes)):
            if len(self._parent) >= self._policy.capacity and not self._evict(path):
                return depth
            parent = hashes[depth - 1] if depth else None
            self._parent[hashes[depth]] = parent
            self._num_children[hashes[depth]] = 0
            if parent is not None:
                self._num_children[parent] += 1
            self._policy.inserted(hashes[depth], depth, now)
        return len(hashes)

    def _offer(self, block: BlockHash) -> None:
        if not self._num_children[block]:
            heapq.heappush(self._leaves, (self._policy.priority(block), block))

    def _evict(self, path: Collection[BlockHash]) -> bool:
        """Let one leaf go that is not on `path`; False where there is none."""
        kept = []
        found = False
        while self._leaves and not found:
            priority, block = heapq.heappop(self._leaves)
            if block not in self._parent or self._num_children[block]:
                continue  # it has gone or is no leaf any more
            if priority != self._policy.priority(block):
                self._offer(block)
            elif block in path:
                kept.append((priority, block))
            elif self._policy.spared(block):
                self._offer(block)
            else:
                self._remove(block)
                found = True
        for leaf in kept:
            heapq.heappush(self._leaves, leaf)
        return found

    def _remove(self, block: BlockHash) -> None:
        parent = self._parent.pop(block)
        del self._num_children[block]
        self._policy.evicted(block)
        if parent is not None:
            self._num_children[parent] -= 1
            self._offer(parent)


class Belady:
    """The most that can be hit, by one who knows the future: kept are the blocks whose next hit is nearest.

    A block that the device will have when it is asked for next need not be kept, for it can be saved then as well.
    Saving is free, and every block that is found counts, whatever is missing in front of it: this is a bound for every
    policy and not always within reach.
    """

    def __init__(self, capacity: int, requests: Sequence[Sequence[BlockHash]], device_hits: Sequence[int]) -> None:
        self._capacity = capacity
        self._next_hit: dict[BlockHash, int] = {}  # of each cached block
        self._furthest: list[tuple[int, BlockHash]] = []  # (-next hit, block)
        self._after: list[list[int]] = []  # by request and position: the request that hits the block next
        coming: dict[BlockHash, int] = {}
        for now in range(len(requests) - 1, -1, -1):
            self._after.append([coming.get(block, _NEVER) for block in requests[now]])
            for depth, block in enumerate(requests[now]):
                coming[block] = now if depth >= device_hits[now] else _NEVER
        self._after.reverse()

    def request(self, hashes: Sequence[BlockHash], first: int, now: int) -> int:
        """As `HostCache` says, gaps allowed, for the requests in the order that it was told."""
        num_hits = sum(block in self._next_hit for block in hashes[first:])
        for block, next_hit in zip(hashes, self._after[now], strict=True):
            self._next_hit.pop(block, None)
            if next_hit != _NEVER:
                self._next_hit[block] = next_hit
                heapq.heappush(self._furthest, (-next_hit, block))
        while len(self._next_hit) > self._capacity:
            next_hit, block = heapq.heappop(self._furthest)
            if self._next_hit.get(block) == -next_hit:
                del self._next_hit[block]
        return num_hits
