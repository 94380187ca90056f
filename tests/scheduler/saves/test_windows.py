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
    """Chunks of two blocks. An engine holds one until its last token is computed, and then none of it."""
    group = BlockGroup(chunk_blocks=2)
    assert [group.first_held(count, 4) for count in (0, 4, 7, 8, 9, 15, 16)] == [0, 0, 0, 2, 2, 2, 4]
    half, _, _ = make_half(0, groups=(group,))
    request = Asked("a", list(range(32)))
    half.update_state_after_alloc(request, [[0, 1]], 0, 0)
    assert saved(step(half, request, 0, 7)) == [0]
    assert saved(step(half, request, 7, 1)) == [1]
    other = Asked("b", list(range(100, 132)))
    half.update_state_after_alloc(other, [[10, 11, 12, 13]], 12, 0)
    assert saved(step(half, other, 12, 4)) == [12, 13], "blocks 10 and 11 may be anybody's"
