"""Which hashes are taken from somebody who says that they are a prefix: all lists of a small world, and random ones.

What is taken must lie where requests look for it, whatever they ask for afterwards: else a block had two parents.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_connector.index import BlockGroup, GroupedTree, PrefixTree, group_key
from kv_connector.types import BlockHash

A, B, C, D, E, F, UNKNOWN = (BlockHash(bytes([number]) * 32) for number in range(7))
SHOWN = [A, B, C], [A, B, D], [E, F]
FULL, WINDOW = BlockGroup(), BlockGroup(window_blocks=2)


def chain(number: int, branch: int, num_hashes: int) -> list[BlockHash]:
    """Prompts of one number have their first two hashes in common."""
    return [BlockHash(bytes([number, branch if i > 1 else 0, i, 0])) for i in range(num_hashes)]


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (FULL, FULL), (WINDOW, FULL)])
def test_of_all_lists_those_are_known_that_requests_have_shown(groups: Sequence[BlockGroup]) -> None:
    grouped = GroupedTree(PrefixTree(), groups)
    for hashes in SHOWN:
        ask(grouped, hashes)
    num_nodes = len(grouped.tree)
    prefixes = [hashes[:end] for hashes in SHOWN for end in range(len(hashes) + 1)]
    names = [A, B, C, D, E, F, UNKNOWN, group_key(A, 1), group_key(E, 1)]
    for length in range(5):
        for hashes in map(list, product(names, repeat=length)):
            is_known = grouped.knows_prefix(hashes)
            assert is_known == (hashes in prefixes)
            if is_known:
                ask(grouped, hashes)
    assert len(grouped.tree) == num_nodes, "what is known is there"
    grouped.tree.check()


def test_a_hash_that_is_there_twice_is_in_no_prefix() -> None:
    """Of windows alone nothing else says so."""
    for groups in ((FULL,), (WINDOW,)):
        grouped = GroupedTree(PrefixTree(), groups)
        ask(grouped, [A, B, C])
        assert grouped.knows_prefix([A, B, C])
        assert not grouped.knows_prefix([A, B, B])


PROMPTS = [chain(number, branch, 6) for number in range(2) for branch in range(2)]
NAMES = st.sampled_from([*{name: None for hashes in PROMPTS for name in hashes}, BlockHash(bytes(4))])
LISTS = st.one_of(
    st.lists(NAMES, max_size=7),
    st.builds(
        lambda hashes, a, b, i, name: [*hashes[a:i], name, *hashes[i + 1 : b]],
        st.sampled_from(PROMPTS),
        st.sampled_from([0, 0, 1]),
        st.integers(0, 6),
        st.integers(0, 6),
        NAMES,
    ),
    st.builds(
        lambda hashes, start, end: hashes[start:end],
        st.sampled_from(PROMPTS),
        st.sampled_from([0, 0, 0, 1, 2]),
        st.integers(0, 6),
    ),
)


@given(
    groups=st.lists(
        st.builds(BlockGroup, st.sampled_from([None, None, 1, 3]), st.sampled_from([1, 1, 2, 3])),
        min_size=1,
        max_size=3,
    ),
    is_shown=st.lists(st.tuples(st.booleans(), st.sampled_from(PROMPTS), st.integers(0, 6), LISTS), max_size=30),
    max_remembered=st.sampled_from([0, 4, 1000]),
)
@settings(deadline=None)
def test_whatever_is_taken_stands_in_no_request_s_way(
    groups: list[BlockGroup],
    is_shown: list[tuple[bool, list[BlockHash], int, list[BlockHash]]],
    max_remembered: int,
) -> None:
    grouped = GroupedTree(PrefixTree(max_remembered), groups)
    for is_request, prompt, end, given_hashes in is_shown:
        if is_request:
            ask(grouped, prompt[:end])
        elif grouped.knows_prefix(given_hashes):
            for group in grouped.full:
                ends = list(grouped.keys(given_hashes, group))
                assert any(list(grouped.keys(shown, group))[: len(ends)] == ends for shown in PROMPTS)
            ask(grouped, given_hashes)
        grouped.tree.check()
    for prompt in PROMPTS:
        ask(grouped, prompt)
    grouped.tree.check()


def ask(grouped: GroupedTree, hashes: Sequence[BlockHash]) -> None:
    """All nodes of a prefix; each of full attention is behind the one in front of it."""
    for group in range(len(grouped.groups)):
        nodes = grouped.insert(hashes, group, 0.0)
        if group in grouped.full:
            assert [grouped.tree.depth[node] for node in nodes] == list(range(len(nodes)))
        grouped.tree.settle(nodes)
