"""A rank that never reports a copy: it is said once, and requests are computed."""

from __future__ import annotations

import pytest

from kv_connector.index import CacheTier, PrefixTree
from kv_connector.metrics import CacheMetrics
from kv_connector.scheduler import SchedulerHalf
from kv_connector.scheduler.ledger import JobLedger
from kv_connector.scheduler.observers import JobTimes, Observers
from kv_connector.scheduler.shared import DevicePool
from kv_connector.scheduler.watchdog import OVERDUE_SECONDS, CopyWatchdog
from kv_connector.types import CopyJob, StepPlan, Tier
from tests.scheduler.test_half import Asked, Clock, admit, make_half, report, run, save


def hung_load(half: SchedulerHalf) -> CopyJob:
    """A load in the background that nobody reports for longer than any copy takes."""
    save(half, Asked("warm", list(range(9))), first_block=40)
    admit(half, Asked("waits", list(range(9))))
    (load,) = run(half).background_loads
    clock = half._shared.clock
    assert isinstance(clock, Clock)
    clock.now += OVERDUE_SECONDS + 1
    return load


def test_while_a_copy_hangs_requests_are_computed_and_nothing_is_saved(caplog: pytest.LogCaptureFixture) -> None:
    half, _ = make_half(load_choice="async")
    rider = Asked("rider", list(range(9)))
    load = hung_load(half)
    for _ in range(3):
        run(half)
        assert half.get_num_new_matched_tokens(rider, 0) == (0, False)
    new = Asked("new", list(range(500, 509)))  # nothing of it is on the host
    half.update_state_after_alloc(new, [[10, 11, 12]], 0, 0)
    assert run(half, new).saves == ()
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"job {load.job_id}" in said and "rank(s) 0" in said


def test_while_a_copy_hangs_nothing_is_saved_before_its_block_is_reused() -> None:
    """Under write_back: each such save would pin blocks that a rank which says nothing may never give back."""
    half, blocks = make_half(load_choice="async", write_policy="write_back")
    warm, next_in_line = Asked("warm", list(range(9))), Asked("next", list(range(700, 709)))
    for request, first_block in ((warm, 40), (next_in_line, 60)):
        admit(half, request, first_block)
        report(half, run(half, request))
        half.request_finished(request)
    blocks.order = [(41, warm.block_hashes[1]), (40, warm.block_hashes[0])]
    report(half, run(half))
    blocks.order = []
    admit(half, Asked("waits", warm.tokens))
    (load,) = run(half).background_loads
    clock = half._shared.clock
    assert isinstance(clock, Clock)
    clock.now += OVERDUE_SECONDS + 1
    blocks.order = [(61, next_in_line.block_hashes[1]), (60, next_in_line.block_hashes[0])]
    assert run(half).saves == ()
    report(half, StepPlan(half._step, loads=(load,)))
    assert [job.num_blocks for job in run(half).saves] == [2]


def test_an_engine_that_is_short_of_blocks_does_not_wait_for_a_copy_that_hangs() -> None:
    """It would wait for as long as the rank says nothing, and its requests with it."""
    half, blocks = make_half(load_choice="async")
    load = hung_load(half)
    assert half.has_pending_block_frees()
    plan = run(half)
    assert blocks.pins() and not half.has_pending_block_frees()
    report(half, plan.__class__(plan.step, loads=(load,)))
    assert not blocks.pins()


def test_when_it_is_reported_hits_are_loaded_again() -> None:
    half, _ = make_half(load_choice="async")
    load = hung_load(half)
    plan = run(half)
    assert half.get_num_new_matched_tokens(Asked("a", list(range(9))), 0) == (0, False)
    report(half, plan.__class__(plan.step, loads=(load,)))
    run(half)
    assert half.get_num_new_matched_tokens(Asked("b", list(range(9))), 0) == (8, True)


def test_who_waits_for_a_load_that_hangs_is_let_go_though_no_step_has_looked() -> None:
    """An engine whose requests all wait may plan nothing for long."""
    half, _ = make_half(load_choice="async")
    save(half, Asked("warm", list(range(9))), first_block=40)
    admit(half, Asked("waits", list(range(9))))
    assert run(half).background_loads
    rider = Asked("rider", list(range(9)))
    assert half.get_num_new_matched_tokens(rider, 0) == (None, False)
    clock = half._shared.clock
    assert isinstance(clock, Clock)
    clock.now += OVERDUE_SECONDS
    assert half.get_num_new_matched_tokens(rider, 0) != (None, False)


class CountingLedger(JobLedger):
    """Counts the walks over its jobs."""

    num_walks = 0

    def overdue(self, seconds: float) -> list[tuple[int, tuple[int, ...]]]:
        self.num_walks += 1
        return super().overdue(seconds)


def test_open_jobs_are_walked_once_a_second_however_many_steps_there_are() -> None:
    now = 0.0
    host = CacheTier(PrefixTree(), Tier.HOST, 0)
    ledger = CountingLedger(1, DevicePool(), host, lambda: now, JobTimes(CacheMetrics()), Observers())
    watchdog = CopyWatchdog(ledger, lambda: now)
    for step in range(1, 33):
        now = step / 8
        watchdog.look()
    assert ledger.num_walks == 4
