"""Blocks that steps in flight still write to, after the engine has given them to somebody else."""

from __future__ import annotations

from kv_connector.base import ScheduledRequest, SchedulerOutput
from kv_connector.config import Config
from kv_connector.index import BlockGroup
from kv_connector.scheduler import SchedulerHalf
from kv_connector.scheduler.steps import first_written
from kv_connector.types import CopyJob, StepReport
from tests.scheduler.test_half import Asked, ForeignBlocks, admit, make_half, report, run, save


def background_load(half: SchedulerHalf, device_ids: list[int]) -> CopyJob:
    """The load of a request that is given these blocks, and hits a saved prefix of two."""
    hit = Asked("hit", list(range(9)))
    matched, is_async = half.get_num_new_matched_tokens(hit, 0)
    assert (matched, is_async) == (8, True)
    half.update_state_after_alloc(hit, [device_ids], 0, 8)
    (job,) = half.build_connector_meta(SchedulerOutput()).background_loads
    return job


def schedule(half: SchedulerHalf, request: Asked, computed: int, count: int, new: list[int]) -> int:
    item = ScheduledRequest(request.request_id, computed, count, [new])
    return half.build_connector_meta(SchedulerOutput([item])).step


def reported(half: SchedulerHalf, step: int) -> None:
    half.update_connector_output([StepReport(step, 0, num_host_blocks=50)])


def test_where_drafts_may_be_rejected_the_block_of_the_last_known_token_is_guarded() -> None:
    """An engine that plans ahead with four drafts believes all of them accepted: it plans a step from position 7 on,
    which writes from position 3 on, in the first block. The request ends before that step has run."""
    half, _ = make_half(num_host_blocks=50, load_choice="async")
    save(half, Asked("warm", list(range(9))), first_block=40)
    request = Asked("drafts", [100])
    half.get_num_new_matched_tokens(request, 0)
    half.update_state_after_alloc(request, [[0]], 0, 0)
    schedule(half, request, 0, 1, [1])
    reported(half, schedule(half, request, 1, 5, [2]) - 1)
    request.tokens.append(1)
    reported(half, schedule(half, request, 6, 5, [3]) - 1)
    request.tokens.append(2)
    reported(half, schedule(half, request, 7, 5, []) - 1)
    half.request_finished(request)
    job = background_load(half, [0, 50, 51])
    assert job.device_ids.tolist() == [50, 0], "the block that is free is filled at once"
    assert job.num_guarded == 1


def test_a_step_may_write_the_block_of_the_last_known_token_and_none_in_front_of_it() -> None:
    """Whose tokens are counted as computed, all of them and drafts, computes the last one of them at least."""
    assert [first_written(num_computed_tokens, 8) // 4 for num_computed_tokens in (0, 3, 4, 7, 8, 12)] == [
        0,
        0,
        1,
        1,
        1,
        1,
    ]
    assert first_written(12, 9) // 4 == 2
    assert first_written(0, 0) == 0


def test_a_step_is_in_flight_until_every_rank_has_reported_the_next() -> None:
    half, _ = make_half(num_host_blocks=50, world_size=2, load_choice="async")
    warm = Asked("warm", list(range(9)))
    admit(half, warm, 40)
    plan = run(half, warm)
    for rank in (0, 1):
        report(half, plan, rank=rank)
    half.request_finished(warm)
    request = Asked("writes", list(range(100, 120)))
    admit(half, request)
    run(half, request)
    behind = Asked("behind", list(range(200, 203)))
    admit(half, behind, 30)
    step = run(half, behind).step
    half.update_connector_output([StepReport(step, 0, num_host_blocks=50)])
    half.request_finished(request)
    assert background_load(half, [0, 1, 2]).num_guarded == 2, "rank 1 may still compute the step"


def decoding() -> tuple[SchedulerHalf, Asked]:
    """A request has computed its prompt in blocks 0 to 2; steps are in flight that read all of them for it, and write
    to the last."""
    half, _ = make_half(num_host_blocks=50, load_choice="async", write_policy="write_back")
    half.pin_prefix(Asked("warm", list(range(8))).block_hashes, are_given=False)
    save(half, Asked("warm", list(range(9))), first_block=40)
    request = Asked("again", list(range(100, 109)))
    admit(half, request)
    reported(half, run(half, request).step)
    for computed in (9, 10):
        request.tokens.append(1)
        step = run(half, request, computed=computed).step
    reported(half, step - 1)
    return half, request


def test_blocks_that_a_step_reads_for_a_preempted_request_are_guarded() -> None:
    """What the device computes for it in a step that was planned before counts."""
    half, request = decoding()
    half.build_connector_meta(SchedulerOutput((), {request.request_id}))
    assert background_load(half, [0, 1, 50]).num_guarded == 2


