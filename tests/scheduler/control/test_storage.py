"""Hints and an operator's calls that concern storage: plans read, and reports written, by hand."""

from __future__ import annotations

import pytest

from kv_connector.errors import KVConnectorError
from kv_connector.types import BlockHash, StepReport, StorageAction
from tests.scheduler.control.test_hints import Hinted
from tests.scheduler.storage.test_companion import (
    PROMPT,
    arrive,
    compute,
    drain,
    fetch,
    make_half,
    matched,
    prompt,
    report,
    run,
    step,
)
from tests.scheduler.test_half import Asked
from tests.scheduler.test_half import make_half as make_half_alone

PREFETCH = {"prefetch": True}


def test_what_has_a_time_to_live_goes_to_storage_once_somebody_asks_who_set_none() -> None:
    half, _, _ = make_half()
    compute(half, Hinted("short", PROMPT, cache={"ttl_s": 60}))
    assert step(half) == () and half.drain() == 0, "storage would keep it"
    compute_again = Asked("long", PROMPT[:21])
    half.on_new_request(compute_again)
    matched(half, compute_again)
    half.update_state_after_alloc(compute_again, [list(range(6))], 0, 0)
    (job,) = step(half)
    assert (job.action, job.num_blocks) == (StorageAction.BACK_UP, 5)
    report(half, [job])
    half.request_finished(compute_again)
    assert step(half) == ()


@pytest.mark.parametrize("policy", ["best_effort", "timeout"])
def test_who_asks_for_it_waits_for_all_that_storage_has(policy: str) -> None:
    half, _, ticks = make_half(prefetch=policy, timeout_ms=0)
    request = Hinted("r", PROMPT, cache=PREFETCH)
    (job,) = fetch(half, request)
    ticks.now += 1.0
    assert matched(half, request) is None
    report(half, [job])
    assert matched(half, request) == 40


def test_who_asks_for_it_waits_also_where_computing_is_sooner() -> None:
    half, _, ticks = make_half(load_choice="auto")
    jobs = fetch(half, Asked("slow", PROMPT))
    ticks.now += 10.0  # a block a second
    report(half, jobs)
    half._loads.estimate._prefill.observe(1000, 1.0)
    assert fetch(half, Asked("computed", prompt(1))) == ()
    assert fetch(half, Hinted("fetched", prompt(2), cache=PREFETCH))


def test_what_was_asked_to_be_fetched_is_though_its_request_goes_away() -> None:
    half, _, _ = make_half()
    request = Hinted("r", PROMPT, cache=PREFETCH)
    (job,) = fetch(half, request)
    half.request_finished(request)
    plan_cancelled = half.build_connector_meta(_nothing()).cancelled_storage
    assert plan_cancelled == ()
    again = Asked("r", PROMPT)
    half.on_new_request(again)
    assert matched(half, again) is None, "an id that comes again waits for the same blocks"
    report(half, [job])
    assert matched(half, again) == 40
    half.check()


def _nothing() -> object:
    from kv_connector.base import SchedulerOutput

    return SchedulerOutput()


def test_a_prefix_is_warmed_for_whoever_comes() -> None:
    half, _, _ = make_half()
    hashes = Asked("r", PROMPT).block_hashes
    assert half.warm(hashes, are_given=False)
    (look_up,) = step(half)
    report(half, [look_up], found=10)
    (job,) = step(half)
    assert (job.action, job.num_blocks) == (StorageAction.FETCH, 10)
    report(half, [job])
    assert not half.has_pending_push_work()
    assert not half.warm(hashes, are_given=False), "all of it is on the host"
    late = Asked("late", PROMPT)
    assert matched(half, late) == 40
    half.check()


def test_so_many_prefixes_are_warmed_at_a_time_and_others_behind_them() -> None:
    half, _, _ = make_half()
    for _ in range(3):
        begun = [
            half.warm(Asked("r", [1000 * n + i for i in range(9)]).block_hashes, are_given=False) for n in range(70)
        ]
        assert begun.count(True) == 64
        report(half, step(half), found=0)
    assert not half.has_pending_push_work()


