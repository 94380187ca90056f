"""Paths that were matched lately are matched again without looking at each hash: never with what has changed since."""

from __future__ import annotations

import random
from array import array

import pytest

from kv_connector.index import PrefixTree
from kv_connector.index.recent import RecentPaths
from kv_connector.types import BlockHash

_BLOCKS = 200  # of the longest prompt


def hashes_of(document: int, branch: int, parts_at: int, length: int) -> list[BlockHash]:
    """A prompt that goes its own way behind its document's first blocks."""
    names = [(document, 0, 0, i) if i < parts_at else (document, branch, parts_at, i) for i in range(length)]
    return [BlockHash(repr(name).encode()) for name in names]


def drawn(draw: random.Random) -> list[BlockHash]:
    parts_at = draw.choice((0, 65, 100, 199))
    return hashes_of(draw.randrange(3), draw.randrange(4), parts_at, draw.randint(1, _BLOCKS))


def looked_up(tree: PrefixTree, hashes: list[BlockHash]) -> list[int]:
    """One by one."""
    nodes: list[int] = []
    for block_hash in hashes:
        if (node := tree.get(block_hash)) is None:
            break
        nodes.append(node)
    return nodes


@pytest.mark.parametrize("seed", range(20))
def test_a_match_is_what_a_look_up_of_each_hash_finds(seed: int) -> None:
    """While blocks come, are forgotten, and come again in rows that others have left."""
    draw, tree = random.Random(seed), PrefixTree(max_remembered=350)
    asked = [drawn(draw) for _ in range(6)]
    for number in range(300):
        if draw.random() < 0.1:
            asked[draw.randrange(len(asked))] = drawn(draw)
        hashes = draw.choice(asked)
        if draw.random() < 0.5:
            tree.settle(tree.insert_path(hashes, float(number)))
        elif draw.random() < 0.2:
            tree.settle(tree.insert_apart([BlockHash(b"apart" + block_hash) for block_hash in hashes], 0.0))
        first = draw.choice((0, 0, 0, 70))
        for wanted in (hashes[first:], [BlockHash(b"apart" + block_hash) for block_hash in hashes]):
            assert tree.match(wanted) == looked_up(tree, wanted)
    tree.check()


def test_a_path_that_has_come_again_in_other_rows_is_matched_there() -> None:
    """All but its first block have their rows of before: the last one looks as if nothing had changed."""
    tree, hashes = PrefixTree(max_remembered=_BLOCKS), hashes_of(1, 0, 0, _BLOCKS)
    before = tree.insert_path(hashes, 0.0)
    tree.settle(before)
    assert tree.match(hashes) == before
    tree.max_remembered = 0
    (last_free,) = tree.insert_path(hashes_of(2, 0, 0, 1), 1.0)
    tree.settle([last_free])
    while tree.nodes():
        tree.settle([])
    tree.max_remembered = 2 * _BLOCKS
    again = [*tree.insert_path(hashes[:1], 2.0), *tree.insert_path(hashes_of(3, 0, 0, 1), 2.0)]
    assert again == [last_free, before[0]]
    assert tree.insert_path(hashes, 2.0) == [last_free, *before[1:]] == tree.match(hashes)


def test_who_changes_what_a_match_returned_changes_no_later_match() -> None:
    tree, hashes = PrefixTree(), hashes_of(1, 0, 0, _BLOCKS)
    nodes = tree.insert_path(hashes, 0.0)
    for _ in range(2):
        found = tree.match(hashes)
        assert found == nodes
        found[50] = 0


def test_no_more_paths_are_remembered_than_requests_ask_with() -> None:
    """A path of a million tokens is half a megabyte."""
    tree = PrefixTree(max_remembered=1 << 20)
    for document in range(100):
        hashes = hashes_of(document, 0, 0, _BLOCKS)
        tree.insert_path(hashes, 0.0)
        assert tree.match(hashes) == tree.match(hashes)
    paths = tree._recent._paths.values()
    assert len({id(nodes) for nodes, _ in paths}) == 16 and len(paths) == 32


@pytest.mark.parametrize("others", ["of other documents", "with the same first block"])
def test_a_prompt_that_waits_is_matched_by_what_was_remembered(others: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not by comparing all of its hashes, however many other prompts come meanwhile."""
    tree, extended = PrefixTree(max_remembered=1 << 20), PrefixTree._extended
    begun_with: list[int] = []

    def watched(nodes: list[int], hashes: list[BlockHash]) -> list[int]:
        begun_with.append(len(nodes))
        return extended(tree, nodes, hashes)

    monkeypatch.setattr(tree, "_extended", watched)
    waits = hashes_of(0, 0, 0, _BLOCKS)
    for number in range(40):
        hashes = (
            hashes_of(number, 0, 0, _BLOCKS) if others == "of other documents" else hashes_of(0, number, 1, _BLOCKS)
        )
        tree.insert_path(waits, 0.0)
        tree.insert_path(hashes, 0.0)
        assert len(tree.match(hashes)) == len(tree.match(waits)) == _BLOCKS
    assert begun_with[3::2] == [_BLOCKS] * 39


def test_a_part_of_a_prompt_is_matched_by_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As what can be loaded of it, and what is loaded in the end."""
    tree, hashes = PrefixTree(), hashes_of(0, 0, 0, _BLOCKS)
    nodes = tree.insert_path(hashes, 0.0)
    assert tree.match(hashes) == nodes
    monkeypatch.setattr(tree, "_extended", lambda begun, hashes: begun)
    assert tree.match(hashes[:150]) == nodes[:150]


class Counted(list[BlockHash | None]):
    """Counts how often a hash is looked at."""

    looks = 0

    def __getitem__(self, index: int) -> BlockHash | None:  # type: ignore[override]  # of one row
        self.looks += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("length", [1, 70, 150, 199])
def test_the_end_of_what_is_shared_is_found_by_a_few_looks(length: int) -> None:
    hashes = hashes_of(1, 0, 0, _BLOCKS)
    known = Counted([None, *hashes])
    recent = RecentPaths(known, array("q", [0] * (_BLOCKS + 1)))
    recent.remember(hashes, [*range(1, _BLOCKS + 1)], 0)
    other = hashes_of(1, 7, length, _BLOCKS)
    assert recent.shared(other) == [*range(1, length + 1)]
    assert known.looks <= 9
