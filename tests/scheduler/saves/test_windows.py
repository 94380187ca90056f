"""Which blocks of a sliding window a step saves: those that the engine holds, and still needs."""

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
