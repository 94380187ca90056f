"""Storage that keeps several blocks as one: what is asked of it, by plans read and reports written by hand."""

from __future__ import annotations

import pytest

from kv_connector.scheduler import SchedulerHalf
from kv_connector.types import StepReport, StorageAction, StorageJob
from tests.scheduler.storage.test_companion import (
    PROMPT,
    Ticks,
    arrive,
    drain,
    fetch,
    make_half,
    matched,
    prompt,
    report,
    step,
)
from tests.scheduler.test_half import Asked, ForeignBlocks, admit, run

GROUP = 4


def make_grouped(
    group_blocks: int = GROUP, num_host_blocks: int = 100, **settings: object
) -> tuple[SchedulerHalf, ForeignBlocks, Ticks]:
    made = make_half(num_host_blocks=num_host_blocks, **settings)  # type: ignore[arg-type]
    made[0].update_connector_output([StepReport(0, 0, num_host_blocks=num_host_blocks, group_blocks=group_blocks)])
    return made


def names(tokens: list[int]) -> list[bytes]:
    """What storage knows the blocks of a prompt by."""
    return arrive(make_half()[0], Asked("x", tokens)).split_keys()


def groups_of(job: StorageJob, size: int = GROUP) -> list[list[bytes]]:
    keys = job.split_keys()
    return [keys[start : start + size] for start in range(0, len(keys), size)]


def check_places(half: SchedulerHalf, job: StorageJob, tokens: list[int]) -> list[int]:
    """Each host block of the job is that of its key; returns the places in the prompt that it moves."""
    of_name = {name: place for place, name in enumerate(names(tokens))}
    moved = [key for place, key in enumerate(job.split_keys()) if place not in job.skipped]
    hashes = half.host.hashes_of(job.host_ids.tolist())
    assert [of_name[key] for key in moved] == [Asked("x", tokens).block_hashes.index(each) for each in hashes]
    return [of_name[key] for key in moved]


def compute(half: SchedulerHalf, request: Asked, is_finished: bool = True) -> None:
    """A request that storage knows nothing of; its blocks are saved."""
    half.on_new_request(request)
    jobs = [job for job in step(half) if job.action is StorageAction.LOOK_UP]
    report(half, jobs, found=0)
    admit(half, request)
    report(half, run(half, request).saves)  # type: ignore[arg-type]
    if is_finished:
        half.request_finished(request)


def compute_together(half: SchedulerHalf, *requests: Asked) -> None:
    """All in one step, and they end when their blocks are saved."""
    for request in requests:
        half.on_new_request(request)
    report(half, step(half), found=0)
    for number, request in enumerate(requests):
        admit(half, request, 20 * number)
    report(half, run(half, *requests).saves)  # type: ignore[arg-type]
    for request in requests:
        half.request_finished(request)


def test_a_look_up_begins_with_a_group_and_a_fetch_brings_what_the_host_lacks_of_it() -> None:
    half, _, _ = make_grouped()
    compute(half, Asked("before", PROMPT[:25]))
    drain(half)
    request = Asked("a", PROMPT)
    job = arrive(half, request)
    assert job.split_keys() == names(PROMPT)[4:], "the host has six of ten blocks"
    report(half, [job], found=6)
    (job,) = step(half)
    assert groups_of(job) == [names(PROMPT)[4:8], names(PROMPT)[8:]]
    assert (job.skipped, job.num_blocks) == ((0, 1), 4)
    assert check_places(half, job, PROMPT) == [6, 7, 8, 9]
    report(half, [job])
    assert matched(half, request) == 40
    half.check()


@pytest.mark.parametrize("found", [1, 2])
def test_what_storage_has_and_the_host_has_too_is_not_fetched(found: int) -> None:
    half, _, _ = make_grouped()
    compute(half, Asked("before", PROMPT[:25]))
    drain(half)
    assert fetch(half, Asked("a", PROMPT), found=found) == ()


def test_a_host_that_has_some_of_a_group_makes_room_for_the_rest_and_no_more() -> None:
    half, _, _ = make_grouped(num_host_blocks=11)
    compute(half, Asked("before", PROMPT[:25]))
    drain(half)
    fetch(half, Asked("a", PROMPT), found=6)
    stats = half.get_kv_connector_stats()
    assert (stats["host_cached_blocks"], stats["dropped_fetches_blocks"]) == (10, 0)


def test_a_block_that_the_host_has_lost_since_the_look_up_is_fetched_too() -> None:
    half, _, _ = make_grouped()
    compute(half, Asked("before", PROMPT[:25]))
    drain(half)
    job = arrive(half, Asked("a", PROMPT))
    half.resize_host(5)  # the sixth lies beyond
    half.resize_host(None)
    report(half, [job], found=6)
    (job,) = step(half)
    assert set(check_places(half, job, PROMPT)) <= {4, 5, 6, 7, 8, 9}
    half.check()


