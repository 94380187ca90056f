"""The prefix tree: how long a block without a copy is known, and what comes behind one that was forgotten."""

from __future__ import annotations

from kv_connector.index import ROOT, CacheTier, PrefixTree
from kv_connector.types import BlockHash, Tier
from tests.index.chains import path, store


def test_blocks_whose_parents_were_forgotten_are_put_behind_them_again() -> None:
    """Blocks of a live request that waited for room: with another parent they would evict, and be found, as the
    beginning of a prompt."""
    tree, hashes = PrefixTree(), path(1, 2, 3, 4)
    nodes = tree.insert_path(hashes, 0.0, first=2)
    assert [tree.depth[node] for node in nodes] == [2, 3]
    assert tree.match(hashes) == tree.insert_path(hashes, 0.0)
    tree.settle(tree.nodes())
    tree.check()


def test_what_was_forgotten_by_every_tier_is_remembered_for_a_while() -> None:
    tree = PrefixTree(max_remembered=2)
    host = CacheTier(tree, Tier.HOST, 2)
    for name in range(1, 7):
        store(host, path(name, name), now=float(name))
    assert len(tree) == 4, "two on the host, two remembered"
    assert tree.match(path(6, 6)) and not tree.match(path(1))
    tree.check()


def test_how_much_is_remembered_may_change_at_any_time() -> None:
    """A host that grows asks for as many as it holds: what returns after as many others is still known."""
    tree = PrefixTree(max_remembered=4)
    host = CacheTier(tree, Tier.HOST, 2)
    for name in range(100):
        store(host, path(name), now=float(name))
    assert len(tree) == 6
    tree.max_remembered = 50
    for name in range(100, 200):
        store(host, path(name), now=float(name))
    assert len(tree) == 52
    assert tree.match(path(150)) and not tree.match(path(147))
    tree.max_remembered = 3
    store(host, path(200))
    assert len(tree) == 5
    tree.check()


def test_nothing_of_a_forgotten_prefix_does_not_bring_it_back() -> None:
    """Nobody would settle it: it could never be forgotten again."""
    tree = PrefixTree(max_remembered=0)
    tree.settle(tree.insert_path(path(1, 2), 0.0))
    assert tree.insert_path(path(1, 2), 1.0, 2) == tree.insert_path(path(1, 2), 1.0, 1, 1) == []
    assert len(tree) == 0
    tree.check()


def test_a_limit_that_falls_far_is_reached_over_many_calls() -> None:
    tree = PrefixTree(max_remembered=5000)
    tree.settle(tree.insert_path([BlockHash(index.to_bytes(2, "big")) for index in range(5000)], 0.0))
    tree.max_remembered = 0
    seen = []
    while len(tree):
        before = len(tree)
        tree.settle(())
        seen.append(before - len(tree))
        tree.check()
    assert max(seen) < 200


def test_blocks_that_follow_nothing_are_all_children_of_the_root() -> None:
    tree = PrefixTree()
    hashes = [BlockHash(bytes((number,)) * 32) for number in range(4)]
    known = tree.insert_path(hashes[1:2], 0.0)
    nodes = tree.insert_apart(hashes, 1.0)
    tree.settle(nodes)
    assert nodes[1:2] == known
    assert [tree.hash_of(node) for node in nodes] == hashes
    assert [(tree.parent[node], tree.depth[node]) for node in nodes] == [(ROOT, tree.depth[known[0]])] * 4
    tree.check()


def test_a_row_that_is_used_again_is_no_end_inside_of_a_block() -> None:
    """What the engine has told of another prompt's end is not so of the block that has its row now."""
    tree = PrefixTree(max_remembered=0)
    (node,) = tree.insert_apart(path(1), 0.0)
    tree.inside[node] = True
    tree.settle([node])
    assert tree.insert_apart(path(2), 1.0) == [node]
    assert not tree.inside[node]
