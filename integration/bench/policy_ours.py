"""The host tier of this package on its own: the index classes as the scheduler half uses them, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kv_connector.config import WritePolicy
from kv_connector.index import LEAST_REMEMBERED, CacheTier, Event, PrefixTree, SavePolicy
from kv_connector.types import BlockHash, Tier


class HostTier:
    """A tree and its host tier under one of the write policies; a save ends before the next request comes.

    As `scheduler/hits.py` does, a request counts each known block as asked for once more; as `scheduler/ranks.py` does,
    the tree remembers as many blocks that are gone as the host holds, and never fewer than `LEAST_REMEMBERED`.
    """

    def __init__(self, capacity: int, policy: SavePolicy) -> None:
        self.tree = PrefixTree(max(LEAST_REMEMBERED, capacity))
        self.host = CacheTier(self.tree, Tier.HOST, capacity)
        self._policy = policy

    def request(self, hashes: Sequence[BlockHash], first: int, now: int) -> int:
        """As `HostCache` in `policy_baselines.py` says."""
        known = self.tree.match(hashes)
        self.tree.touch(known, now)
        for node in known:
            self.tree.hits[node] += 1
        num_hits = self.host.resident_prefix(known[first:])
        self._save(hashes, known, now)
        return num_hits

    def _save(self, hashes: Sequence[BlockHash], known: Sequence[int], now: int) -> None:
        """Save what the policy wants of a request, as far as older prefixes make room."""
        absent = [*self.host.absent(known), *range(len(known), len(hashes))]
        hits = [self.tree.hits[node] for node in known] + [0] * (len(hashes) - len(known))
        wanted = [depth for depth in absent if self._policy.wants(hits[depth], pinned=False)]
        block_ids = self.host.allocate_behind(len(wanted), hashes, now)
        nodes = self.tree.insert_path(hashes, now)
        self.host.attach(block_ids, [nodes[depth] for depth in wanted[: len(block_ids)]], Event.SWAP_OUT)
        self.host.fill(block_ids)
        self.host.release(block_ids)
        self.tree.settle(nodes)


def write_through(capacity: int) -> HostTier:
    """Every block is saved."""
    return HostTier(capacity, SavePolicy(WritePolicy.WRITE_THROUGH, threshold=0, lookahead=0))


def write_through_selective(capacity: int) -> HostTier:
    """A block is saved when a second request after its first asks for it."""
    return HostTier(capacity, SavePolicy(WritePolicy.WRITE_THROUGH_SELECTIVE, threshold=2, lookahead=0))


OURS: dict[str, Callable[[int], HostTier]] = {
    "write_through": write_through,
    "write_through_selective (threshold 2)": write_through_selective,
}
"""By the name of a column: the host tier of so many blocks."""
DEFAULT = "write_through"
"""The column of which something is claimed."""
