"""Tree and tiers: what is evicted, in which order, and what never is."""

from __future__ import annotations

from collections.abc import Sequence

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
        self.private: list[tuple[Tier, list[int]]] = []  # blocks that hold no copy yet

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

    @rule(tier=tiers_, names=paths, count=st.integers(0, 4), at_once=st.booleans())
    def make_room_behind(self, tier: Tier, names: list[int], count: int, at_once: bool) -> None:
        """Older prefixes go for blocks behind a path, and nothing of the path does."""
        self.now += not at_once  # within a step time stands still
        target, hashes = self.tiers[tier], path(*names)
        expected = self._naive_victims(target, count - target.pool.num_free, True, hashes, self.now)
        assert expected is not None
        room = min(count, target.pool.num_free + len(expected))
        assert target.has_room_behind((hashes,), self.now) == (
            bool(target.pool.num_free or self._naive_victims(target, 1, True, hashes, self.now))
        )
        num_evicted = target.num_evicted
        ids = target.allocate_behind(count, (hashes,), self.now)
        assert (len(ids), target.num_evicted - num_evicted) == (room, len(expected))
        assert not [h for h in expected if (node := self.tree.get(h)) is not None and target.node_state(node) != 0]
        self.private.append((tier, ids))

    @precondition(lambda self: self.private)
    @rule()
    def give_back(self) -> None:
        tier, ids = self.private.pop()
        self.tiers[tier].release(ids)

    @rule(names=paths)
    def use_the_end(self, names: list[int]) -> None:
        """Who uses a block uses what is in front of it, too."""
        self.now += 1
        self.tree.touch(self.tree.match(path(*names))[-1:], self.now)

    @rule(limit=st.integers(0, 6))
    def remember(self, limit: int) -> None:
        self.tree.max_remembered = limit

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

    def _naive_victims(
        self,
        tier: CacheTier,
        count: int,
        partial: bool = False,
        kept: Sequence[BlockHash] = (),
        older_than: float = float("inf"),
    ) -> list[BlockHash] | None:
        """Oldest evictable leaf, again and again; None where there are too few of them."""
        gone: list[int] = []
        nodes = [n for n in self.tree.nodes() if tier.node_state(n) is not BlockState.ABSENT]
        used = {n: self._used(n, nodes) for n in nodes}
        while len(gone) < count:
            left = [n for n in nodes if n not in gone]
            parents = {self.tree.parent[n] for n in left}
            leaves = [
                (used[n], n)
                for n in left
                if n not in parents
                and used[n] < older_than
                and self.tree.hash_of(n) not in kept
                and tier.node_state(n) is BlockState.RESIDENT
                and tier.pool.refs(tier.blocks_of([n])[0]) == 0
                and (tier.tier is Tier.DEVICE or not self.tree.pins[n])
            ]
            if not leaves:
                return [self.tree.hash_of(n) for n in gone] if partial else None
            gone.append(min(leaves)[1])
        return [self.tree.hash_of(n) for n in gone]

    def _used(self, node: int, nodes: Sequence[int]) -> float:
        """When a block or one behind it was used last."""
        behind = [self._used(child, nodes) for child in nodes if self.tree.parent[child] == node]
        return max([self.tree.used[node], *behind])


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


def test_a_block_is_kept_for_its_own_time_however_old_what_was_behind_it_is() -> None:
    host = CacheTier(PrefixTree(), Tier.HOST, 2)
    nodes = store(host, path(1, 2), now=1)
    host.tree.touch(nodes[:1], 5)
    assert len(host.allocate_up_to(2, older_than=3)) == 1
    assert resident(host, path(1, 2)) == 1


@pytest.mark.parametrize("way", ["evicted", "discarded"])
def test_a_prefix_is_as_recent_as_its_end(way: str) -> None:
    """A request that decodes touches the block that it fills, and not the thousands in front of it."""
    host = CacheTier(PrefixTree(), Tier.HOST, 6)
    nodes = store(host, path(1, 2, 3), now=1)
    others = host.blocks_of(store(host, path(4, 5, 6), now=2))
    host.tree.touch(nodes[-1:], 3)
    host.acquire(others)
    if way == "evicted":
        assert host.allocate(1) is not None
    else:
        host.discard(host.blocks_of(nodes[-1:]))
    host.release(others)
    assert [h[-1] for _, h in host.next_reused(6)] == [6, 5, 4, 2, 1]


