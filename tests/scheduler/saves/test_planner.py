"""What is saved where the host is full."""

from __future__ import annotations

from kv_connector.scheduler import SchedulerHalf
from tests.scheduler.test_half import Asked, ForeignBlocks, admit, make_half, report, run, save


def next_to_be_reused(half: SchedulerHalf, blocks: ForeignBlocks, request: Asked, first_block: int) -> int:
    """How many blocks of an ended request are saved now that the engine is about to reuse them."""
    blocks.order = [(first_block + index, request.block_hashes[index]) for index in (1, 0)]
    plan = run(half)
    report(half, plan)
    return sum(job.num_blocks for job in plan.saves)


def test_before_reuse_an_older_block_does_not_push_a_newer_one_off_the_host() -> None:
    """Under write_back, with two host blocks: else what was used last is lost to what was used first."""
    half, blocks = make_half(num_host_blocks=2, write_policy="write_back")
    older, newer = Asked("older", list(range(9))), Asked("newer", list(range(100, 109)))
    for number, request in enumerate((older, newer)):
        admit(half, request, first_block=10 * number)
        run(half, request)
        half.request_finished(request)
    assert next_to_be_reused(half, blocks, newer, 10) == 2
    assert next_to_be_reused(half, blocks, older, 0) == 0
    assert half.get_num_new_matched_tokens(Asked("again", newer.tokens), 0) == (8, False)


def test_a_block_that_is_forgotten_as_room_is_made_for_it_is_not_saved() -> None:
    """Its row of the tree may be another block's next: a copy under that row would be found by another prompt. The
    room that was made is given back."""
    half, blocks = make_half(num_host_blocks=1, write_policy="write_back")
    kept, forgotten = Asked("kept", list(range(5))), Asked("forgotten", list(range(100, 105)))
    for number, request in enumerate((kept, forgotten)):
        admit(half, request, 10 * number)
        run(half, request)
        half.request_finished(request)
    blocks.order = [(0, kept.block_hashes[0])]
    report(half, run(half))
    assert half.host.num_copies == 1
    half.tree.max_remembered = 0  # what is evicted next lets the other be forgotten
    half.tree.touch([node for key in forgotten.block_hashes if (node := half.tree.get(key)) is not None], 1e9)
    blocks.order = [(10, forgotten.block_hashes[0])]
    plan = run(half)
    assert half.tree.get(forgotten.block_hashes[0]) is None
    assert plan.saves == ()
    assert half.host.num_available == half.host.pool.capacity
    half.check()


def test_what_is_computed_anew_behind_a_failed_load_is_saved() -> None:
    """Nothing that the step of the load computed is kept either: the next request hits all of it."""
    half, _ = make_half()
    request = Asked("first", list(range(17)))
    save(half, Asked("before", request.tokens[:8]), 20)
    assert admit(half, request) == 8
    plan = run(half, request, computed=8)
    assert sum(job.num_blocks for job in plan.saves) == 2
    report(half, plan, ok=False, lost_blocks=(0, 1))
    plan = run(half, request)
    assert [job.device_ids.tolist() for job in plan.saves] == [[0, 1, 2, 3]]
    report(half, plan)
    assert half.get_num_new_matched_tokens(Asked("next", request.tokens), 0) == (16, False)
    half.check()


def test_an_idle_engine_does_not_try_a_save_that_failed_again_and_again() -> None:
    """It steps for as long as there is something to save before reuse."""
    half, blocks = make_half(write_policy="write_back")
    request = Asked("r", list(range(9)))
    admit(half, request)
    run(half, request)
    half.request_finished(request)
    blocks.order = [(1, request.block_hashes[1]), (0, request.block_hashes[0])]
    plan = run(half)
    assert plan.saves and half.has_pending_push_work()
    report(half, plan, ok=False)
    assert not half.has_pending_push_work()


def test_what_has_waited_for_room_counts_as_used_when_it_is_saved() -> None:
    """Its request runs: the blocks of one that has ended in between go first."""
    half, _ = make_half(num_host_blocks=1)
    waits, between = Asked("waits", list(range(12))), Asked("between", [9] * 4)
    admit(half, waits)
    plan = run(half, waits)
    assert [job.device_ids.tolist() for job in plan.saves] == [[0]], "there is no room for more"
    report(half, plan, num_host_blocks=2)
    save(half, between, 20)
    report(half, run(half), num_host_blocks=4)
    waits.tokens.append(12)
    plan = run(half, waits, computed=12)
    assert [job.device_ids.tolist() for job in plan.saves] == [[1, 2]]
    report(half, plan)
    save(half, Asked("newcomer", [7] * 4), 40)
    assert half.get_num_new_matched_tokens(Asked("again", waits.tokens), 0) == (12, False)
    assert half.get_num_new_matched_tokens(Asked("gone", [*between.tokens, 0]), 0) == (0, False)
    half.check()