def test_no_group_is_cut_in_two_by_the_jobs_of_a_fetch() -> None:
    tokens = list(range(4 * 120 + 1))
    half, _, _ = make_grouped(group_blocks=32, num_host_blocks=400)
    compute(half, Asked("before", tokens[: 4 * 10 + 1]))
    drain(half)
    jobs = fetch(half, Asked("a", tokens), found=120)
    assert [job.num_blocks for job in jobs] == [22 + 32, 32 + 24]
    assert [len(job.split_keys()) for job in jobs] == [64, 56]
    assert [place for job in jobs for place in check_places(half, job, tokens)] == list(range(10, 120))


def test_a_host_that_is_too_small_takes_the_beginning_of_whole_groups() -> None:
    half, _, _ = make_grouped(num_host_blocks=8)  # a quarter is left to others
    (job,) = fetch(half, Asked("a", PROMPT))
    assert groups_of(job) == [names(PROMPT)[:4], names(PROMPT)[4:8]]
    assert (job.num_blocks, job.skipped) == (6, (6, 7))
    assert check_places(half, job, PROMPT) == list(range(6))


def test_two_that_arrive_together_share_what_is_fetched_of_a_group() -> None:
    half, _, _ = make_grouped()
    longer = [*PROMPT, *range(100, 108)]
    first, second = Asked("first", PROMPT), Asked("second", longer)
    half.on_new_request(first)
    half.on_new_request(second)
    for job, found in zip(step(half), (10, 12), strict=True):
        report(half, [job], found=found)
    jobs = step(half)
    assert [(job.num_blocks, job.skipped) for job in jobs] == [(10, ()), (2, (0, 1))]
    assert groups_of(jobs[1]) == [names(longer)[8:12]]
    report(half, jobs)
    assert (matched(half, first), matched(half, second)) == (40, 48)
    half.check()


def test_missing_blocks_are_counted_among_those_that_were_wanted() -> None:
    half, _, _ = make_grouped()
    compute(half, Asked("before", PROMPT[:25]))
    drain(half)
    request = Asked("a", PROMPT)
    (job,) = fetch(half, request, found=6)
    report(half, [job], missing=(2, 3))
    assert matched(half, request) == 32, "the second group is missing"
    half.check()


def test_whole_groups_are_written_as_they_come_and_the_rest_when_the_request_ends() -> None:
    half, _, _ = make_grouped()
    request = Asked("a", PROMPT)
    compute(half, request, is_finished=False)
    (job,) = step(half)
    assert (job.action, groups_of(job)) == (StorageAction.BACK_UP, [names(PROMPT)[:4], names(PROMPT)[4:8]])
    assert check_places(half, job, PROMPT) == list(range(8))
    report(half, [job])
    assert step(half) == ()
    assert 100 - half.host.num_available == 0, "what waits for its group is not leased"
    half.request_finished(request)
    (job,) = step(half)
    assert groups_of(job) == [names(PROMPT)[8:]]
    assert check_places(half, job, PROMPT) == [8, 9]
    report(half, [job])
    half.request_finished(Asked("again", PROMPT))
    assert step(half) == (), "it is there"
    assert half.get_kv_connector_stats()["backed_up_blocks"] == 10


def test_a_group_shorter_than_others_is_the_last_of_its_job() -> None:
    """Else whoever cuts the keys into groups would take the next one's for its own."""
    half, _, _ = make_grouped()
    compute_together(half, *(Asked(f"r{number}", prompt(number)[:25]) for number in range(3)))
    jobs = step(half)
    assert [[len(group) for group in groups_of(job)] for job in jobs] == [[4, 4, 4, 2], [2]]
    report(half, jobs)
    (job,) = step(half)
    assert [len(group) for group in groups_of(job)] == [2]
    report(half, [job])
    half.check()
    assert not [b for b in half.host.pool.live_ids() if half.host.pool.refs(b)]


def test_who_goes_on_from_an_end_has_the_whole_group_written() -> None:
    half, _, _ = make_grouped()
    compute(half, Asked("a", PROMPT))
    drain(half)
    longer = [*PROMPT, *range(100, 108)]
    compute(half, Asked("b", longer))
    (job,) = step(half)
    assert groups_of(job) == [names(longer)[8:12]]
    assert check_places(half, job, longer) == [8, 9, 10, 11]


def test_what_branches_off_within_a_group_is_a_group_of_its_own() -> None:
    half, _, _ = make_grouped()
    trunk, branch = prompt(0)[:17], [*prompt(0)[:8], *prompt(1)[:9]]
    compute_together(half, Asked("a", trunk), Asked("b", branch))
    (job,) = step(half)
    assert groups_of(job) == [names(trunk), names(branch)]
    assert all(half.host.pool.refs(block_id) == 1 + (i in (0, 1, 4, 5)) for i, block_id in enumerate(job.host_ids))
    assert names(trunk)[:2] == names(branch)[:2], "both have the blocks in front of it"
    report(half, [job])
    assert not [b for b in half.host.pool.live_ids() if half.host.pool.refs(b)]
    half.check()


