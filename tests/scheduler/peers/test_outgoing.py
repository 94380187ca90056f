"""What is offered to other engines, and when it is let go of: preemption, resets, steps that rest on a failed load."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest

from integration.mini_engine.request import EngineRequest
from integration.mini_engine.scheduler import Scheduler, Step
from kv_connector.base import ScheduledRequest, SchedulerOutput
from kv_connector.scheduler import SchedulerHalf
from kv_connector.types import PeerAction, StepPlan, StepReport
from tests.scheduler.peers import test_companion
from tests.scheduler.peers.test_companion import DECODE, Engine, prompt_of
from tests.scheduler.test_half import Asked, ForeignBlocks, admit, make_half, save


@dataclass
class Prompted(Asked):
    """A request that another engine is to continue."""

    kv_transfer_params: dict[str, Any] = field(default_factory=lambda: dict(DECODE))


def producer(**settings: object) -> tuple[SchedulerHalf, ForeignBlocks]:
    return make_half(peer={"secret": "x" * 20, "role": "producer"}, **settings)


def step(half: SchedulerHalf, *items: tuple[str, int, int], preempted: tuple[str, ...] = ()) -> StepPlan:
    scheduled = [ScheduledRequest(*item) for item in items]
    return half.build_connector_meta(SchedulerOutput(scheduled, preempted))


def sends(plan: StepPlan) -> list[tuple[int, list[int], bool]]:
    """(first block, device blocks, whether the names come with it) of each."""
    return [(j.first, j.device_ids.tolist(), bool(j.names)) for j in plan.peer if j.action is PeerAction.SEND]


def report(half: SchedulerHalf, plan: StepPlan, *failed: int) -> None:
    """All jobs of the plan end, those named by position among its peer jobs as failed."""
    bad = tuple(plan.peer[position].job_id for position in failed)
    good = [job.job_id for job in (*plan.loads, *plan.saves, *plan.peer) if job.job_id not in bad]
    half.update_connector_output([StepReport(plan.step, 0, tuple(good), bad, num_host_blocks=10)])


class Chunked(Scheduler):
    """As vLLM's long_prefill_token_threshold: no request takes more than eight tokens of a step."""

    def _schedule_running(self, request: EngineRequest, budget: int, step: Step) -> int:
        return super()._schedule_running(request, min(budget, 8), step)

    def _admit(self, request: EngineRequest, budget: int, step: Step) -> int | None:
        return super()._admit(request, min(budget, 8), step)


