"""Hits over several block groups, against a search by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kv_connector.index import BlockGroup, CacheTier, Event, GroupedTree, Lookup, PrefixTree, group_key, split_key
from kv_connector.types import BlockHash, Tier

HASHES = [BlockHash(bytes([index]) * 32) for index in range(12)]


@given(
    windows=st.lists(st.one_of(st.none(), st.integers(1, 4)), min_size=1, max_size=3),
    held=st.lists(st.sets(st.integers(0, 11)), min_size=3, max_size=3),
    first=st.integers(0, 4),
    stop=st.integers(0, 12),
)
def test_a_hit_is_the_longest_prefix_that_every_group_can_serve(
    windows: list[int | None], held: list[set[int]], first: int, stop: int
) -> None:
    windows = sorted(windows, key=lambda window: window is not None)
    grouped = GroupedTree(PrefixTree(), [BlockGroup(window) for window in windows])
    tier = CacheTier(grouped.tree, Tier.HOST, 64)
    for group, blocks in enumerate(held[: len(windows)]):
        for index in sorted(blocks):
            node = grouped.insert(HASHES[: index + 1], group, 0.0, first=index)[0]
            block_ids = tier.allocate(1)
            assert block_ids is not None
            tier.attach(block_ids, [node], Event.SWAP_OUT)
            tier.fill(block_ids)
            tier.release(block_ids)

    def serves(end: int) -> bool:
        starts = [first if window is None else max(first, end - window) for window in windows]
        return all(set(range(start, end)) <= held[group] for group, start in enumerate(starts))

    expected = max((end for end in range(first, max(first, stop) + 1) if serves(end)), default=first) - first
    lookup = Lookup(grouped, tier)
    assert lookup.find(HASHES, first, stop) == expected
    hit = lookup.hit(HASHES, first, expected)
    for group, (indices, nodes) in enumerate(zip(hit.indices, hit.nodes, strict=True)):
        assert [grouped.tree.hash_of(node) for node in nodes] == [group_key(HASHES[i], group) for i in indices]
    assert Lookup(grouped, tier, drop_last_block=True).find(HASHES, first, stop) <= max(0, expected - bool(expected))
    grouped.tree.check()
    tier.check()


@given(group=st.integers(0, 9))
def test_keys_name_hash_and_group(group: int) -> None:
    assert split_key(group_key(HASHES[3], group)) == (HASHES[3], group)
