"""When host blocks go to storage: plans read, and reports written, by hand."""

from __future__ import annotations

import pytest

from kv_connector.scheduler import SchedulerHalf
from kv_connector.scheduler.storage.reading import LOST_SECONDS
from kv_connector.types import StepPlan, StepReport, StorageAction
from tests.scheduler.storage.test_companion import (
    PROMPT,
    arrive,
    compute,
    drain,
    fetch,
    make_half,
    prompt,
    report,
    step,
)
from tests.scheduler.test_half import Asked, admit, run, save


def run_new(half: SchedulerHalf, request: Asked) -> StepPlan:
    """The step of a request that storage knows nothing of."""
    report(half, [arrive(half, request)], found=0)
    admit(half, request)
    return run(half, request)


def saved(half: SchedulerHalf, plan: StepPlan) -> None:
    """The step's saves have arrived on the host."""
    half.update_connector_output([StepReport(plan.step, 0, tuple(j.job_id for j in plan.saves), num_host_blocks=100)])


def test_saves_are_backed_up_and_the_queue_has_an_end() -> None:
    half, _, _ = make_half(max_backup_blocks=7)
    compute(half, Asked("a", PROMPT))
    (job,) = step(half)
    assert (job.action, job.num_blocks) == (StorageAction.BACK_UP, 7)
    assert half.has_pending_push_work()
    assert half.get_kv_connector_stats()["dropped_backups_blocks"] == 3
    assert all(half.host.pool.refs(block_id) == 1 for block_id in job.host_ids.tolist()), "leased until it is written"
    report(half, failed=[job])
    assert not half.has_pending_push_work()
    assert half.get_kv_connector_stats()["failed_backup_jobs"] == 1
    compute(half, Asked("b", [7] * 13))
    drain(half)
    assert half.get_kv_connector_stats()["backed_up_blocks"] == 3
    assert not [b for b in half.host.pool.live_ids() if half.host.pool.refs(b)]


def test_on_eviction_a_block_is_written_when_it_is_next_to_go() -> None:
    half, _, _ = make_half(num_host_blocks=80, backup="on_eviction")  # ten blocks are watched
    for number in range(7):
        compute(half, Asked(f"r{number}", prompt(number)))
        assert step(half) == ()
    compute(half, Asked("r7", prompt(7)))
    (job,) = step(half)
    assert set(job.split_keys()) == set(arrive(make_half()[0], Asked("x", prompt(0))).split_keys()), "the oldest"
    report(half, [job])
    assert step(half) == () and not half.has_pending_push_work(), "an idle engine need not go on"
    for number in range(8, 12):
        compute(half, Asked(f"r{number}", prompt(number)))
        (job,) = step(half)
        report(half, [job])
    stats = half.get_kv_connector_stats()
    assert (stats["backed_up_blocks"], stats["dropped_backups_blocks"], stats["host_evicted_blocks"]) == (50, 0, 40)
    half.check()


def test_on_eviction_what_goes_before_it_is_written_is_counted() -> None:
    half, _, _ = make_half(num_host_blocks=15, backup="on_eviction")  # two blocks are watched
    for number in range(2):
        compute(half, Asked(f"r{number}", prompt(number)))
    drain(half)
    stats = half.get_kv_connector_stats()
    assert stats["host_evicted_blocks"] == 5
    assert stats["dropped_backups_blocks"] == 5
    half.check()


def test_on_eviction_what_there_is_no_room_for_in_the_queue_waits_on_the_host() -> None:
    half, _, _ = make_half(num_host_blocks=80, backup="on_eviction", max_backup_blocks=3)  # ten blocks are watched
    for number in range(8):
        compute(half, Asked(f"r{number}", prompt(number)))
    for _ in range(4):
        jobs = step(half)
        assert sum(job.num_blocks for job in jobs) <= 3
        report(half, jobs)
    stats = half.get_kv_connector_stats()
    assert (stats["backed_up_blocks"], stats["dropped_backups_blocks"]) == (10, 0)


def test_at_finish_a_block_is_written_when_its_request_has_ended() -> None:
    half, _, _ = make_half(backup="at_finish")
    request = Asked("a", PROMPT)
    plan = run_new(half, request)
    saved(half, plan)
    assert step(half) == ()
    half.request_finished(request)
    (job,) = step(half)
    assert (job.action, job.num_blocks) == (StorageAction.BACK_UP, 10)
    report(half, [job])
    again = Asked("b", PROMPT)
    half.on_new_request(again)
    half.request_finished(again)
    assert step(half) == (), "it is there"
    half.check()


def test_at_finish_a_save_under_way_is_written_when_it_has_arrived() -> None:
    half, _, _ = make_half(backup="at_finish")
    request = Asked("a", PROMPT)
    plan = run_new(half, request)
    half.request_finished(request)
    assert step(half) == ()
    saved(half, plan)
    (job,) = step(half)
    assert job.num_blocks == 10


