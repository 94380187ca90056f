"""Tree and tiers: what is evicted, in which order, and what never is."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_connector.errors import InvalidBlockError
from kv_connector.index import BlockState, CacheTier, Event, IllegalTransition, PrefixTree
from kv_connector.types import BlockHash, Tier
from tests.index.chains import START, path, resident, store


class TierMachine(RuleBasedStateMachine):
    """Random prefixes on two tiers. Evictions are compared with a naive "oldest leaf first"."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree(max_remembered=3)
        capacities = {Tier.DEVICE: 6, Tier.HOST: 5}
        self.tiers = {tier: CacheTier(self.tree, tier, capacity) for tier, capacity in capacities.items()}
        self.now = 0.0
        self.used: list[tuple[Tier, list[int]]] = []  # blocks with a reference that a "request" holds
        self.writing: list[tuple[Tier, list[int]]] = []  # copies being written
        self.pinned: list[list[int]] = []

    tiers_ = st.sampled_from([Tier.DEVICE, Tier.HOST])
    paths = st.lists(st.integers(1, 3), min_size=1, max_size=4)

    @rule(tier=tiers_, names=paths)
    def write(self, tier: Tier, names: list[int]) -> None:
        """Begin to write what the tier lacks of a path."""
        self.now += 1
        target, hashes = self.tiers[tier], path(*names)
        start = resident(target, hashes)
        known = self.tree.match(hashes)
        states = [target.node_state(node) for node in known] + [BlockState.ABSENT] * (len(hashes) - len(known))
        lacking = [i for i in range(start, len(hashes)) if states[i] is BlockState.ABSENT]
        expected = self._naive_victims(target, len(lacking) - target.pool.num_free)
        ids = target.allocate(len(lacking))
        if expected is None:
            assert ids is None
            return
        assert ids is not None
        assert [h for h in expected if (node := self.tree.get(h)) is not None and target.node_state(node) != 0] == []
        nodes = self.tree.insert_path(hashes, self.now)
        self.tree.touch(nodes, self.now)
        target.attach(ids, [nodes[i] for i in lacking], START[tier])
        self.tree.settle(nodes)
        if ids:
            self.writing.append((tier, ids))

    @precondition(lambda self: self.writing)
    @rule(index=st.integers(0, 9), outcome=st.sampled_from(["fill", "fail", "abort"]))
    def end_write(self, index: int, outcome: str) -> None:
        tier, ids = self.writing.pop(index % len(self.writing))
        if outcome == "fill":
            self.tiers[tier].fill(ids)
        elif outcome == "fail":
            self.tiers[tier].discard(ids)
        self.tiers[tier].release(ids)

    @rule(tier=tiers_, names=paths)
    def use(self, tier: Tier, names: list[int]) -> None:
        self.now += 1
        nodes = self.tree.match(path(*names))
        nodes = nodes[: self.tiers[tier].resident_prefix(nodes)]
        self.tree.touch(nodes, self.now)
        ids = self.tiers[tier].blocks_of(nodes)
        self.tiers[tier].acquire(ids)
        self.used.append((tier, ids))

    @precondition(lambda self: self.used)
    @rule(index=st.integers(0, 9))
    def end_use(self, index: int) -> None:
        tier, ids = self.used.pop(index % len(self.used))
        self.tiers[tier].release(ids)

    @rule(names=paths)
    def pin(self, names: list[int]) -> None:
        nodes = self.tree.match(path(*names))
        self.tree.pin(nodes)
        self.pinned.append(nodes)

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.tiers[Tier.HOST].unpin(self.pinned.pop())

    @rule(tier=tiers_, capacity=st.integers(0, 7))
    def resize(self, tier: Tier, capacity: int) -> None:
        self.tiers[tier].resize(capacity)

    @rule(tier=tiers_, dice=st.integers(0, 4))
    def reset(self, tier: Tier, dice: int) -> None:
        if dice == 0:
            self.tiers[tier].reset()

    @rule(tier=tiers_, limit=st.integers(0, 6))
    def look_ahead(self, tier: Tier, limit: int) -> None:
        target = self.tiers[tier]
        victims = [block_hash for _, block_hash in target.next_reused(limit)]
        expected = self._naive_victims(target, limit - target.pool.num_free, partial=True)
        assert victims == expected

    @invariant()
    def is_consistent(self) -> None:
        self.tree.check()
        for tier in self.tiers.values():
            tier.check()

    def _naive_victims(self, tier: CacheTier, count: int, partial: bool = False) -> list[BlockHash] | None:
        """Oldest evictable leaf, again and again; None where there are too few of them."""
        gone: list[int] = []
        nodes = [n for n in self.tree.nodes() if tier.node_state(n) is not BlockState.ABSENT]
        while len(gone) < count:
            left = [n for n in nodes if n not in gone]
            parents = {self.tree.parent[n] for n in left}
            leaves = [
                (self.tree.used[n], n)
                for n in left
                if n not in parents
                and tier.node_state(n) is BlockState.RESIDENT
                and tier.pool.refs(tier.blocks_of([n])[0]) == 0
                and (tier.tier is Tier.DEVICE or not self.tree.pins[n])
            ]
            if not leaves:
                return [self.tree.hash_of(n) for n in gone] if partial else None
            gone.append(min(leaves)[1])
        return [self.tree.hash_of(n) for n in gone]


TierMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None, derandomize=True)
TestTier = TierMachine.TestCase


def test_the_tail_of_an_old_prefix_goes_before_its_head() -> None:
    host = CacheTier(PrefixTree(), Tier.HOST, 6)
    store(host, path(1, 2, 3), now=1)
    store(host, path(4, 5, 6), now=2)
    assert [h[-1] for _, h in host.next_reused(6)] == [3, 2, 1, 6, 5, 4]
    store(host, path(1, 2, 3), now=3)
    store(host, path(7, 8), now=4)
    assert (resident(host, path(1, 2, 3)), resident(host, path(4, 5, 6))) == (3, 1)


def test_a_failing_allocation_evicts_nothing() -> None:
    host = CacheTier(PrefixTree(), Tier.HOST, 4)
    store(host, path(1, 2))
    held = host.allocate(2)
    assert held is not None
    assert host.allocate(3) is None
    host.acquire(host.blocks_of(host.tree.match(path(1))))
    assert host.allocate(2) is None, "the head is in use, the tail alone is not enough"
    assert resident(host, path(1, 2)) == 2
    host.check()


def test_a_newer_block_never_makes_room_for_an_older_one() -> None:
    host = CacheTier(PrefixTree(), Tier.HOST, 2)
    store(host, path(1), now=1)
    store(host, path(2), now=5)
    assert host.allocate(2, older_than=5) is None
    assert len(host.allocate_up_to(2, older_than=5)) == 1
    assert (resident(host, path(1)), resident(host, path(2))) == (0, 1)


def test_a_pinned_prefix_outlives_any_pressure_on_the_host() -> None:
    host = CacheTier(PrefixTree(), Tier.HOST, 4)
    nodes = store(host, path(1, 2), now=0)
    host.tree.pin(nodes)
    for name in range(3, 9):
        store(host, path(name, 9), now=float(name))
    assert resident(host, path(1, 2)) == 2
    host.unpin(nodes)
    store(host, path(7, 7, 7, 7), now=99)
    assert resident(host, path(1, 2)) == 0
    host.check()


def test_a_block_being_written_is_not_matched_and_not_evicted() -> None:
    host = CacheTier(PrefixTree(), Tier.HOST, 1)
    ids = host.allocate(1)
    nodes = host.tree.insert_path(path(1), 0.0)
    assert ids is not None
    host.attach(ids, nodes, Event.SWAP_OUT)
    assert host.node_state(nodes[0]) is BlockState.SWAPPING_TO_HOST
    assert resident(host, path(1)) == 0
    assert host.allocate(1) is None
    host.fill(ids)
    assert resident(host, path(1)) == 1


def test_wrong_use_raises_and_names_the_block() -> None:
    host = CacheTier(PrefixTree(), Tier.HOST, 2)
    store(host, path(1))
    (node,) = host.tree.match(path(1))
    with pytest.raises(InvalidBlockError, match="HOST block 0 is not a private block in use"):
        host.attach(host.blocks_of([node]), [node], Event.SWAP_OUT)
    with pytest.raises(IllegalTransition, match="FILL on a HOST copy that is RESIDENT"):
        host.fill(host.blocks_of([node]))
    with pytest.raises(IllegalTransition, match="COMPUTE on a HOST copy"):
        host.attach(host.allocate(1) or [], host.tree.insert_path(path(2), 0.0), Event.COMPUTE)


def test_what_was_forgotten_by_every_tier_is_remembered_for_a_while() -> None:
    tree = PrefixTree(max_remembered=2)
    host = CacheTier(tree, Tier.HOST, 2)
    for name in range(1, 7):
        store(host, path(name, name), now=float(name))
    assert len(tree) == 4, "two on the host, two remembered"
    assert tree.match(path(6, 6)) and not tree.match(path(1))
    tree.check()


@pytest.mark.parametrize("log_removed", [False, True])
def test_removals_are_logged_for_an_owner_that_asked_and_pile_up_for_no_other(log_removed: bool) -> None:
    tier = CacheTier(PrefixTree(), Tier.HOST, 2, log_removed)
    for name in range(1, 6):
        store(tier, path(name), now=float(name))
    assert sorted(tier.removed) == ([path(name)[0] for name in range(1, 4)] if log_removed else [])
    tier.reset()
    assert len(tier.removed) == (3 if log_removed else 0), "who resets knows that everything is gone"
