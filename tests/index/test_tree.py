"""The prefix tree by itself: how nodes follow one another when those in front of them were forgotten."""

from __future__ import annotations

from kv_connector.index import PrefixTree
from tests.index.chains import path


def test_blocks_whose_parents_were_forgotten_are_put_behind_them_again() -> None:
    """Blocks of a live request that waited for room: with another parent they would evict, and be found, as the
    beginning of a prompt."""
    tree, hashes = PrefixTree(), path(1, 2, 3, 4)
    nodes = tree.insert_path(hashes, 0.0, first=2)
    assert [tree.depth[node] for node in nodes] == [2, 3]
    assert tree.match(hashes) == tree.insert_path(hashes, 0.0)
    tree.settle(tree.nodes())
    tree.check()
