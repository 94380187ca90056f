"""After a reset nothing that was computed before is matched, whatever was under way."""

from __future__ import annotations

import pytest

from kv_connector.base import SchedulerOutput
from kv_connector.config import Config
from kv_connector.index import BlockGroup
from kv_connector.scheduler import SchedulerHalf
from kv_connector.types import NO_BLOCK, StepReport
from tests.scheduler.test_half import Asked, ForeignBlocks, admit, make_half, report, run, save


def test_what_a_live_request_computed_before_a_reset_is_not_saved_after_it() -> None:
    """Its blocks were waiting for room, which comes after the reset: with new weights they would be matched as old."""
    half, _ = make_half(num_host_blocks=3)
    other = Asked("other", list(range(50, 62)))
    admit(half, other, 30)
    plan_of_other = run(half, other)
    request = Asked("old", list(range(12)))
    admit(half, request)
    assert run(half, request).saves == (), "the host is leased"
    assert half.reset_cache()
    report(half, plan_of_other)
    half.request_finished(other)
    request.tokens.append(12)
    assert run(half, request, computed=12).saves == ()
    request.tokens += [13, 14, 15, 16]
    assert run(half, request, computed=13).saves == (), "what it computes rests on the old blocks"
    half.request_finished(request)
    again = Asked("again", list(range(12)))
    admit(half, again, 60)
    report(half, run(half, again))
    assert half.get_num_new_matched_tokens(Asked("hit", list(range(13))), 0) == (12, False), "new blocks are cached"
    half.check()


def test_what_waits_for_room_at_a_reset_is_not_counted_as_lost() -> None:
    """Nobody wants it any more."""
    half, _ = make_half(num_host_blocks=1)
    request = Asked("a", list(range(12)))
    admit(half, request)
    assert [job.device_ids.tolist() for job in run(half, request).saves] == [[0]], "there is no room for more"
    half.reset_cache()
    half.request_finished(request)
    assert half.get_kv_connector_stats()["dropped_saves_blocks"] == 0


def test_a_request_that_begins_anew_after_a_reset_is_saved() -> None:
    half, _ = make_half()
    request = Asked("a", list(range(12)))
    admit(half, request)
    report(half, run(half, request))
    half.reset_cache()
    half.update_state_after_alloc(request, [[20, 21, 22]], 0, 0)
    assert [job.device_ids.tolist() for job in run(half, request).saves] == [[20, 21, 22]]


def test_a_request_that_begins_anew_in_the_blocks_that_it_had_is_saved() -> None:
    """It computes them again: the device had nothing of it."""
    half, _ = make_half()
    request = Asked("a", list(range(12)))
    admit(half, request)
    report(half, run(half, request))
    half.reset_cache()
    half.update_state_after_alloc(request, [[0, 1, 2]], 0, 0)
    assert [job.device_ids.tolist() for job in run(half, request).saves] == [[0, 1, 2]]