@pytest.mark.parametrize("backup", ["on_save", "at_finish"])
def test_saves_that_arrive_out_of_order_make_a_group_with_the_last_of_them(backup: str) -> None:
    half, _, _ = make_grouped(backup=backup)
    request = Asked("a", PROMPT[:17])
    half.on_new_request(request)
    report(half, step(half), found=0)
    admit(half, request)
    (early,) = run(half, Asked("a", PROMPT[:9])).saves
    (late,) = run(half, request, computed=8).saves
    half.request_finished(request)
    report(half, [late])  # type: ignore[list-item]
    assert step(half) == ()
    report(half, [early])  # type: ignore[list-item]
    (job,) = step(half)
    assert groups_of(job) == [names(PROMPT[:17])]
    half.check()


def test_at_finish_all_of_a_request_is_written_when_it_has_ended() -> None:
    half, _, _ = make_grouped(backup="at_finish")
    request = Asked("a", PROMPT)
    compute(half, request, is_finished=False)
    assert step(half) == ()
    half.request_finished(request)
    (job,) = step(half)
    assert [len(group) for group in groups_of(job)] == [4, 4, 2]


@pytest.mark.parametrize("backup", ["on_save", "at_finish"])
def test_the_end_of_a_request_that_is_still_being_saved_is_written_when_it_has_arrived(backup: str) -> None:
    half, _, _ = make_grouped(backup=backup)
    request = Asked("a", PROMPT)
    half.on_new_request(request)
    report(half, step(half), found=0)
    admit(half, request)
    saves = run(half, request).saves
    half.request_finished(request)
    assert step(half) == ()
    report(half, saves)  # type: ignore[arg-type]
    (job,) = step(half)
    assert [len(group) for group in groups_of(job)] == [4, 4, 2]


def test_on_eviction_groups_are_written_when_their_last_block_is_next_to_go() -> None:
    half, _, _ = make_grouped(num_host_blocks=80, backup="on_eviction")  # ten blocks are watched
    for number in range(7):
        compute(half, Asked(f"r{number}", prompt(number)))
        assert step(half) == ()
    compute(half, Asked("r7", prompt(7)))
    jobs = step(half)
    written = [group for job in jobs for group in groups_of(job)]
    assert sorted(written) == sorted([names(prompt(0))[:4], names(prompt(0))[4:8], names(prompt(0))[8:]])
    report(half, jobs)
    assert step(half) == ()
    half.check()


def test_blocks_that_go_before_their_group_is_whole_are_counted() -> None:
    half, _, _ = make_grouped(num_host_blocks=12, prefetch="best_effort")
    compute(half, Asked("runs", prompt(0)[:25]), is_finished=False)  # six blocks
    drain(half)
    report(half, fetch(half, Asked("other", prompt(1))))
    stats = half.get_kv_connector_stats()
    assert (stats["backed_up_blocks"], stats["host_evicted_blocks"], stats["dropped_backups_blocks"]) == (4, 3, 2)
    half.check()


def test_a_queue_that_is_shorter_than_a_group_takes_one_all_the_same() -> None:
    half, _, _ = make_grouped(max_backup_blocks=1)
    compute(half, Asked("a", PROMPT))
    (job,) = step(half)
    assert groups_of(job) == [names(PROMPT)[:4]]
    assert half.get_kv_connector_stats()["dropped_backups_blocks"] == 6


def test_a_reset_lets_go_of_groups_that_wait() -> None:
    half, _, _ = make_grouped()
    compute(half, Asked("a", PROMPT))
    assert half.has_pending_push_work()
    half.reset_cache()
    assert not half.has_pending_push_work()
    assert step(half) == ()
    assert half.host.num_available == 100
    half.check()


def test_a_group_whose_beginning_comes_from_storage_is_written_when_that_has_arrived() -> None:
    """Its request did not wait for it, and has computed and saved the rest meanwhile."""
    half, _, _ = make_grouped(prefetch="best_effort")
    request = Asked("a", PROMPT[:17])
    half.on_new_request(request)
    report(half, step(half), found=0b11)
    (fetch,) = step(half)
    admit(half, request)
    report(half, run(half, request).saves)  # type: ignore[arg-type]
    assert step(half) == (), "the first two are on their way"
    report(half, [fetch])
    (job,) = step(half)
    assert groups_of(job) == [names(PROMPT[:17])]
    half.check()


@pytest.mark.parametrize("backup", ["on_save", "at_finish"])
def test_a_group_with_a_hole_waits_for_who_fills_it(backup: str) -> None:
    half, _, _ = make_grouped(backup=backup, prefetch="best_effort")
    request = Asked("a", PROMPT[:17])
    half.on_new_request(request)
    report(half, step(half), found=0)
    admit(half, request)
    (early,) = run(half, Asked("a", PROMPT[:9])).saves
    (late,) = run(half, request, computed=8).saves
    report(half, failed=[early])  # type: ignore[list-item]
    report(half, [late])  # type: ignore[list-item]
    half.request_finished(request)
    assert step(half) == ()
    half.check()
    compute(half, Asked("b", PROMPT[:17]))
    (job,) = step(half)
    assert groups_of(job) == [names(PROMPT[:17])]
    assert check_places(half, job, PROMPT) == [0, 1, 2, 3]
