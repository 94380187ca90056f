"""Whose jobs have failed with a job that has."""

from __future__ import annotations

from tests.scheduler.test_half import Asked, admit, make_half, report, run, save


def test_what_was_computed_before_a_load_that_fails_is_kept() -> None:
    """Its save is under way as the load is planned, and ends behind it."""
    half, blocks = make_half()
    save(half, Asked("warm", list(range(9))), first_block=40)
    before, hit = Asked("before", [7] * 9), Asked("hit", list(range(9)))
    admit(half, before)
    saves = run(half, before)
    assert admit(half, hit, 10) == 8
    loads = run(half, hit, computed=8)
    report(half, loads, ok=False)
    report(half, saves)
    assert half.get_num_new_matched_tokens(Asked("again", [7] * 9), 0) == (8, False)
    assert half.metrics.failed_save_jobs == 0
    assert blocks.pins() == {}
    half.check()


def test_a_save_that_fails_spoils_no_other() -> None:
    """It brings nothing that anybody computes on."""
    half, blocks = make_half()
    plans = []
    for number in range(2):
        request = Asked(f"r{number}", [number] * 9)
        admit(half, request, 10 * number)
        plans.append(run(half, request))
    report(half, plans[0], ok=False)
    report(half, plans[1])
    assert half.get_num_new_matched_tokens(Asked("failed", [0] * 9), 0) == (0, False)
    assert half.get_num_new_matched_tokens(Asked("saved", [1] * 9), 0) == (8, False)
    assert half.metrics.failed_save_jobs == 1
    assert blocks.pins() == {}
    assert half.host.num_copies == 2, "of what did not come there is no copy"
    save(half, Asked("asks again", [0] * 9), first_block=20)
    assert half.get_num_new_matched_tokens(Asked("failed", [0] * 9), 0) == (8, False), "it is saved like any other"
    half.check()
