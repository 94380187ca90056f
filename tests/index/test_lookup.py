"""Hits over several block groups, against a search by hand."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_connector.index import BlockGroup, CacheTier, Event, GroupedTree, Lookup, PrefixTree, group_key, split_key
from kv_connector.types import BlockHash, Tier

HASHES = [BlockHash(bytes([index]) * 32) for index in range(12)]


def host_with(
    groups: list[BlockGroup], held: list[set[int]], drop_last_block: bool = False
) -> tuple[GroupedTree, CacheTier]:
    """A host that holds these blocks, by group."""
    grouped = GroupedTree(PrefixTree(), groups, drop_last_block)
    tier = CacheTier(grouped.tree, Tier.HOST, 64)
    for group, blocks in enumerate(held[: len(groups)]):
        for index in sorted(blocks):
            if index >= len(HASHES) // groups[group].hashes_per_block:
                continue
            hashes = HASHES[: (index + 1) * groups[group].hashes_per_block]
            node = grouped.insert(hashes, group, 0.0, blocks=range(index, index + 1))[0]
            block_ids = tier.allocate(1)
            assert block_ids is not None
            tier.attach(block_ids, [node], Event.SWAP_OUT)
            tier.fill(block_ids)
            tier.release(block_ids)
    return grouped, tier


@st.composite
def mostly_held(draw: st.DrawFn) -> list[set[int]]:
    """Of three groups all twelve blocks but a few: of random ones two windows are hardly ever whole."""
    lost = draw(st.lists(st.sets(st.integers(0, 11), max_size=5), min_size=3, max_size=3))
    return [set(range(12)) - blocks for blocks in lost]


@given(
    groups=st.lists(
        st.one_of(
            st.builds(BlockGroup, st.one_of(st.none(), st.integers(1, 4)), st.sampled_from([1, 1, 2, 3])),
            st.builds(BlockGroup, st.none(), st.sampled_from([1, 1, 2]), chunk_blocks=st.integers(1, 4)),
        ),
        min_size=1,
        max_size=3,
    ),
    held=st.one_of(mostly_held(), st.lists(st.sets(st.integers(0, 11)), min_size=3, max_size=3)),
    first=st.integers(0, 6),
    stop=st.integers(0, 12),
)
@settings(deadline=None)  # of a busy machine
def test_a_hit_is_the_longest_prefix_that_every_group_can_serve(
    groups: list[BlockGroup], held: list[set[int]], first: int, stop: int
) -> None:
    groups = sorted(groups, key=lambda group: not group.is_full)
    grouped, tier = host_with(groups, held)
    hit_size = math.lcm(*(group.hashes_per_block for group in groups))

    def needed(end: int) -> list[range]:
        """Of each group the blocks that a hit up to there is made of."""
        blocks = []
        for group in groups:
            size, window = group.hashes_per_block, group.window_blocks
            start = 0 if window is None else end // size - window
            if group.chunk_blocks is not None:
                start = end // (size * group.chunk_blocks) * group.chunk_blocks
            start = max(first // size, start)
            blocks.append(range(start, end // size))
        return blocks

    def longest(most: int) -> int:
        """The longest prefix of up to so many hashes that every group holds what it needs of."""
        ends = range(first, first + most + 1) if first % hit_size == 0 else ()
        served = [end for end in ends if all(set(b) <= held[g] for g, b in enumerate(needed(end)))]
        return max((end - first for end in served if end % hit_size == 0), default=0)

    expected = longest(max(0, stop - first))
    proven = expected  # up to where full attention has whole blocks, if there is any
    for g, group in enumerate(groups):
        if group.is_full:
            size = group.hashes_per_block
            have = next(b for b in range(first // size, 13) if b not in held[g] or b >= stop // size)
            proven = max(0, size * have - first) if g == 0 else min(proven, max(0, size * have - first))
    for drops, length in ((False, expected), (True, longest(max(0, proven - 1)))):
        lookup = Lookup(GroupedTree(grouped.tree, groups, drop_last_block=drops), tier)
        assert lookup.find(HASHES, first, stop) == length
        if first % hit_size:
            continue
        hit = lookup.hit(HASHES, first, length)
        assert list(hit.indices) == needed(first + length)
        assert lookup.num_copies(first, length) == sum(map(len, hit.nodes))
        for group, (indices, nodes) in enumerate(zip(hit.indices, hit.nodes, strict=True)):
            ends = [(index + 1) * groups[group].hashes_per_block - 1 for index in indices]
            assert [grouped.tree.hash_of(node) for node in nodes] == [group_key(HASHES[i], group) for i in ends]
    grouped.tree.check()
    tier.check()


@given(
    groups=st.lists(
        st.one_of(
            st.builds(BlockGroup, st.integers(1, 4), st.sampled_from([1, 2, 3])),
            st.builds(BlockGroup, st.none(), st.sampled_from([1, 2]), chunk_blocks=st.integers(1, 4)),
        ),
        min_size=1,
        max_size=2,
    ),
    full=st.one_of(st.none(), st.builds(BlockGroup, st.none(), st.sampled_from([1, 4, 6]))),
    drop_last_block=st.booleans(),
)
@settings(deadline=None)
def test_without_what_no_hit_may_need_hits_are_as_long_and_with_less_they_are_not(
    groups: list[BlockGroup], full: BlockGroup | None, drop_last_block: bool
) -> None:
    groups = [*([full] if full else []), *groups]
    every = [set(range(12 // group.hashes_per_block)) for group in groups]
    grouped, tier = host_with(groups, every, drop_last_block)
    kept = [{block for block in blocks if grouped.may_need(group, block)} for group, blocks in enumerate(every)]
    whole, other = Lookup(grouped, tier), Lookup(*host_with(groups, kept, drop_last_block))
    asked = [(first, stop) for first in range(0, 12, grouped.hashes_per_hit) for stop in range(13)]
    ends = [whole.find(HASHES, *each) for each in asked]
    assert [other.find(HASHES, *each) for each in asked] == ends
    for group in grouped.windows if not drop_last_block else ():
        ends_by = grouped.hashes_per_hit // groups[group].hashes_per_block
        for block in (block for block in kept[group] if (block // ends_by + 1) * grouped.hashes_per_hit <= 12):
            less = [blocks - {block} if index == group else blocks for index, blocks in enumerate(kept)]
            other = Lookup(*host_with(groups, less))
            assert [other.find(HASHES, *each) for each in asked] != ends


def test_a_hit_that_ends_earlier_for_one_window_is_whole_for_the_others() -> None:
    """Full attention has six blocks. The window of one has its block for prefixes of two and of six, and the window of
    two has its blocks for prefixes of up to four: cut to four for the second, the hit is not whole for the first."""
    grouped, tier = host_with([BlockGroup(), BlockGroup(1), BlockGroup(2)], [{0, 1, 2, 3, 4, 5}, {1, 5}, {0, 1, 2, 3}])
    assert Lookup(grouped, tier).find(HASHES, 0, 6) == 2


def test_what_is_left_without_the_last_block_is_whole_for_every_window() -> None:
    """A window of one has the blocks that end prefixes of one and of four: three blocks are no hit."""
    grouped, tier = host_with([BlockGroup(), BlockGroup(1)], [{0, 1, 2, 3}, {0, 3}])
    assert Lookup(grouped, tier).find(HASHES, 0, 4) == 4
    assert Lookup(GroupedTree(grouped.tree, grouped.groups, drop_last_block=True), tier).find(HASHES, 0, 4) == 1


def test_what_is_left_to_draft_layers_is_one_hash_of_what_all_have() -> None:
    """Of blocks of one hash three are there, and of blocks of two hashes two: without the last, two are hit."""
    groups = [BlockGroup(), BlockGroup(hashes_per_block=2)]
    grouped, tier = host_with(groups, [{0, 1, 2}, {0, 1}])
    assert Lookup(GroupedTree(grouped.tree, groups, drop_last_block=True), tier).find(HASHES, 0, 4) == 2


def test_the_only_state_is_hit_where_the_block_behind_it_is_left_to_draft_layers() -> None:
    """An engine with drafts keeps the state one block in front of where it would without them."""
    grouped, tier = host_with([BlockGroup(), BlockGroup(1, states_are_told=True)], [{0, 1, 2, 3}, {2}])
    assert Lookup(GroupedTree(grouped.tree, grouped.groups, drop_last_block=True), tier).find(HASHES, 0, 4) == 3


def keep_ends(grouped: GroupedTree, tier: CacheTier, group: int, ends: set[int]) -> None:
    """The host has copies of the blocks that these ends lie in, under the hashes there."""
    for end in sorted(ends):
        key = grouped.end_key(HASHES, group, end)
        if grouped.tree.get(key) is not None:
            continue
        block_ids = tier.allocate(1)
        assert block_ids is not None
        tier.attach(block_ids, grouped.tree.insert_apart([key], 0.0), Event.SWAP_OUT)
        tier.fill(block_ids)
        tier.release(block_ids)


@given(
    sizes=st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=2),
    state_sizes=st.lists(st.sampled_from([1, 2, 3]), min_size=0, max_size=2),
    lost=st.lists(st.sets(st.integers(0, 11), max_size=2), min_size=2, max_size=2),
    ends=st.lists(st.sets(st.integers(1, 12), max_size=8), min_size=4, max_size=4),
    first=st.integers(0, 1),
    stop=st.integers(0, 12),
)
@settings(deadline=None)
def test_a_hit_may_end_inside_of_blocks_where_every_group_has_a_copy(
    sizes: list[int], state_sizes: list[int], lost: list[set[int]], ends: list[set[int]], first: int, stop: int
) -> None:
    """A state is that of the very end; rows of attention serve ends in front of the one that they were kept for."""
    groups = [BlockGroup(None, size) for size in sizes] + [BlockGroup(1, size, True) for size in state_sizes]
    whole = [set(range(12 // size)) - blocks for size, blocks in zip(sizes, lost, strict=False)]
    grouped, tier = host_with(groups, whole)
    grouped = GroupedTree(grouped.tree, groups, ends_within=True)
    first *= grouped.hashes_per_hit
    for group, size in enumerate(sizes):
        ends[group] -= set(range(0, 13, size))
    for group in range(len(groups)):
        keep_ends(grouped, tier, group, ends[group])
    has_whole = [{(block + 1) * size for block in blocks} for size, blocks in zip(sizes, whole, strict=True)]
    names = [blocks | own for blocks, own in zip(has_whole, ends, strict=False)]

    def is_served(end: int) -> bool:
        for size, has in zip(sizes, names, strict=True):
            block_ends = range(first + size, end + 1, size)
            inside = range(end, end - end % size + size + 1) if end % size else ()
            if not has.issuperset(block_ends) or (inside and has.isdisjoint(inside)):
                return False
        return end == first or all(end in ends[len(sizes) + g] for g in range(len(state_sizes)))

    length = max(end for end in range(first, max(first, stop) + 1) if is_served(end)) - first
    lookup = Lookup(grouped, tier)
    assert lookup.find(HASHES, first, stop) == length
    if not length:
        return
    hit, end = lookup.hit(HASHES, first, length), first + length
    assert lookup.num_copies(first, length) == sum(map(len, hit.nodes))
    for group, (indices, nodes) in enumerate(zip(hit.indices, hit.nodes, strict=True)):
        size, is_full = groups[group].hashes_per_block, group < len(sizes)
        assert indices == range(first // size if is_full else -(-end // size) - 1, -(-end // size))
        keys = [grouped.tree.hash_of(node) for node in nodes]
        assert keys[:-1] == [group_key(HASHES[(i + 1) * size - 1], group) for i in indices[:-1]]
        last = HASHES.index(split_key(keys[-1])[0]) + 1
        assert split_key(keys[-1])[1] == group
        assert end <= last <= indices.stop * size if is_full else last == end


def test_no_hit_ends_inside_of_a_block_that_is_left_to_draft_layers() -> None:
    grouped, tier = host_with([BlockGroup(None, 2), BlockGroup(1, 2, True)], [{0, 1}, {0, 1}])
    for group in range(2):
        keep_ends(grouped, tier, group, {3})
    for drops, length in ((False, 3), (True, 0)):
        both = GroupedTree(grouped.tree, grouped.groups, drop_last_block=drops, ends_within=True)
        assert Lookup(both, tier).find(HASHES, 0, 3) == length


@given(group=st.integers(0, 9))
def test_keys_name_hash_and_group(group: int) -> None:
    assert split_key(group_key(HASHES[3], group)) == (HASHES[3], group)
