"""The host tier of this package on its own: the index classes as the scheduler half uses them, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..config import WritePolicy
from ..index import LEAST_REMEMBERED, CacheTier, Event, PrefixTree, Recency, ReuseModel, SavePolicy
from ..types import BlockHash, Tier


class HostTier:
    """A tree and its host tier under one of the write policies; a save ends before the next request comes.

    As `scheduler/hits.py` does, a request counts each known block as asked for once more; as `scheduler/ranks.py` does,
    the tree remembers twice as many blocks that are gone as the host holds, and never fewer than `LEAST_REMEMBERED`.
    """

    def __init__(self, capacity: int, policy: SavePolicy, evicts_oldest: bool = False) -> None:
        """`evicts_oldest`: the least recently used goes first, instead of what is learned to be worth least; then
        nothing is learned, nor counted."""
        self.tree = PrefixTree(max(LEAST_REMEMBERED, 2 * capacity))
        self._reuse, self._learns = ReuseModel(self.tree), not evicts_oldest
        order = self._reuse if self._learns else Recency(self.tree)
        self.host = CacheTier(self.tree, Tier.HOST, capacity, order=order)
        self._policy = policy

    def request(self, hashes: Sequence[BlockHash], first: int, now: int) -> int:
        """Serve one request of which the device has the `first` leading blocks: returns how many of those behind them
        are found, without a gap, and saves what the policy wants. `now` counts requests from 0."""
        known = self.tree.match(hashes)
        self.tree.touch(known, now)
        if self._learns:
            self._reuse.visited(np.array(known, np.intc), np.arange(len(known)) >= first)
            self._reuse.asked(len(hashes))
            self._reuse.learn()
        num_hits = self.host.resident_prefix(known[first:])
        self._save(hashes, known, now)
        return num_hits

    def _save(self, hashes: Sequence[BlockHash], known: Sequence[int], now: int) -> None:
        """Save what the policy wants of a request, as far as there is room for it."""
        wanted, hits = self.host.absent(known), self.tree.hits
        if self._policy.wants(0, pinned=False):  # and more of them as well
            wanted += range(len(known), len(hashes))
        else:
            wanted = [depth for depth in wanted if self._policy.wants(hits[known[depth]], pinned=False)]
        worth = float("inf")  # whatever has to go for it
        if wanted and self._policy.declines:
            worth = self._reuse.worth_of(hashes, wanted[0])
        block_ids = self.host.allocate_behind(len(wanted), (hashes,), now, worth)
        nodes = self.tree.insert_path(hashes, now)
        self.host.attach(block_ids, [nodes[depth] for depth in wanted[: len(block_ids)]], Event.SWAP_OUT)
        self.host.fill(block_ids)
        self.host.release(block_ids)
        self.tree.settle(nodes)


def adaptive(capacity: int) -> HostTier:
    """The default: every block is saved that is worth more than something that is there."""
    return HostTier(capacity, SavePolicy(WritePolicy.ADAPTIVE, threshold=0, lookahead=0))


def write_through(capacity: int) -> HostTier:
    """Every block is saved."""
    return HostTier(capacity, SavePolicy(WritePolicy.WRITE_THROUGH, threshold=0, lookahead=0))


def write_through_selective(capacity: int) -> HostTier:
    """A block is saved when a second request after its first asks for it."""
    return HostTier(capacity, SavePolicy(WritePolicy.WRITE_THROUGH_SELECTIVE, threshold=2, lookahead=0))


def write_through_lru(capacity: int) -> HostTier:
    """Every block is saved, and the least recently used leaf goes first: what an engine's own cache does."""
    return HostTier(capacity, SavePolicy(WritePolicy.WRITE_THROUGH, threshold=0, lookahead=0), evicts_oldest=True)


POLICIES: dict[str, Callable[[int], HostTier]] = {
    WritePolicy.ADAPTIVE.value: adaptive,
    WritePolicy.WRITE_THROUGH.value: write_through,
    WritePolicy.WRITE_THROUGH_SELECTIVE.value: write_through_selective,
}
"""By write policy: the host tier of so many blocks. `write_back` is not among them: what it saves depends on when the
engine reuses its blocks, which a trace does not tell."""