def test_blocks_of_a_request_that_was_preempted_in_silence_are_guarded() -> None:
    """An engine that resets its running requests admits them again without a word about their old blocks."""
    half, request = decoding()
    half.update_state_after_alloc(request, [[20, 21, 22]], 0, 0)
    assert background_load(half, [0, 1, 50]).num_guarded == 2


def test_a_step_without_requests_does_not_end_the_drafts_of_the_one_before() -> None:
    """It is reported at once, while the device may still run the drafter of the step in front of it."""
    half, _ = make_half(num_host_blocks=50, load_choice="async")
    save(half, Asked("warm", list(range(9))), first_block=40)
    request = Asked("writes", list(range(100, 120)))
    admit(half, request)
    report(half, run(half, request))
    reported(half, half.build_connector_meta(SchedulerOutput()).step)
    half.request_finished(request)
    assert background_load(half, [0, 1, 2]).num_guarded == 2


def test_blocks_of_every_group_that_a_step_writes_are_guarded() -> None:
    """The request ends, and a load in the background is given a block of its window that the step still writes."""
    config = Config.from_mapping({"host_memory": 1 << 20, "write_policy": "write_through", "load_choice": "async"})
    groups = (BlockGroup(), BlockGroup(window_blocks=1))
    half = SchedulerHalf(config, 4, groups=groups, fails_by_block=False)  # it waits for every load, by request
    half.bind_block_pool(ForeignBlocks())
    reported(half, 0)
    warm = Asked("warm", list(range(9)))
    half.update_state_after_alloc(warm, [[40, 41, 42], [50, 51, 52]], 0, 0)
    report(half, run(half, warm))
    half.request_finished(warm)
    writes = Asked("writes", list(range(100, 109)))
    half.get_num_new_matched_tokens(writes, 0)
    half.update_state_after_alloc(writes, [[0, 1, 2], [10, 11, 12]], 0, 0)
    run(half, writes)
    half.request_finished(writes)
    hit = Asked("hit", list(range(9)))
    assert half.get_num_new_matched_tokens(hit, 0) == (8, True)
    half.update_state_after_alloc(hit, [[30, 31, 32], [33, 11, 34]], 0, 8)
    (job,) = half.build_connector_meta(SchedulerOutput()).background_loads
    assert job.device_ids.tolist() == [30, 31, 11]
    assert job.num_guarded == 1


def test_blocks_that_a_step_writes_are_guarded_whatever_tokens_they_have() -> None:
    """Blocks of 4 and of 8 tokens: a request goes on behind its first 8, and ends; a load in the background is given
    the block of each group that the step still writes, and one of each that it does not."""
    config = Config.from_mapping({"host_memory": 1 << 20, "write_policy": "write_through", "load_choice": "async"})
    groups = (BlockGroup(), BlockGroup(hashes_per_block=2))
    half = SchedulerHalf(config, 4, groups=groups, fails_by_block=False)
    half.bind_block_pool(ForeignBlocks())
    reported(half, 0)
    warm = Asked("warm", list(range(17)))
    half.update_state_after_alloc(warm, [[40, 41, 42, 43, 44], [50, 51, 52]], 0, 0)
    report(half, run(half, warm))
    half.request_finished(warm)
    writes = Asked("writes", list(range(100, 111)))
    half.update_state_after_alloc(writes, [[0, 1, 2], [10, 11]], 8, 0)
    run(half, writes, computed=8)
    half.request_finished(writes)
    hit = Asked("hit", list(range(17)))
    assert half.get_num_new_matched_tokens(hit, 0) == (16, True)
    half.update_state_after_alloc(hit, [[1, 2, 30, 31, 32], [11, 10, 33]], 0, 16)
    (job,) = half.build_connector_meta(SchedulerOutput()).background_loads
    assert sorted(job.device_ids.tolist()[: -job.num_guarded]) == [1, 10, 30, 31]
    assert sorted(job.device_ids.tolist()[-job.num_guarded :]) == [2, 11]


def test_a_block_that_has_left_its_window_by_drafts_in_flight_is_not_saved() -> None:
    """The engine counts the drafts as computed, and has given the block to another request of the same step."""
    config = Config.from_mapping({"host_memory": 1 << 20, "write_policy": "write_through"})
    half = SchedulerHalf(config, 4, groups=(BlockGroup(), BlockGroup(window_blocks=1)))
    half.bind_block_pool(ForeignBlocks())
    reported(half, 0)
    request = Asked("drafts", list(range(7)))
    half.update_state_after_alloc(request, [[0, 1, 2], [10, 11, 12]], 0, 0)
    item = ScheduledRequest("drafts", 0, 7, [[], []])
    (first,) = half.build_connector_meta(SchedulerOutput([item])).saves
    assert sorted(first.device_ids.tolist()) == [0, 10]
    request.tokens.append(7)
    item = ScheduledRequest("drafts", 10, 2, [[], []])
    (second,) = half.build_connector_meta(SchedulerOutput([item])).saves
    assert second.device_ids.tolist() == [1], "and 11 may be anybody's"