def test_room_is_not_made_out_of_what_it_is_made_for() -> None:
    """Not of the path's end, not of what lies in front of a gap in it, and not of a part that others share."""
    host = CacheTier(PrefixTree(), Tier.HOST, 5)
    nodes = store(host, path(1, 2, 3, 4), now=1)
    store(host, path(1, 2, 9), now=1)
    host.discard(host.blocks_of(nodes[2:3]))
    assert host.allocate(1) is not None, "the gap"
    assert len(host.allocate_behind(3, (path(1, 2, 3, 4, 5),), 2.0)) == 1
    assert resident(host, path(1, 2, 9)) == 2
    assert host.node_state(nodes[3]) is BlockState.RESIDENT
    assert not host.has_room_behind((path(1, 2, 3, 4, 5),), 3.0)
    assert host.has_room_behind((path(7, 8),), 4.0)
    host.check()


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


def test_what_a_copy_uses_stays_however_old_it_is() -> None:
    host = CacheTier(PrefixTree(), Tier.HOST, 3)
    (old, _) = host.blocks_of(store(host, path(1, 2), now=1))
    store(host, path(3), now=2)
    host.acquire([old])
    assert old not in host.allocate_up_to(3)
    assert (resident(host, path(1)), resident(host, path(3))) == (1, 0)


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
    for _ in range(2):  # whether or not somebody uses it
        with pytest.raises(InvalidBlockError, match="HOST block 0 is not a private block in use"):
            host.attach([0], host.tree.insert_path(path(3), 0.0), Event.SWAP_OUT)
        host.acquire([0])
    with pytest.raises(IllegalTransition, match="FILL on a HOST copy that is RESIDENT"):
        host.fill(host.blocks_of([node]))
    with pytest.raises(IllegalTransition, match="COMPUTE on a HOST copy"):
        host.attach(host.allocate(1) or [], host.tree.insert_path(path(2), 0.0), Event.COMPUTE)


def test_a_free_block_becomes_nobody_s_copy_nor_do_those_beside_it() -> None:
    host = CacheTier(PrefixTree(), Tier.HOST, 2)
    nodes = host.tree.insert_path(path(1, 2), 0.0)
    own, free = host.allocate(2) or []
    host.release([free])
    with pytest.raises(InvalidBlockError, match=f"HOST block {free} is not a private block in use"):
        host.attach([own, free], nodes, Event.SWAP_OUT)
    assert host.absent(nodes) == [0, 1] and host.num_copies == 0


def test_blocks_in_use_outlive_a_reset_and_are_free_when_they_are_let_go() -> None:
    host = CacheTier(PrefixTree(), Tier.HOST, 8)
    read = host.blocks_of(store(host, path(1, 2), now=1))
    store(host, path(3, 4, 5))
    host.acquire(read)
    written = host.allocate(1)
    private = host.allocate(1)
    assert written is not None and private is not None
    host.attach(written, host.tree.insert_path(path(6), 1.0), Event.SWAP_OUT)
    host.reset()
    host.check()
    assert [host.state(b) for b in (*read, *written, *private)] == [BlockState.DELETING] * 3 + [BlockState.ABSENT]
    assert (host.num_copies, host.pool.num_free) == (0, 4)
    assert resident(host, path(1, 2)) == resident(host, path(3)) == 0
    store(host, path(1, 2), now=2)
    assert host.allocate(5) is None, "four are in use"
    assert host.fill(written) == [], "what was written meanwhile is not wanted"
    for ids in (read, written, private):
        host.release(ids)
        host.check()
    assert host.allocate(8) is not None
    host.check()
    host.tree.check()


@pytest.mark.parametrize("log_removed", [False, True])
def test_removals_are_logged_for_an_owner_that_asked_and_pile_up_for_no_other(log_removed: bool) -> None:
    tier = CacheTier(PrefixTree(), Tier.HOST, 2, log_removed)
    for name in range(1, 6):
        store(tier, path(name), now=float(name))
    assert sorted(tier.removed) == ([path(name)[0] for name in range(1, 4)] if log_removed else [])
    tier.reset()
    assert sorted(tier.removed) == ([path(name)[0] for name in range(1, 6)] if log_removed else [])


def test_a_parent_that_still_waits_as_the_leaf_it_was_is_evicted_once() -> None:
    """Its child lies in a lower row, so that it comes up first while time stands still, and takes the parent along."""
    tree = PrefixTree(max_remembered=0)
    tier = CacheTier(tree, Tier.HOST, 3)
    (lowest,) = store(tier, path(9), now=1.0)
    (parent,) = store(tier, path(1), now=2.0)
    tier.discard(tier.blocks_of([lowest]))
    _, child = store(tier, path(1, 2), now=2.0)
    assert child < parent, "the row of what was forgotten is used again"
    store(tier, path(3), now=3.0)
    ids = tier.allocate(3)
    assert ids is not None and len(set(ids)) == 3
    tier.check()
    tree.check()