def test_two_prompts_that_do_not_fit_side_by_side_are_both_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has 40 blocks, of 60. What is offered of the one that is preempted is let go of: else both stand still.
    Nobody asks for the first, so that its blocks are held until their deadline."""
    monkeypatch.setattr(test_companion, "Scheduler", Chunked)
    seconds = itertools.count()
    engine = Engine(num_blocks=60, write_policy="write_through", clock=lambda: float(next(seconds)))
    first, second = (engine.add(prompt_of(160, seed), 1, DECODE) for seed in (1, 2))
    for _ in range(200):
        engine.engine.step()
    assert first.is_finished and second.is_finished
    assert engine.engine.scheduler.num_preemptions > 0
    engine.engine.shutdown()


def test_a_preempted_prompt_is_offered_anew_with_its_names() -> None:
    half, blocks = producer()
    request = Prompted("r", list(range(20)))
    half.update_state_after_alloc(request, [[0, 1, 2, 3, 4]], 0, 0)
    before = step(half, ("r", 0, 12))
    assert sends(before) == [(0, [0, 1, 2], True)]
    lost = step(half, preempted=("r",))
    assert (lost.suspended, lost.withdrawn) == (("r",), ())
    report(half, before, 0)
    half.update_state_after_alloc(request, [[10, 11, 12, 13, 14]], 0, 0)
    after = step(half, ("r", 0, 20))
    assert sends(after) == [(0, [10, 11, 12, 13], True)]
    _, params = half.request_finished(request)
    assert params is not None
    report(half, after)
    assert blocks.pins() == {}


@pytest.mark.parametrize("is_preempted", [True, False])
def test_of_a_request_that_ends_before_it_is_admitted_nobody_waits_for_anything(is_preempted: bool) -> None:
    """Another engine may have asked for it already: it is aborted while it waits, or waits again."""
    half, _ = producer()
    request = Prompted("r", list(range(20)))
    if is_preempted:
        half.update_state_after_alloc(request, [[0, 1, 2, 3, 4]], 0, 0)
        step(half, ("r", 0, 12))
        step(half, preempted=("r",))
    half.abort_transfer("r")
    assert half.request_finished(request) == (False, None)
    assert half.has_pending_push_work()
    assert step(half).withdrawn == ("r",)


@pytest.mark.parametrize("offered", [0, 12])
def test_a_reset_withdraws_what_is_offered_and_what_would_be(offered: int) -> None:
    """Also of a request that was admitted and has offered nothing yet; no block stays pinned for it."""
    half, blocks = producer(write_policy="write_back")
    request = Prompted("r", list(range(20)))
    half.update_state_after_alloc(request, [[0, 1, 2, 3, 4]], 0, 0)
    plans = [step(half, ("r", 0, offered))] if offered else []
    assert half.reset_cache() == (not offered), "a rank may send what was offered until it hears of the reset"
    plans.append(step(half, ("r", offered, 20 - offered)))
    assert plans[-1].withdrawn == ("r",)
    assert not sends(plans[-1])
    assert half.request_finished(request) == (False, None)
    for plan in plans:
        report(half, plan, *range(len(plan.peer)))
    assert blocks.pins() == {}
    assert half.reset_cache()


def test_what_was_loaded_before_a_reset_is_not_offered_behind_it() -> None:
    half, _ = producer(load_choice="async", write_policy="write_through")
    save(half, Asked("warm", list(range(20))), first_block=40)
    request = Prompted("r", list(range(20)))
    matched, _ = half.get_num_new_matched_tokens(request, 0)
    half.update_state_after_alloc(request, [[0, 1, 2, 3, 4]], 0, matched)
    (load,) = step(half).background_loads
    half.reset_cache()
    half.update_connector_output([StepReport(half._step, 0, (load.job_id,), num_host_blocks=10)])
    half.update_state_after_alloc(request, [[0, 1, 2, 3, 4]], matched, 0)
    assert not sends(step(half, ("r", matched, 20 - matched)))


def test_a_send_behind_a_load_that_failed_withdraws_the_whole_prompt() -> None:
    """One rank's load fails in the step in front. Its own send fails with it; another rank's has been pushed."""
    half, _ = producer(world_size=2, load_choice="sync", write_policy="write_through")
    warm = Asked("warm", list(range(9)))
    half.update_state_after_alloc(warm, [[40, 41, 42]], 0, 0)
    plan = step(half, ("warm", 0, 9))
    for rank in (0, 1):
        jobs = tuple(job.job_id for job in plan.saves)
        half.update_connector_output([StepReport(plan.step, rank, jobs, num_host_blocks=10)])
    half.request_finished(warm)
    request = Prompted("r", list(range(20)))
    matched, _ = half.get_num_new_matched_tokens(request, 0)
    half.update_state_after_alloc(request, [[0, 1, 2, 3, 4]], 0, matched)
    loading = step(half, ("r", 8, 4))
    behind = step(half, ("r", 12, 8))
    assert behind.reported_step < loading.step, "planned before the engine could know"
    load, send = loading.loads[0].job_id, behind.peer[0].job_id
    half.update_connector_output([StepReport(loading.step, 0, failed=(load,), num_host_blocks=10)])
    half.update_connector_output([StepReport(loading.step, 1, (load,), num_host_blocks=10)])
    for rank in (0, 1):
        half.update_connector_output([StepReport(behind.step, rank, (send,), num_host_blocks=10)])
    assert step(half).withdrawn == ("r",), "no rank may be asked for the rest"


def test_two_requests_that_name_one_transfer_offer_the_first_of_them() -> None:
    """And both end, in any order."""
    half, blocks = producer()
    first, second = (Prompted(name, list(range(20)), kv_transfer_params=DECODE | {"transfer_id": "t"}) for name in "ab")
    half.update_state_after_alloc(first, [[0, 1, 2, 3, 4]], 0, 0)
    half.update_state_after_alloc(second, [[10, 11, 12, 13, 14]], 0, 0)
    plan = step(half, ("a", 0, 20), ("b", 0, 20))
    assert sends(plan) == [(0, [0, 1, 2, 3], True)]
    assert half.request_finished(second)[1] is None
    params = half.request_finished(first)[1]
    assert params is not None and params["transfer_id"] == "t"
    report(half, plan)
    assert blocks.pins() == {}
    assert step(half).withdrawn == ()


@pytest.mark.parametrize("is_sent_first", [False, True])
def test_a_transfer_that_is_done_is_over_before_its_deadline(is_sent_first: bool) -> None:
    """Whether its request ends before the last block was sent or after it."""
    half, blocks = make_half(peer={"secret": "x" * 20, "role": "producer", "deadline_ms": 1000})
    request = Prompted("r", list(range(20)))
    half.update_state_after_alloc(request, [[0, 1, 2, 3, 4]], 0, 0)
    plan = step(half, ("r", 0, 20))
    if is_sent_first:
        report(half, plan)
    assert half.request_finished(request)[1] is not None
    if not is_sent_first:
        report(half, plan)
    assert blocks.pins() == {}
    for _ in range(3):  # a second each
        assert step(half).withdrawn == ()
    assert half.metrics.expired_transfers == 0


def test_requests_that_nobody_continues_are_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    half, _ = make_half(peer={"secret": "x" * 20, "role": "producer", "deadline_ms": 1000})
    for number in range(3):
        request = Prompted(f"r{number}", list(range(20)))
        request.kv_transfer_params |= {"transfer_id": f"t{number}\nforged"}
        half.update_state_after_alloc(request, [[0, 1, 2, 3, 4]], 0, 0)
        step(half, (request.request_id, 0, 20))
        assert half.request_finished(request)[1] is not None
    for _ in range(3):  # a second each
        step(half)
    assert half.metrics.expired_transfers == 3
    (record,) = caplog.records
    assert "nobody asked for KV transfers in time" in record.getMessage()
    assert record.getMessage().isprintable()


def test_where_a_rank_cannot_reach_others_any_more_nothing_is_offered() -> None:
    half, _ = producer()
    half.update_connector_output([StepReport(half._step, 0, num_host_blocks=10, peers_are_broken=True)])
    request = Prompted("r", list(range(18)))
    half.get_num_new_matched_tokens(request, 0)
    half.update_state_after_alloc(request, [[0, 1, 2, 3, 4]], 0, 0)
    assert sends(step(half, ("r", 0, 18))) == []
    assert half.request_finished(request) in (None, (False, None))


def test_who_continues_a_prompt_is_told_its_hints() -> None:
    half, _ = producer()
    hints = {"do_not_cache": True, "x": 1}
    for request_id, params in (("plain", DECODE), ("private", DECODE | {"cache": hints})):
        request = Prompted(request_id, list(range(20)), kv_transfer_params=params)
        admit(half, request)
        step(half, (request_id, 0, 20))
        _, told = half.request_finished(request)
        assert told is not None and told["do_remote_prefill"]
        assert told.get("cache") == params.get("cache")
