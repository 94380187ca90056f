"""Whatever is damaged of what the tree and a tier note, their checks say so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kv_connector.index import ROOT, BlockState, CacheTier, FragmentTree, PrefixTree
from kv_connector.types import Tier
from tests.index.chains import path, store


def tier_with_copies(tree: PrefixTree | None = None) -> CacheTier:
    """Of two tenants: three blocks of one prefix, one of another, one that is deleted in use; two nodes without any."""
    tree = PrefixTree() if tree is None else tree
    tier = CacheTier(tree, Tier.HOST, 8, weights=(1, 1))
    store(tier, path(1, 2, 3))
    store(tier, path(4))
    used = tier.blocks_of(store(tier, path(5)))
    tier.acquire(used)
    tier.discard(used)
    tree.settle(tree.insert_path(path(6, 7), 0.0))
    return tier


def test_a_tier_as_it_should_be_passes() -> None:
    tier = tier_with_copies()
    tier.tree.check()
    tier.check()


def test_a_fragment_may_begin_anywhere_but_goes_on_behind_its_parent() -> None:
    tree = tier_with_copies(FragmentTree()).tree
    tree.check()
    tree.depth[node(tree, 1, 2, 3)] = 0
    tree.check()
    tree.depth[node(tree, 1, 2, 3)] = 1
    with pytest.raises(AssertionError, match="is not where its fragment began, nor behind its parent"):
        tree.check()


def node(tree: PrefixTree, *names: int) -> int:
    found = tree.get(path(*names)[-1])
    assert found is not None
    return found


def forget(tree: PrefixTree) -> None:
    del tree._index[path(6)[-1]]


def swap_in_index(tree: PrefixTree) -> None:
    one, other = path(1)[-1], path(4)[-1]
    tree._index[one], tree._index[other] = tree._index[other], tree._index[one]


def follow_nobody(tree: PrefixTree) -> None:
    tree.parent[node(tree, 4)] = len(tree.parent) - 1


def set_keeps(tree: PrefixTree, node: int, keeps: int) -> None:
    tree._keeps[node] = keeps


TREE: list[tuple[Callable[[PrefixTree], object], str]] = [
    (forget, "index and nodes disagree"),
    (swap_in_index, "is not found by its hash"),
    (lambda tree: tree._leaving.append(tree._leaving[0]), "a node leaves twice"),
    (follow_nobody, "are parents and no nodes"),
    (lambda tree: tree.depth.__setitem__(node(tree, 1, 2), 2), "is not behind its parent"),
    (lambda tree: setattr(tree, "_num_remembered", 9), "3 nodes remembered, 9 counted"),
    (lambda tree: set_keeps(tree, node(tree, 1), 7), "is kept by 0x7, should be by 0x8000001"),
    (lambda tree: set_keeps(tree, ROOT, 7), "node 0 is kept by 0x7, should be by 0x5"),
    (lambda tree: tree.pins.__setitem__(node(tree, 1), 1), "is kept by 0x8000001, should be by 0x8000002"),
    (lambda tree: set_keeps(tree, tree._leaving.pop(), 0), "can never be forgotten"),
]


@pytest.mark.parametrize(("damage", "said"), TREE, ids=[said for _, said in TREE])
def test_damage_to_a_tree_is_found(damage: Callable[[PrefixTree], object], said: str) -> None:
    tree = tier_with_copies().tree
    damage(tree)
    with pytest.raises(AssertionError, match=said):
        tree.check()


def block(tier: CacheTier, *names: int) -> int:
    return tier.blocks_of([node(tier.tree, *names)])[0]


def set_refs(tier: CacheTier, state: BlockState, refs: int) -> None:
    """Of the blocks in this state."""
    for block_id, found in enumerate(tier._state):
        if found == state:
            tier.pool.ref_counts[block_id] = refs


def turn_transient(tier: CacheTier) -> None:
    tier._state[block(tier, 1, 2, 3)] = BlockState.SWAPPING_TO_HOST


def count_kid(tier: CacheTier) -> None:
    tier._kids[node(tier.tree, 4)] += 1


def change_queue(tier: CacheTier) -> None:
    assert tier.tenants is not None
    tier.tenants._queues[0]._heaps[0].pop()


def change_owner(tier: CacheTier) -> None:
    assert tier.tenants is not None
    tier.tenants._owner[block(tier, 4)] = 1


def change_held(tier: CacheTier) -> None:
    assert tier.tenants is not None
    tier.tenants.held[1] += 1


TIER: list[tuple[Callable[[CacheTier], object], str]] = [
    (lambda tier: set_refs(tier, BlockState.DELETING, 0), "is never freed"),
    (lambda tier: tier._node.__setitem__(block(tier, 4), node(tier.tree, 1)), "and block 3 disagree"),
    (turn_transient, "is SWAPPING_TO_HOST and nobody writes it"),
    (lambda tier: tier._queue.clear(), "can never be evicted"),
    (change_owner, "block 3 is counted as tenant 1's, and has a copy of 0's"),
    (lambda tier: setattr(tier, "_num_idle", 9), "4 copies are idle, 9 counted"),
    (lambda tier: setattr(tier, "num_copies", 9), "the tree knows 4 copies, the tier 9"),
    (change_queue, "queue flags and heaps disagree|can never be evicted"),
    (change_held, r"tenants hold \[5, 0\] blocks, \[5, 1\] are counted"),
    (count_kid, "has 0 kids here, 1 counted"),
    (lambda tier: setattr(tier.pool, "num_live", 9), "5 ids are live, 9 counted"),
    (lambda tier: tier.pool._free.extend([0]), "live and free at once"),
]


@pytest.mark.parametrize(("damage", "said"), TIER, ids=[said for _, said in TIER])
def test_damage_to_a_tier_is_found(damage: Callable[[CacheTier], object], said: str) -> None:
    tier = tier_with_copies()
    damage(tier)
    with pytest.raises(AssertionError, match=said):
        tier.check()
