"""Eviction where several tenants share a tier: each keeps its share of it, whatever the others do.

A tenant's share is its part of the tier by weight. What others leave unused may be borrowed, and is given back first:
room for a tenant is made by whoever holds most for its weight, over its share, and else by the tenant itself. So no
tenant falls below its share for another one's sake, and one that is below it gets room whatever the blocks of others
are worth. A quota is a limit, also where the tier has room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from .eviction import LAST, NEVER, NO_LIMIT, EvictionQueue, Key
from .pool import BlockPool
from .tree import PrefixTree


class TenantQueues:
    """An `EvictionQueue` for each tenant, with the same calls; `take` and others also name the tenant that needs room.
    `held`, by tenant, counts the blocks that are not free: those with a copy of one of the tenant's nodes, and those
    allocated for it without a copy yet. O(tenants) a call, and O(log n) a block.
    """

    def __init__(
        self,
        tree: PrefixTree,
        weights: Sequence[int],
        make_queue: Callable[[Callable[[int], bool]], EvictionQueue],
        evictable: Callable[[int], bool],
    ) -> None:
        """`make_queue` makes one of those nodes that a function says may go; all of the tier's are `evictable`."""
        self.held = [0] * len(weights)
        self.quotas = [NO_LIMIT] * len(weights)
        self._tenant_of = tree.terms.tenant
        self._weights = list(weights)
        self._evictable = evictable
        self._queues = [make_queue(partial(self._may_give, tenant)) for tenant in range(len(weights))]
        self.shares = [0] * len(weights)
        """Blocks that no other tenant takes from each."""
        self._capacity = 0
        self._owner = bytearray()  # by block

    def resized(self, capacity: int) -> None:
        """The tier has so many blocks."""
        self._capacity = capacity
        parts = (capacity * weight // sum(self._weights) for weight in self._weights)
        self.shares = [min(part, quota) for part, quota in zip(parts, self.quotas, strict=True)]

    def limit(self, quotas: Sequence[int]) -> None:
        """Set the quota of each tenant, in blocks."""
        self.quotas = list(quotas)
        self.resized(self._capacity)

    def room(self, tenant: int) -> int:
        """Blocks that its quota allows beside those that it holds."""
        return max(0, self.quotas[tenant] - self.held[tenant])

    # Which block is whose.

    def handed_out(self, block_ids: Sequence[int], tenant: int) -> None:
        """These blocks, free or evicted before, are the tenant's from now on."""
        if block_ids:
            self._owner.extend(bytes(max(0, max(block_ids) + 1 - len(self._owner))))
        for block_id in block_ids:
            self._owner[block_id] = tenant
        self.held[tenant] += len(block_ids)

    def attached(self, block_ids: Sequence[int], nodes: Sequence[int]) -> None:
        """These blocks become copies of nodes, and belong to the nodes' tenant."""
        owner, tenant_of, held = self._owner, self._tenant_of, self.held
        for block_id, node in zip(block_ids, nodes, strict=True):
            if owner[block_id] != tenant_of[node]:
                held[owner[block_id]] -= 1
                held[tenant_of[node]] += 1
                owner[block_id] = tenant_of[node]

    def freed(self, block_ids: Sequence[int]) -> None:
        """These blocks are no tenant's any more."""
        for block_id in block_ids:
            self.held[self._owner[block_id]] -= 1

    def all_freed(self, pool: BlockPool) -> None:
        """All blocks but live ones are no tenant's any more."""
        self.held = [0] * len(self.held)
        for block_id in pool.live_ids():
            self.held[self._owner[block_id]] += 1

    # Eviction.

    def push(self, node: int) -> None:
        """See `EvictionQueue.push`."""
        self._queues[self._tenant_of[node]].push(node)

    def first(self, older_than: float = NEVER, tenant: int | None = None) -> Key:
        """The key of the node that `take` of one block would evict; another tenant's node counts as worth nothing for a
        tenant below its share."""
        closed = [False] * len(self.held)
        while (giver := self._giver(self.held, tenant, closed)) is not None:
            key = self._queues[giver].first(older_than)
            if key < LAST:
                return (-NEVER, *key[1:]) if self._is_owed(self.held, tenant, giver) else key
            closed[giver] = True
        return LAST

    def take(
        self,
        num_nodes: int,
        older_than: float = NEVER,
        most: float = NEVER,
        tenant: int | None = None,
        num_free: int = 0,
    ) -> list[int]:
        """As `EvictionQueue.take`, for this tenant, which is given so many free blocks as well; for nobody where it is
        None."""
        victims: list[int] = []
        held, closed = list(self.held), [False] * len(self.held)  # as it will be once all that is the tenant's
        if tenant is not None:
            held[tenant] += num_free
        while len(victims) < num_nodes and (giver := self._giver(held, tenant, closed)) is not None:
            count = min(num_nodes - len(victims), self._count(held, tenant, giver, closed))
            worth = NEVER if self._is_owed(held, tenant, giver) else most
            taken = self._queues[giver].take(count, older_than, worth)
            victims += taken
            closed[giver] = len(taken) < count
            held[giver] -= len(taken)
            if tenant is not None:
                held[tenant] += len(taken)
        return victims

    def clear(self) -> None:
        """Empty all queues."""
        for queue in self._queues:
            queue.clear()

    def check(self, pool: BlockPool) -> None:
        """Verify queues, and counts against the blocks that are live."""
        for queue in self._queues:
            queue.check(pool)
        held = np.bincount(np.array(self._owner)[pool.live_ids()], minlength=len(self.held)).tolist()
        assert held == self.held, f"tenants hold {held} blocks, {self.held} are counted"

    def check_owners(self, block_ids: NDArray[np.intp], nodes: NDArray[np.intc]) -> None:
        """Verify that copies belong to their nodes' tenants."""
        owners, tenants = np.array(self._owner)[block_ids].tolist(), np.array(self._tenant_of)[nodes].tolist()
        for block_id, owner, tenant in zip(block_ids, owners, tenants, strict=True):
            assert owner == tenant, f"block {block_id} is counted as tenant {owner}'s, and has a copy of {tenant}'s"

    def __contains__(self, node: int) -> bool:
        return node in self._queues[self._tenant_of[node]]

    def _may_give(self, tenant: int, node: int) -> bool:
        """Of a node that came up in the tenant's queue: its row may be another tenant's since it was pushed."""
        return self._tenant_of[node] == tenant and self._evictable(node)

    def _giver(self, held: Sequence[int], tenant: int | None, closed: Sequence[bool]) -> int | None:
        """Who gives a block for this tenant, if anybody may: of those that may, who holds most for its weight."""
        is_full = tenant is not None and held[tenant] >= self.quotas[tenant]
        givers = [
            other
            for other in range(len(held))
            if not closed[other]
            and held[other] > 0
            and (other == tenant or tenant is None or (not is_full and held[other] > self.shares[other]))
        ]
        return max(givers, key=lambda other: (held[other] / self._weights[other], other == tenant), default=None)

    def _count(self, held: Sequence[int], tenant: int | None, giver: int, closed: Sequence[bool]) -> int:
        """How many blocks are taken from it before others are looked at again."""
        if giver == tenant:
            return NO_LIMIT  # others hold less for their weight, and that stays so
        weights = self._weights
        others = [h / w for i, (h, w) in enumerate(zip(held, weights, strict=True)) if i != giver and not closed[i]]
        count = max(1, int(held[giver] - max(others, default=0.0) * weights[giver]) // 2)
        if tenant is not None:
            count = min(count, held[giver] - self.shares[giver], self.quotas[tenant] - held[tenant])
            if self._is_owed(held, tenant, giver):
                count = min(count, self.shares[tenant] - held[tenant])
        return count

    def _is_owed(self, held: Sequence[int], tenant: int | None, giver: int) -> bool:
        """Whether the tenant is below its share, and the giver, another one, is not."""
        return tenant not in (None, giver) and held[tenant] < self.shares[tenant]
