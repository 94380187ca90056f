"""What is asked of other engines, and when it is let go of."""

from __future__ import annotations

import pytest

from kv_connector.base import SchedulerOutput
from kv_connector.scheduler import SchedulerHalf
from kv_connector.types import PeerAction, StepReport
from tests.scheduler.test_fence import Continued
from tests.scheduler.test_half import Asked, ForeignBlocks, admit, make_half, run, save


def asking() -> tuple[SchedulerHalf, ForeignBlocks, Continued]:
    """A request was admitted that is to receive four blocks; nothing is planned yet."""
    half, blocks = make_half(peer={"secret": "x" * 20, "role": "consumer"})
    request = Continued("r", list(range(18)))
    assert admit(half, request) == 16
    assert blocks.pins() == {0: 1, 1: 1, 2: 1, 3: 1}
    return half, blocks, request


def test_a_request_that_ends_before_it_has_asked_wants_nothing() -> None:
    """The other engine hears of it, and need not hold its blocks until their deadline."""
    half, blocks, request = asking()
    half.request_finished(request)
    assert blocks.pins() == {}
    (job,) = run(half).peer
    assert (job.action, job.num_blocks, job.request_id) == (PeerAction.RECEIVE, 0, None)


@pytest.mark.parametrize("ends_first", [False, True])
def test_of_a_prompt_without_a_whole_block_the_other_engine_hears_nothing(ends_first: bool) -> None:
    """It offers nothing of one, so it would remember for nothing that nothing is wanted."""
    half, blocks = make_half(peer={"secret": "x" * 20, "role": "consumer"})
    request = Continued("short", list(range(4)))
    if not ends_first:
        assert admit(half, request) == 0
        assert run(half, request).peer == ()
    half.request_finished(request)
    assert run(half).peer == ()
    assert blocks.pins() == {}


def test_what_is_on_its_way_to_blocks_that_were_lost_is_called_off() -> None:
    """And its blocks stay pinned until every rank has said that nothing writes to them any more."""
    half, blocks, _ = asking()
    (job,) = run(half).peer
    plan = half.build_connector_meta(SchedulerOutput((), {"r"}))
    assert plan.cancelled_peer == (job.job_id,)
    assert len(blocks.pins()) == 4


def test_what_is_on_its_way_at_a_reset_is_called_off() -> None:
    """It was computed before, there as here."""
    half, _, _ = asking()
    (job,) = run(half).peer
    half.reset_cache()
    assert run(half).cancelled_peer == (job.job_id,)


def waiting_for_both() -> tuple[SchedulerHalf, Continued, int, int]:
    """A request waits for two blocks of the host and two of another engine; with their jobs."""
    half, _ = make_half(load_choice="async", peer={"secret": "x" * 20, "role": "consumer"})
    save(half, Asked("warm", list(range(9))), first_block=40)
    request = Continued("r", list(range(18)))
    assert admit(half, request) == 16
    plan = run(half)
    return half, request, plan.background_loads[0].job_id, plan.peer[0].job_id


def end(half: SchedulerHalf, job_id: int, ok: bool) -> None:
    done, failed = ((job_id,), ()) if ok else ((), (job_id,))
    half.update_connector_output([StepReport(half._step, 0, done, failed, num_host_blocks=10)])


def test_a_reset_is_not_done_while_a_request_waits_whose_host_blocks_came() -> None:
    """What the other engine was to send has not come: an engine may keep what is in front of it, as old as it is."""
    half, request, load, receive = waiting_for_both()
    end(half, load, ok=True)
    end(half, receive, ok=False)
    assert not half.reset_cache()
    half.update_state_after_alloc(request, [[0, 1, 2, 3, 4]], 8, 0)
    assert half.reset_cache()


def fail(half: SchedulerHalf, number: int, transfer_id: str = "t") -> None:
    """A request whose blocks do not come."""
    request = Continued(f"r{number}", list(range(18)))
    request.kv_transfer_params |= {"transfer_id": transfer_id}
    assert admit(half, request) == 16
    plan = run(half)
    (job,) = plan.peer
    half.update_connector_output([StepReport(plan.step, 0, failed=(job.job_id,))])
    half.request_finished(request)


def test_a_dead_engine_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    half, _ = make_half(peer={"secret": "x" * 20, "role": "consumer"})
    for number in range(5):
        fail(half, number, f"t{number}")
    assert half.metrics.failed_receive_jobs == 5
    (record,) = caplog.records
    assert "KV transfers do not come, their blocks are computed here ('t0', 4 blocks)" in record.getMessage()


@pytest.mark.parametrize("name", ["transfer_id", "remote_host"])
def test_what_a_request_says_cannot_begin_a_line_of_the_log(name: str, caplog: pytest.LogCaptureFixture) -> None:
    half, _ = make_half(peer={"secret": "x" * 20, "role": "consumer"})
    request = Continued("r", list(range(18)))
    request.kv_transfer_params |= {name: "t\nCRITICAL all is lost\r\x1b[2J\u2028"}
    assert admit(half, request) == 16
    plan = run(half)
    (job,) = plan.peer
    half.update_connector_output([StepReport(plan.step, 0, failed=(job.job_id,))])
    (record,) = caplog.records
    assert "t\\nCRITICAL all is lost\\r\\x1b[2J\\u2028" in record.getMessage().replace("\\\\", "\\")
    assert record.getMessage().isprintable()


def test_where_a_rank_cannot_reach_others_any_more_nothing_is_promised() -> None:
    """Its peer thread has broken: who is admitted from the next report on is computed."""
    half, _ = make_half(world_size=2, peer={"secret": "x" * 20, "role": "consumer"})
    first, second = Continued("first", list(range(18))), Continued("second", list(range(18)))
    assert half.get_num_new_matched_tokens(first, 0)[0] == 16
    broken = StepReport(half._step, 1, num_host_blocks=10, peers_are_broken=True)
    half.update_connector_output([StepReport(half._step, 0, num_host_blocks=10), broken])
    assert half.get_num_new_matched_tokens(second, 0)[0] == 0
    half.update_connector_output([StepReport(half._step, rank, num_host_blocks=10) for rank in range(2)])
    assert admit(half, second) == 0


def test_who_wants_nothing_names_the_prompt() -> None:
    """Else any engine that guesses an id could end a transfer to another one."""
    half, _, request = asking()
    half.request_finished(request)
    (job,) = run(half).peer
    other, _, whole = asking()
    (wanted,) = run(other, whole).peer
    assert job.names == wanted.names and len(job.names) == 32
