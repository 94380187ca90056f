"""Which blocks of a sliding window a step saves: those that the engine holds and still needs; how they are counted."""

from __future__ import annotations

from kv_connector.index import BlockGroup
from kv_connector.types import NO_BLOCK
from tests.scheduler.saves.test_budget import make_half, saved, step
from tests.scheduler.test_half import Asked


def test_a_place_without_a_block_is_not_saved() -> None:
    """An engine's table may have holes anywhere: what lies under no id is somebody else's."""
    half, _, _ = make_half(0, groups=(BlockGroup(window_blocks=2),))
    request = Asked("a", list(range(16)))
    half.update_state_after_alloc(request, [[0, 1, NO_BLOCK, 3]], 0, 0)
    assert saved(step(half, request, 0, 16)) == [0, 1, 3]


def test_a_block_that_a_hit_ends_with_is_in_the_window() -> None:
    half, _, _ = make_half(0, groups=(BlockGroup(window_blocks=1),))
    request = Asked("a", list(range(12)))
    half.update_state_after_alloc(request, [[0, 1, 2]], 8, 0)
    assert saved(step(half, request, 8, 4)) == [1, 2]


def test_what_is_saved_on_a_hit_is_counted_by_the_group_s_own_blocks() -> None:
    """Of a window with blocks twice as long as those of full attention, two blocks are hit and two computed."""
    half, _, _ = make_half(0, groups=(BlockGroup(), BlockGroup(window_blocks=9, hashes_per_block=2)))
    request = Asked("a", list(range(32)))
    half.update_state_after_alloc(request, [list(range(8)), [10, 11, 12, 13]], 16, 0)
    assert sorted(saved(step(half, request, 16, 16))) == [0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13]
    assert (half.metrics.saves_on_hit_blocks, half.metrics.saves_on_compute_blocks) == (4 + 2, 4 + 2)


def test_of_a_chunk_is_saved_what_the_next_token_or_another_request_may_see() -> None:
    """Chunks of three blocks. An engine holds one until its last token is computed, and then none of it; the last block
    of a chunk is in front of the next one's tokens alone, which do not see it."""
    group = BlockGroup(chunk_blocks=3)
    assert [group.first_held(count, 4) for count in (0, 4, 11, 12, 13, 23, 24)] == [0, 0, 0, 3, 3, 3, 6]
    half, _, _ = make_half(0, groups=(group,))
    request = Asked("a", list(range(32)))
    half.update_state_after_alloc(request, [[0, 1, 2]], 0, 0)
    assert saved(step(half, request, 0, 7)) == [0]
    assert saved(step(half, request, 7, 1)) == [1]
    assert saved(step(half, request, 8, 4)) == []
    other = Asked("b", list(range(100, 132)))
    half.update_state_after_alloc(other, [[10, 11, 12, 13, 14]], 16, 0)
    assert saved(step(half, other, 16, 4)) == [13, 14], "blocks 10 to 12 may be anybody's"


def test_of_a_window_is_saved_what_lies_in_front_of_where_hits_end() -> None:
    """Blocks of full attention are four times as long: hits end where they do."""
    half, _, _ = make_half(0, groups=(BlockGroup(hashes_per_block=4), BlockGroup(window_blocks=2)))
    request = Asked("a", list(range(40)))
    half.update_state_after_alloc(request, [[0, 1, 2], list(range(10, 20))], 0, 0)
    assert sorted(saved(step(half, request, 0, 40))) == [0, 1, 12, 13, 16, 17]
