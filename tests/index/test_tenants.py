"""Tenants that share a tier, against rules that are worked out apart from it: shares, quotas, and who gives room."""

from __future__ import annotations

import random

import pytest

from kv_connector.index import CacheTier, Event, PrefixTree, Terms
from kv_connector.types import BlockHash, Tier

CAPACITY = 12


class Shared:
    """A host that tenants of these weights share. Each prefix has one block, so that all but what is used can go."""

    def __init__(self, weights: list[int], capacity: int = CAPACITY) -> None:
        self.weights = weights
        self.tree = PrefixTree()
        self.host = CacheTier(self.tree, Tier.HOST, capacity, weights=weights)
        self.num_made = 0

    @property
    def held(self) -> list[int]:
        """By tenant, from the blocks themselves."""
        nodes = self.host.nodes_of(self.host.copies())
        return [sum(self.tree.terms.tenant[node] == tenant for node in nodes) for tenant in range(len(self.weights))]

    def store(self, tenant: int, num_blocks: int) -> list[int]:
        """As many new blocks as there is room for; leased, for the caller to let go of."""
        tenants = self.host.tenants
        assert tenants is not None
        block_ids = self.host.allocate_up_to(num_blocks, tenant=tenant)
        for block_id in block_ids:
            self.num_made += 1
            name = BlockHash(self.num_made.to_bytes(16, "big"))
            nodes = self.tree.insert_path([name], self.num_made, terms=Terms(tenant))
            self.host.attach([block_id], nodes, Event.SWAP_OUT)
        self.host.fill(block_ids)
        return block_ids

    def keep(self, tenant: int, num_blocks: int) -> None:
        """The same, and nobody uses them."""
        self.host.release(self.store(tenant, num_blocks))


def test_where_who_borrows_has_blocks_in_use_nobody_else_gives_for_him() -> None:
    shared = Shared([1, 1, 1])
    shared.store(0, 6)  # two beyond its share, and all of them in use
    shared.keep(1, 4)
    shared.keep(2, 2)
    shared.keep(2, 4)
    assert shared.held == [6, 4, 2], "it has room of its own alone"


def test_what_is_borrowed_is_given_back_as_far_as_it_is_owed() -> None:
    shared = Shared([1, 2, 1])
    shared.keep(0, 12)
    shared.keep(1, 6)
    assert shared.held == [6, 6, 0]
    shared.keep(2, 9)
    assert shared.held == [3, 6, 3]


@pytest.mark.parametrize("seed", range(12))
def test_shares_and_quotas_hold_whatever_is_in_use_pinned_or_resized(seed: int) -> None:
    rng = random.Random(seed)
    shared = Shared([rng.randint(1, 3) for _ in range(4)])
    quotas = [rng.choice([1 << 62, 1 << 62, 2, 5]) for _ in range(4)]
    assert shared.host.tenants is not None
    shared.host.tenants.limit(quotas)
    capacity, used, pinned = CAPACITY, list[list[int]](), list[int]()
    for _ in range(300):
        shares = [min(capacity * w // sum(shared.weights), q) for w, q in zip(shared.weights, quotas, strict=True)]
        before, tenant, wanted = shared.held, rng.randrange(4), rng.randint(1, 6)
        idle = [shared.tree.terms.tenant[node] for node in evictable(shared)]
        given = shared.store(tenant, wanted)
        used.append(given)
        held = shared.held
        assert held[tenant] <= max(before[tenant], quotas[tenant])
        assert all(held[t] >= min(before[t], shares[t]) for t in range(4) if t != tenant)
        owed = max(0, shares[tenant] - before[tenant])
        surplus = sum(min(idle.count(t), max(0, before[t] - shares[t])) for t in range(4) if t != tenant)
        assert len(given) >= min(wanted, owed, surplus + idle.count(tenant)), "what it is owed it gets"
        if len(used) > 2:
            shared.host.release(used.pop(rng.randrange(len(used))))
        if rng.random() < 0.1 and (nodes := evictable(shared)):
            shared.tree.pin(nodes[:1])
            pinned += nodes[:1]
        if rng.random() < 0.1 and pinned:
            shared.host.unpin([pinned.pop()])
        if rng.random() < 0.05:
            capacity = rng.choice([0, 3, 8, CAPACITY, 20])
            shared.host.resize(capacity)
        shared.host.check()


def evictable(shared: Shared) -> list[int]:
    """Nodes whose copies nobody uses or has pinned."""
    block_ids = [b for b in shared.host.copies() if not shared.host.pool.refs(b)]
    return [node for node in shared.host.nodes_of(block_ids) if not shared.tree.pins[node]]


def test_a_row_that_another_tenant_has_now_is_not_what_a_cleared_one_gives() -> None:
    """What is dropped waits in its tenant's queue until it comes up, and its row may be another's by then."""
    shared = Shared([1, 1, 1])
    shared.tree.max_remembered = 0
    shared.keep(2, 4)
    shared.host.discard(shared.host.copies())  # as an operator clears it, and as times to live end
    shared.keep(1, 4)
    shared.keep(0, 4)
    shared.keep(2, 4)
    shared.keep(2, 8)
    assert shared.held == [4, 4, 4]
    shared.host.check()


@pytest.mark.parametrize("seed", range(5))
def test_nobody_falls_below_its_share_where_tenants_are_cleared_and_rows_come_again(seed: int) -> None:
    rng, shared = random.Random(seed), Shared([1, 1, 1])
    shared.tree.max_remembered = 0
    for _ in range(40):
        tenant, before = rng.randrange(3), shared.held
        if rng.random() < 0.3:
            copies = shared.host.copies()
            owners = [shared.tree.terms.tenant[node] for node in shared.host.nodes_of(copies)]
            shared.host.discard([block for block, owner in zip(copies, owners, strict=True) if owner == tenant])
        else:
            shared.keep(tenant, rng.randint(1, CAPACITY))
            others = [other for other in range(3) if other != tenant]
            assert all(shared.held[other] >= min(before[other], CAPACITY // 3) for other in others)
        shared.host.check()