@pytest.mark.parametrize("num_computed", [11, 3])
def test_a_session_that_goes_on_after_a_reset_saves_nothing_that_rests_on_its_old_blocks(num_computed: int) -> None:
    """Its next input comes as an admission with the blocks that it has kept, and nobody looks it up."""
    half, _ = make_half()
    session = Asked("session", list(range(num_computed)))
    admit(half, session)
    report(half, run(half, session))
    assert half.reset_cache()
    session.tokens += list(range(50, 63 - num_computed))
    for _ in range(2):
        num_before = session.num_tokens
        session.tokens += list(range(70, 74))
        blocks = list(range(-(-session.num_tokens // 4)))
        half.update_state_after_alloc(session, [blocks], num_before, 0)
        assert run(half, session, computed=num_before).saves == ()
    assert half.get_num_new_matched_tokens(Asked("other", session.tokens), 0) == (0, False)
    half.request_finished(session)
    half.check()


def test_a_session_whose_window_has_slid_goes_on_after_a_reset() -> None:
    """The engine names no block for what has left the window: the others are those of before."""
    config = Config.from_mapping({"host_memory": 1 << 20, "write_policy": "write_through"})
    half = SchedulerHalf(config, 4, groups=(BlockGroup(), BlockGroup(window_blocks=1)))
    half.bind_block_pool(ForeignBlocks())
    half.update_connector_output([StepReport(0, 0, num_host_blocks=20)])
    session = Asked("session", list(range(9)))
    half.update_state_after_alloc(session, [[0, 1, 2], [10, 11, 12]], 0, 0)
    report(half, run(half, session))
    assert half.reset_cache()
    session.tokens += list(range(9, 14))
    half.update_state_after_alloc(session, [[0, 1, 2, 3], [NO_BLOCK, NO_BLOCK, 12, 13]], 9, 0)
    assert run(half, session, computed=9).saves == ()
    assert half.get_num_new_matched_tokens(Asked("other", session.tokens), 0) == (0, False)
    half.check()


def test_a_session_that_goes_on_has_lost_nothing() -> None:
    """Each input's blocks are saved once, and no save that waits is given up."""
    half, _ = make_half(num_host_blocks=3)
    session = Asked("session", list(range(10)))
    admit(half, session)
    plan = run(half, session)
    assert [job.device_ids.tolist() for job in plan.saves] == [[0, 1]]
    report(half, plan)
    session.tokens += list(range(10, 17))
    half.update_state_after_alloc(session, [[0, 1, 2, 3, 4]], 10, 0)
    plan = run(half, session, computed=10)
    assert [job.device_ids.tolist() for job in plan.saves] == [[2]], "there is no room for more"
    report(half, plan, num_host_blocks=8)
    session.tokens += [17]
    half.update_state_after_alloc(session, [[0, 1, 2, 3, 4]], 17, 0)
    assert [job.device_ids.tolist() for job in run(half, session, computed=17).saves] == [[3]]
    assert half.metrics.dropped_saves_blocks == 0
    half.check()


def test_a_reset_is_not_done_while_a_load_brings_what_was_cached() -> None:
    """The engine caches on the device what the load brings; when the request is scheduled, it is not saved either."""
    half, _ = make_half(load_choice="async")
    save(half, Asked("warm", list(range(9))), first_block=40)
    request = Asked("hit", list(range(9)))
    assert admit(half, request) == 8
    (load,) = run(half).background_loads
    assert not half.reset_cache()
    half.update_connector_output([StepReport(half._step, 0, (load.job_id,), num_host_blocks=10)])
    half.update_state_after_alloc(request, [[0, 1, 2]], 8, 0)
    assert run(half, request, computed=8).saves == ()
    assert half.reset_cache()
    assert half.get_num_new_matched_tokens(Asked("new", list(range(9))), 0) == (0, False)


def test_a_reset_is_done_beside_a_load_that_a_step_waits_for() -> None:
    """An engine that plans ahead resets while it is under way, and has taken the blocks from the request before."""
    half, _ = make_half(load_choice="sync")
    save(half, Asked("warm", list(range(9))), first_block=40)
    request = Asked("hit", list(range(9)))
    assert admit(half, request) == 8
    assert run(half, request, computed=8).loads
    assert half.reset_cache()


def test_a_reset_does_not_wait_for_a_load_of_blocks_that_were_lost() -> None:
    half, _ = make_half(load_choice="async")
    save(half, Asked("warm", list(range(9))), first_block=40)
    admit(half, Asked("hit", list(range(9))))
    run(half)
    assert not half.reset_cache()
    half.build_connector_meta(SchedulerOutput((), {"hit"}))
    assert half.reset_cache()


def test_a_reset_does_not_wait_for_a_load_that_the_engine_did_not_take() -> None:
    """It was offered one in the background, and computes the prompt."""
    half, _ = make_half(load_choice="async")
    save(half, Asked("warm", list(range(9))), first_block=40)
    request = Asked("hit", list(range(9)))
    assert half.get_num_new_matched_tokens(request, 0) == (8, True)
    half.update_state_after_alloc(request, [[0, 1, 2]], 0, 0)
    run(half, request)
    assert half.reset_cache()


def test_what_is_computed_in_other_blocks_behind_a_reset_is_saved() -> None:
    """A load of before it has failed, and the engine has given its request others."""
    half, _ = make_half(load_choice="async")
    save(half, Asked("warm", list(range(9))), first_block=40)
    request = Asked("a", list(range(9)))
    assert half.get_num_new_matched_tokens(request, 0) == (8, True)
    half.update_state_after_alloc(request, [[0, 1, 2]], 0, 8)
    plan = run(half)
    assert not half.reset_cache()
    (job,) = plan.background_loads
    half.update_connector_output([StepReport(plan.step, 0, (), (job.job_id,), num_host_blocks=10)])
    assert half.reset_cache(), "an engine that is to sleep admits the request when it is awake again"
    assert half.get_num_new_matched_tokens(request, 0) == (0, False)
    half.update_state_after_alloc(request, [[10, 11, 12]], 0, 0)
    assert [job.device_ids.tolist() for job in run(half, request).saves] == [[10, 11]]
