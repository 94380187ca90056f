"""Blocks of a load between a request's admission and the plan that begins it."""

from __future__ import annotations

from tests.scheduler.test_half import Asked, make_half, run, save


def test_nobody_rides_on_a_load_that_was_never_begun() -> None:
    """Its request ends before the step is planned: a later one with the prefix loads it for itself."""
    half, blocks = make_half(load_choice="async")
    save(half, Asked("warm", list(range(9))), first_block=40)
    gone = Asked("gone", list(range(9)))
    assert half.get_num_new_matched_tokens(gone, 0) == (8, True)
    half.update_state_after_alloc(gone, [[0, 1, 2]], 0, 8)
    half.request_finished(gone)
    assert run(half).background_loads == ()
    assert blocks.pins() == {}
    assert half.get_num_new_matched_tokens(Asked("next", list(range(9))), 0) == (8, True)
    half.check()