def test_of_requests_that_go_away_so_many_are_fetched_for_at_a_time() -> None:
    half, _, _ = make_half()
    for number in range(70):
        half.on_new_request(Hinted(f"r{number}", [1000 * number + i for i in range(9)], cache=PREFETCH))
    look_ups = step(half)
    assert len(look_ups) == 70
    for number in range(70):
        half.request_finished(Asked(f"r{number}", PROMPT))
    assert len(half.build_connector_meta(_nothing()).cancelled_storage) == 6, "64 are brought for whoever comes"


def test_a_reset_ends_what_is_to_be_warmed() -> None:
    half, _, _ = make_half()
    assert half.warm(Asked("r", PROMPT).block_hashes, are_given=False)
    half.reset_cache()
    assert step(half) == (), "it has not been asked for yet"
    assert not half.has_pending_push_work()


def test_a_reset_ends_what_is_warmed() -> None:
    half, _, _ = make_half()
    half.warm(Asked("r", PROMPT).block_hashes, are_given=False)
    (look_up,) = step(half)
    half.reset_cache()
    assert half.build_connector_meta(_nothing()).cancelled_storage == (look_up.job_id,)
    report(half, [look_up], found=10)
    assert step(half) == () and not half.has_pending_push_work()


def test_a_host_is_drained_in_as_many_steps_as_it_takes() -> None:
    half, _, _ = make_half(num_host_blocks=60, max_backup_blocks=7, backup="on_eviction")
    for number in range(5):
        compute(half, Asked(f"r{number}", [1000 * number + i for i in range(41)]))
    assert not half.has_pending_push_work()
    assert half.drain() == 50
    assert half.has_pending_push_work(), "an idle engine goes on"
    assert half.drain() == 50, "asked again it only says how much is left"
    drain(half)
    assert half.drain() == 0
    stats = half.get_kv_connector_stats()
    assert (stats["backed_up_blocks"], stats["dropped_backups_blocks"]) == (50, 0)
    assert not half.has_pending_push_work()
    half.check()


def test_the_end_of_a_prompt_that_fills_no_group_is_drained() -> None:
    half, _, _ = make_half(backup="on_eviction")
    half.update_connector_output([StepReport(0, 0, num_host_blocks=100, group_blocks=4)])
    compute(half, Asked("r", PROMPT[:41]))
    assert half.drain() > 0
    drain(half)
    assert half.drain() == 0
    assert half.get_kv_connector_stats()["backed_up_blocks"] == 10, "two groups of four, and two blocks behind them"


def test_without_storage_nothing_is_drained_or_warmed() -> None:
    half, _ = make_half_alone()
    assert not half.warm(Asked("r", PROMPT).block_hashes, are_given=False)
    with pytest.raises(KVConnectorError, match="there is no storage to write to"):
        half.drain()


def test_what_is_fetched_for_a_request_has_its_priority() -> None:
    half, _, _ = make_half()
    job = arrive(half, Hinted("r", PROMPT, cache={"priority": 1}))
    report(half, [job], found=10)
    (fetched,) = step(half)
    report(half, [fetched])
    nodes = half.tree.match(Hinted("r", PROMPT).block_hashes)
    assert [half.tree.terms.priority[node] for node in nodes] == [1] * 10


def test_what_takes_the_place_of_what_was_to_be_drained_is_drained_on_its_own_terms() -> None:
    half, _, _ = make_half(num_host_blocks=8, backup="on_eviction", max_backup_blocks=1)
    for number in range(2):
        compute(half, Asked(f"r{number}", [1000 * number + i for i in range(16)]))
    assert half.drain() == 8
    (under_way,) = step(half)
    assert under_way.num_blocks == 1, "for no more there is room"
    short = Hinted("short", [5000 + i for i in range(28)], cache={"ttl_s": 60})
    half.update_state_after_alloc(short, [list(range(7))], 0, 0)
    plan = run(half, short)
    saved = tuple(job.job_id for job in plan.saves)
    half.update_connector_output([StepReport(plan.step, 0, saved, num_host_blocks=8)])
    half.request_finished(short)
    assert half.host.num_copies == 8 and half.metrics.saved_blocks > 8, "some have the places of others"
    report(half, [under_way])
    written: list[BlockHash] = []
    while half.has_pending_push_work():
        for job in step(half):
            if job.action is StorageAction.BACK_UP:
                written += half.host.hashes_of(job.host_ids.tolist())
            report(half, [job], found=0)
    assert not set(written) & set(short.block_hashes)
    half.check()