def test_what_a_fetch_takes_the_place_of_was_not_written_and_what_it_brings_need_not_be() -> None:
    """At finish: the blocks of a request that is still computed are evicted for those of another, from storage."""
    half, _, _ = make_half(num_host_blocks=10, backup="at_finish")
    first, second = Asked("first", PROMPT), Asked("second", prompt(1)[:21])
    report(half, run_new(half, first).saves)  # type: ignore[arg-type]
    (job,) = fetch(half, second, found=5)
    report(half, [job])
    stats = half.get_kv_connector_stats()
    assert (stats["fetched_blocks"], stats["host_evicted_blocks"], stats["dropped_backups_blocks"]) == (5, 5, 5)
    assert admit(half, second, 50) == 20
    report(half, run(half, second, computed=20).loads)  # type: ignore[arg-type]
    half.request_finished(second)
    assert step(half) == (), "storage has them"
    half.check()


def test_nothing_is_queued_for_storage_that_does_not_answer() -> None:
    half, _, ticks = make_half(prefetch="best_effort")
    compute(half, Asked("a", PROMPT))
    (job,) = step(half)
    ticks.now += LOST_SECONDS
    leased = 100 - half.host.num_available
    save(half, Asked("b", prompt(2)))
    assert 100 - half.host.num_available == leased == 10
    report(half, [job])
    save(half, Asked("c", prompt(3)))
    assert 100 - half.host.num_available == 10, "it answers again"


def test_storage_that_is_slower_than_the_model_keeps_a_share_of_the_host() -> None:
    """All of it happens before anybody could call the storage hung."""
    half, _, _ = make_half(prefetch="best_effort")
    for number in range(12):
        save(half, Asked(f"r{number}", prompt(number)))
        step(half)
    assert half.host.num_available == 75
    half.check()


def queue_and_lose(half: SchedulerHalf, number: int = 0) -> None:
    """At finish: two blocks wait to be written as their request has ended, and a load that reads them fails."""
    warm, hit = (Asked(f"{name}{number}", prompt(number)[:9]) for name in ("warm", "hit"))
    saved(half, run_new(half, warm))
    assert half.get_num_new_matched_tokens(hit, 0) == (8, True)
    half.update_state_after_alloc(hit, [[0, 1, 2]], 0, 8)
    (load,) = run(half).background_loads
    half.request_finished(warm)
    half.update_connector_output([StepReport(half._step, 0, failed=(load.job_id,), num_host_blocks=100)])
    half.request_finished(hit)


def test_what_could_not_be_loaded_is_not_written_though_it_waits() -> None:
    """The host has let go of it: its bytes would be kept under a name that nobody knows any more."""
    half, _, _ = make_half(backup="at_finish", load_choice="async", prefetch="best_effort")
    queue_and_lose(half)
    assert [job for job in step(half) if job.action is StorageAction.BACK_UP] == []
    half.check()


@pytest.mark.parametrize("lost_by", ["a failed load", "a reset"])
def test_what_waits_no_more_leaves_its_place_in_the_queue_to_others(lost_by: str) -> None:
    """A quarter of the host may wait, 25 blocks."""
    half, _, _ = make_half(backup="at_finish", load_choice="async", prefetch="best_effort")
    for number in range(15):
        if lost_by == "a failed load":
            queue_and_lose(half, number)
        else:
            request = Asked(f"r{number}", prompt(number))
            saved(half, run_new(half, request))
            half.request_finished(request)
            half.reset_cache()
        step(half)
    request = Asked("last", prompt(50))
    saved(half, run_new(half, request))
    half.request_finished(request)
    (job,) = step(half)
    assert job.num_blocks == 10


def test_a_save_under_way_at_a_reset_is_not_written_under_its_blocks_next_name() -> None:
    """Its request had ended. What is saved to the same host block next is due when its own request ends."""
    half, _, _ = make_half(num_host_blocks=10, backup="at_finish")
    before, after = Asked("before", PROMPT), Asked("after", prompt(1))
    plan = run_new(half, before)
    half.request_finished(before)
    half.reset_cache()
    report(half, plan.saves)  # type: ignore[arg-type]
    plan = run_new(half, after)
    assert [job.num_blocks for job in plan.saves] == [10], "every host block"
    report(half, plan.saves)  # type: ignore[arg-type]
    assert step(half) == ()


def test_what_did_not_fit_on_the_host_is_not_written_to_storage() -> None:
    """Its host block is free, or another's by then."""
    half, _, _ = make_half(backup="on_save")
    plan = run_new(half, Asked("a", PROMPT[:17]))
    (job,) = plan.saves
    missing = ((job.job_id, (int(job.host_ids[1]),)),)
    half.update_connector_output([StepReport(plan.step, 0, (job.job_id,), num_host_blocks=100, missing=missing)])
    (backup,) = step(half)
    assert backup.action is StorageAction.BACK_UP
    assert backup.host_ids.tolist() == job.host_ids[[0, 2, 3]].tolist()
    report(half, [backup])
    assert half.get_kv_connector_stats()["host_leased_blocks"] == 0
    half.check()
