"""An engine that plans ahead: what a step computes is saved with the next, if it is still what it was."""

from __future__ import annotations

import pytest

from kv_connector.base import ScheduledRequest, SchedulerOutput
from kv_connector.config import Config
from kv_connector.index import BlockGroup
from kv_connector.scheduler import SchedulerHalf
from kv_connector.types import StepPlan, StepReport
from tests.scheduler.test_half import Asked, Clock, ForeignBlocks, admit


def make(policy: str = "write_through", *groups: BlockGroup) -> SchedulerHalf:
    config = Config.from_mapping({"host_memory": 1 << 20, "write_policy": policy, "load_choice": "sync"})
    half = SchedulerHalf(config, 4, clock=Clock(), plans_ahead=True, groups=groups or (BlockGroup(),))
    half.bind_block_pool(ForeignBlocks())
    half.update_connector_output([StepReport(0, 0, num_host_blocks=50)])
    return half


def step(half: SchedulerHalf, *items: ScheduledRequest, preempted: str = "") -> StepPlan:
    return half.build_connector_meta(SchedulerOutput(items, [preempted] if preempted else ()))


def saved(plan: StepPlan) -> list[int]:
    return [block_id for job in plan.saves for block_id in job.device_ids.tolist()]


def test_a_prompt_is_saved_with_the_step_behind_it_and_its_answer_too() -> None:
    half = make()
    request = Asked("a", list(range(9)))
    admit(half, request)
    assert saved(step(half, ScheduledRequest("a", 0, 9))) == []
    request.tokens += [9, 10, 11]
    assert saved(step(half, ScheduledRequest("a", 9, 3))) == [0, 1]
    assert saved(step(half)) == [2]
    assert saved(step(half)) == []
    half.check()


def test_a_request_that_ends_in_between_is_not_saved() -> None:
    half = make()
    request = Asked("a", list(range(9)))
    admit(half, request)
    step(half, ScheduledRequest("a", 0, 9))
    half.request_finished(request)
    assert saved(step(half)) == []
    assert not half.has_pending_push_work()


def test_drafts_in_the_places_of_tokens_that_came_otherwise_are_not_saved() -> None:
    """Seven tokens are known, and drafts fill the second block; then its last token is another one, which the next step
    computes."""
    half = make()
    request = Asked("a", list(range(7)))
    admit(half, request)
    step(half, ScheduledRequest("a", 0, 7 + 3))
    request.tokens += [90]
    assert saved(step(half, ScheduledRequest("a", 7, 1 + 3))) == [0]
    request.tokens += [91]
    assert saved(step(half, ScheduledRequest("a", 8, 1 + 3))) == [1]


@pytest.mark.parametrize("is_told", [True, False])
def test_who_has_lost_the_blocks_and_got_others_is_saved_from_those(is_told: bool) -> None:
    half = make()
    request = Asked("a", list(range(9)))
    admit(half, request)
    step(half, ScheduledRequest("a", 0, 9))
    if is_told:
        assert saved(step(half, preempted="a")) == []
    admit(half, request, first_block=20)
    assert saved(step(half, ScheduledRequest("a", 0, 5))) == []
    assert saved(step(half, ScheduledRequest("a", 5, 4))) == [20], "of the second block not all is computed"
    assert saved(step(half)) == [21]


def test_what_rests_on_a_load_that_failed_is_not_saved() -> None:
    half = make()
    before = Asked("before", list(range(9)))
    admit(half, before, first_block=40)
    step(half, ScheduledRequest("before", 0, 9))
    (save,) = step(half).saves
    half.update_connector_output([StepReport(1, 0, (save.job_id,), num_host_blocks=50)])
    half.request_finished(before)
    request = Asked("a", list(range(17)))
    assert admit(half, request) == 8
    plan = step(half, ScheduledRequest("a", 8, 9))
    (load,) = plan.loads
    told = StepReport(plan.step, 0, failed=(load.job_id,), num_host_blocks=50, lost_blocks=(0, 1))
    half.update_connector_output([told])
    assert saved(step(half)) == [], "blocks 2 and 3 rest on blocks that were never filled"
    half.host.reset()
    step(half, ScheduledRequest("a", 0, 17))
    assert saved(step(half)) == [0, 1, 2, 3], "computed anew"


def test_what_was_computed_before_a_reset_is_not_saved_behind_it() -> None:
    half = make()
    admit(half, Asked("a", list(range(9))))
    step(half, ScheduledRequest("a", 0, 9))
    half.reset_cache()
    assert saved(step(half)) == []


def test_blocks_of_a_window_are_saved_at_once() -> None:
    """A step later it may have left them behind."""
    half = make("write_through", BlockGroup(), BlockGroup(window_blocks=1))
    request = Asked("a", list(range(9)))
    half.get_num_new_matched_tokens(request, 0)
    half.update_state_after_alloc(request, [[0, 1, 2], [3, 4, 5]], 0, 0)
    assert saved(step(half, ScheduledRequest("a", 0, 9))) == [3, 4, 0, 1]


def test_write_back_knows_at_once_what_it_may_have_to_save() -> None:
    half = make("write_back")
    request = Asked("a", list(range(9)))
    admit(half, request)
    blocks = half._pool._blocks
    assert isinstance(blocks, ForeignBlocks)
    blocks.order = [(0, request.block_hashes[0])]
    assert saved(step(half, ScheduledRequest("a", 0, 9))) == [0]
