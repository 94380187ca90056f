"""Loads whose requests go: before the plan that begins them, or while they are under way."""

from __future__ import annotations

import gc

import pytest

from kv_connector.base import ScheduledRequest, SchedulerOutput
from kv_connector.config import Config
from kv_connector.index import BlockGroup
from kv_connector.scheduler import SchedulerHalf
from kv_connector.types import NO_BLOCK, CopyJob, StepReport
from tests.scheduler.test_half import Asked, ForeignBlocks, admit, make_half, report, run, save

PROMPT = list(range(9))
OTHER = [5] * 9


def end(half: SchedulerHalf, job: CopyJob, ok: bool = True) -> None:
    """The only rank reports the load, which took a second."""
    done, failed = ((job.job_id,), ()) if ok else ((), (job.job_id,))
    half.update_connector_output([StepReport(half._step, 0, done, failed, num_host_blocks=10, load_milliseconds=1e3)])


def begin(half: SchedulerHalf, request: Asked, num_on_device: int = 0) -> CopyJob:
    """The load of a request that was admitted with a hit of two blocks; the device has so many tokens of them."""
    assert half.get_num_new_matched_tokens(request, num_on_device) == (8 - num_on_device, True)
    half.update_state_after_alloc(request, [[0, 1, 2]], num_on_device, 8 - num_on_device)
    (job,) = run(half).background_loads
    return job


def test_nobody_waits_for_a_load_that_was_never_begun() -> None:
    """Its request ends before the step is planned: a later one with the prefix loads it for itself."""
    half, blocks = make_half(load_choice="async")
    save(half, Asked("warm", PROMPT), first_block=40)
    gone = Asked("gone", PROMPT)
    assert half.get_num_new_matched_tokens(gone, 0) == (8, True)
    half.update_state_after_alloc(gone, [[0, 1, 2]], 0, 8)
    half.request_finished(gone)
    assert run(half).background_loads == ()
    assert blocks.pins() == {}
    assert half.get_num_new_matched_tokens(Asked("next", PROMPT), 0) == (8, True)
    half.check()


@pytest.mark.parametrize("load_choice", ["sync", "async"])
def test_a_load_whose_request_leaves_before_the_step_is_planned_is_not_one_of_the_step(load_choice: str) -> None:
    """Others behind it are told how they are loaded by what the step loads in all."""
    half, _ = make_half(load_choice=load_choice)
    save(half, Asked("warm", PROMPT), first_block=40)
    gone = Asked("gone", PROMPT)
    assert half.get_num_new_matched_tokens(gone, 0) == (8, load_choice == "async")
    half.update_state_after_alloc(gone, [[0, 1, 2]], 0, 8)
    assert half._loads._num_in_step == (2 if load_choice == "sync" else 0)
    half.request_finished(gone)
    assert half._loads._num_in_step == 0


def test_a_load_of_the_step_has_the_blocks_that_are_copied() -> None:
    """Of a sliding window the last ones."""
    half, _ = make_half(load_choice="sync", num_host_blocks=20, groups=(BlockGroup(), BlockGroup(window_blocks=1)))
    warm = Asked("warm", PROMPT)
    half.update_state_after_alloc(warm, [[40, 41, 42], [50, 51, 52]], 0, 0)
    report(half, run(half, warm))
    half.request_finished(warm)
    again = Asked("again", PROMPT)
    assert half.get_num_new_matched_tokens(again, 0) == (8, False)
    half.update_state_after_alloc(again, [[0, 1, 2], [NO_BLOCK, 4, 5]], 0, 8)
    assert half._loads._num_in_step == 3


@pytest.mark.parametrize("what", ["goes on", "ended", "preempted"])
def test_the_load_of_a_request_that_is_gone_is_announced_to_nobody(what: str) -> None:
    """The engine would take the announcement for one of whoever has that id by now."""
    half, _ = make_half(load_choice="async")
    save(half, Asked("warm", PROMPT), first_block=40)
    end(half, begin(half, Asked("first", PROMPT)))  # so that it is known how long loads take
    half._loads.estimate.lead_seconds = lambda num_steps: -1e9  # type: ignore[method-assign]
    request = Asked("second", PROMPT)
    job = begin(half, request)
    half._loads.estimate.lead_seconds = lambda num_steps: 1e9  # type: ignore[method-assign]
    if what == "ended":
        half.request_finished(request)
    plan = half.build_connector_meta(SchedulerOutput((), {"second"} if what == "preempted" else ()))
    assert plan.announced_loads == ((job.job_id,) if what == "goes on" else ())


def test_an_id_that_comes_again_waits_for_the_load_of_the_one_before() -> None:
    """When that one ends the engine is told of the id alone."""
    half, _ = make_half(load_choice="async")
    save(half, Asked("warm", PROMPT), first_block=40)
    request = Asked("same", PROMPT)
    job = begin(half, request)
    half.request_finished(request)
    again = Asked("same", list(range(100, 109)))
    assert half.get_num_new_matched_tokens(again, 0) == (None, False)
    end(half, job)
    assert half.get_num_new_matched_tokens(again, 0) == (0, False)


def test_another_s_load_is_waited_for_behind_what_the_device_has() -> None:
    """Only of the same blocks: those behind the computed tokens."""
    half, _ = make_half(load_choice="async")
    save(half, Asked("warm", PROMPT), first_block=40)
    job = begin(half, Asked("first", PROMPT), 4)
    assert job.device_ids.tolist() == [1]
    assert half.get_num_new_matched_tokens(Asked("behind", PROMPT), 4) == (None, False)
    assert half.get_num_new_matched_tokens(Asked("in front", PROMPT), 0) == (8, True)
    end(half, job)


def test_what_could_not_be_loaded_is_computed_from_now_on() -> None:
    """A second try would most likely fail as well, and its request wait for it again."""
    half, blocks = make_half(load_choice="async")
    save(half, Asked("warm", PROMPT), first_block=40)
    end(half, begin(half, Asked("first", PROMPT)), ok=False)
    assert half.get_num_new_matched_tokens(Asked("second", PROMPT), 0) == (0, False)
    assert blocks.pins() == {}
    half.check()


@pytest.mark.parametrize("end_of", ["it runs", "ended", "preempted"])
def test_nobody_hits_what_a_failed_load_was_to_fill_nor_what_was_computed_behind_it(end_of: str) -> None:
    """The engine hits blocks from the plan of a step on, and vLLM looks only at requests that run when the load is said
    to have failed. What is said later, of another load, concerns who came since."""
    half, blocks = make_half(load_choice="sync")
    save(half, Asked("warm", PROMPT), first_block=40)
    half.update_state_after_alloc(Asked("other", [7] * 9), [[60, 61, 62]], 0, 0)
    request = Asked("a", PROMPT)
    assert half.get_num_new_matched_tokens(request, 4) == (4, False)
    half.update_state_after_alloc(request, [[9, 0, 1]], 4, 4)
    plan = half.build_connector_meta(SchedulerOutput([ScheduledRequest("a", 8, 1, [[2]])]))
    assert [job.device_ids.tolist() for job in plan.loads] == [[0]]
    if end_of == "ended":
        half.request_finished(request)
    elif end_of == "preempted":
        half.build_connector_meta(SchedulerOutput((), {"a"}))
    assert half.holding([0, 62]) == (["other"] if end_of == "ended" else ["other", "a"])
    failed = (plan.loads[0].job_id,)
    half.update_connector_output([StepReport(plan.step, 0, (), failed, num_host_blocks=10, lost_blocks=(0,))])
    assert blocks.forgotten == {0, 1, 2}
    blocks.forgotten.clear()
    half.update_connector_output([StepReport(plan.step, 0, num_host_blocks=10, lost_blocks=(1,))])
    assert blocks.forgotten == ({1, 2} if end_of == "it runs" else {1})
    half.check()


def test_what_was_computed_behind_a_failed_load_is_forgotten_in_every_group() -> None:
    """Also in one that had nothing to load, and from the first block that was lost in any."""
    groups = (BlockGroup(), BlockGroup(window_blocks=1))
    half = SchedulerHalf(Config(host_memory=1 << 20, load_choice="sync"), 4, groups=groups)  # type: ignore[arg-type]
    blocks = ForeignBlocks()
    half.bind_block_pool(blocks)
    request = Asked("a", list(range(16)))
    half.update_state_after_alloc(request, [[1, 2, 3, 4], [NO_BLOCK, 6, 7, 8]], 0, 0)
    half.update_connector_output([StepReport(0, 0, num_host_blocks=10, lost_blocks=(3, 2))])
    assert blocks.forgotten == {2, 3, 4, 6, 7, 8}


def test_what_lies_behind_a_failed_load_is_told_by_tokens_where_groups_have_other_blocks() -> None:
    """Blocks of 4 and of 8 tokens: one of 4 is lost, from token 12 on."""
    config = Config.from_mapping({"host_memory": 1 << 20, "load_choice": "sync"})
    half = SchedulerHalf(config, 4, groups=(BlockGroup(), BlockGroup(hashes_per_block=2)))
    blocks = ForeignBlocks()
    half.bind_block_pool(blocks)
    half.update_state_after_alloc(Asked("a", list(range(24))), [[1, 2, 3, 4, 5, 6], [11, 12, 13]], 0, 0)
    half.update_connector_output([StepReport(0, 0, num_host_blocks=10, lost_blocks=(4,))])
    assert blocks.forgotten == {4, 5, 6, 12, 13}


@pytest.mark.parametrize("had", [[50, 51, 52], [0, 1, 50, 54]])
def test_who_had_a_block_before_its_load_was_planned_has_lost_nothing(had: list[int]) -> None:
    """Its blocks were free when they were given to whoever loads; the engine would end for it. What it had of another
    load, which hangs, is nothing to this one."""
    half, blocks = make_half(load_choice="async")
    save(half, Asked("warm", PROMPT), first_block=40)
    begin(half, Asked("hangs", PROMPT))
    before = Asked("before", [7] * 9)
    half.update_state_after_alloc(before, [had], 0, 0)
    run(half, before)
    half.build_connector_meta(SchedulerOutput((), {"before"}))
    loading = Asked("loading", PROMPT)
    half.update_state_after_alloc(loading, [[50, 51, 53]], 0, 8)
    (job,) = run(half).loads
    assert half.holding([50]) == ["loading"]
    failed = StepReport(half._step, 0, (), (job.job_id,), num_host_blocks=10, lost_blocks=(50, 51))
    half.update_connector_output([failed])
    assert blocks.forgotten == {50, 51, 53}


def test_a_load_that_hangs_keeps_nothing_of_requests_that_had_nothing_of_it() -> None:
    half, _ = make_half(load_choice="async")
    save(half, Asked("warm", PROMPT), first_block=40)
    begin(half, Asked("hangs", PROMPT))
    for number in range(3):
        other = Asked(str(number), [number] * 9)
        half.update_state_after_alloc(other, [[50, 51, 52]], 0, 0)
        half.request_finished(other)
    sharer = Asked("sharer", PROMPT)
    half.update_state_after_alloc(sharer, [[0, 1, 53]], 8, 0)
    half.request_finished(sharer)
    assert half._leases.dropped_since([0]) == [("sharer", [[0, 1, 53]])]
    assert half._leases.dropped_since([50]) == []


def two_loads() -> tuple[SchedulerHalf, ForeignBlocks, list[CopyJob]]:
    """Of a step under way, one to blocks 0 and 1, then one to blocks 10 and 11; their requests have ended."""
    half, blocks = make_half(load_choice="sync")
    for tokens in (PROMPT, OTHER):
        save(half, Asked("warm", tokens), first_block=40)
    hits = [Asked("hit", PROMPT), Asked("other hit", OTHER)]
    for hit, block_ids in zip(hits, ([0, 1, 2], [10, 11, 12]), strict=True):
        assert half.get_num_new_matched_tokens(hit, 0) == (8, False)
        half.update_state_after_alloc(hit, [block_ids], 0, 8)
    jobs = run(half).loads
    for hit in hits:
        half.request_finished(hit)
    return half, blocks, list(jobs)


def share(half: SchedulerHalf, tokens: list[int], first: int) -> None:
    """A request hits the two blocks that a load is to fill, computes block 70 behind them, and ends."""
    sharer = Asked("sharer", tokens)
    half.update_state_after_alloc(sharer, [[first, first + 1, 70]], 8, 0)
    half.request_finished(sharer)


def lose(half: SchedulerHalf, jobs: list[CopyJob]) -> None:
    """These loads have failed, by one report."""
    lost = tuple(block_id for job in jobs for block_id in job.device_ids.tolist())
    ids = tuple(job.job_id for job in jobs)
    half.update_connector_output([StepReport(half._step, 0, (), ids, num_host_blocks=10, lost_blocks=lost)])


@pytest.mark.parametrize(("number", "tokens", "first"), [(0, PROMPT, 0), (1, OTHER, 10)])
def test_who_has_ended_rested_on_any_of_the_loads_under_way(number: int, tokens: list[int], first: int) -> None:
    """Not only on the oldest of them, nor only on the newest."""
    half, blocks, jobs = two_loads()
    share(half, tokens, first)
    lose(half, [jobs[number]])
    assert blocks.forgotten == {first, first + 1, first + 2, 70}
    half.check()


def test_what_was_computed_behind_a_load_is_known_until_that_one_ends() -> None:
    """An older one ends before."""
    half, blocks, jobs = two_loads()
    share(half, OTHER, 10)
    end(half, jobs[0])
    lose(half, [jobs[1]])
    assert blocks.forgotten == {10, 11, 12, 70}
    half.check()


def test_of_two_loads_to_the_same_blocks_the_second_is_still_under_way_when_the_first_has_ended() -> None:
    """The engine has given the blocks to another request in between, whose load fails. A load of blocks of its own
    begins behind it, and others end before."""
    half, blocks, jobs = two_loads()
    loads: list[CopyJob] = []
    for number, first in ((6, 0), (7, 20)):
        save(half, Asked("warm", [number] * 9), first_block=10 * number)
        late = Asked(f"late {number}", [number] * 9)
        assert half.get_num_new_matched_tokens(late, 0) == (8, False)
        half.update_state_after_alloc(late, [[first, first + 1, first + 2]], 0, 8)
        loads += run(half).loads
        half.request_finished(late)
    job, _ = loads
    end(half, jobs[1])
    end(half, jobs[0])
    share(half, [6] * 9, 0)
    lose(half, [job])
    assert blocks.forgotten == {0, 1, 2, 70}
    half.check()


def test_of_loads_that_fail_together_the_oldest_says_who_has_rested_on_them() -> None:
    """The other one was planned when the request that hit the oldest had ended."""
    half, blocks, jobs = two_loads()
    share(half, PROMPT, 0)
    save(half, Asked("warm", [6] * 9), first_block=60)
    late = Asked("late", [6] * 9)
    assert half.get_num_new_matched_tokens(late, 0) == (8, False)
    half.update_state_after_alloc(late, [[20, 21, 22]], 0, 8)
    (job,) = run(half).loads
    lose(half, [jobs[0], job])
    assert blocks.forgotten == {0, 1, 2, 20, 21, 22, 70}
    half.check()


def test_nothing_is_kept_of_who_has_shared_a_load_that_has_ended() -> None:
    """An engine does so for months: every list that a round has made is gone behind it."""
    half, _ = make_half(load_choice="sync")
    save(half, Asked("warm", PROMPT), first_block=40)

    def num_lists(rounds: int) -> int:
        for _ in range(rounds):
            hit = Asked("hit", PROMPT)
            assert half.get_num_new_matched_tokens(hit, 0) == (8, False)
            half.update_state_after_alloc(hit, [[0, 1, 2]], 0, 8)
            (job,) = run(half).loads
            half.request_finished(hit)
            share(half, PROMPT, 0)
            end(half, job)
            list(half.take_events())
        gc.collect()
        return sum(type(kept) is list for kept in gc.get_objects())

    num_before = num_lists(10)
    assert num_lists(50) <= num_before


def failed(half: SchedulerHalf) -> Asked:
    """A request that has waited for a load in vain; the prefix is on the host again."""
    request = Asked("first", PROMPT)
    end(half, begin(half, request), ok=False)
    save(half, Asked("warm again", PROMPT), first_block=50)
    return request


def test_who_has_waited_in_vain_does_not_wait_again() -> None:
    """Its step waits for the load: an engine may refuse blocks to those that wait until others give theirs back."""
    half, _ = make_half(load_choice="async")
    save(half, Asked("warm", PROMPT), first_block=40)
    assert half.get_num_new_matched_tokens(failed(half), 0) == (8, False)


@pytest.mark.parametrize("ends_first", ["request", "load"])
def test_that_a_request_has_waited_in_vain_ends_with_it(ends_first: str) -> None:
    """The next of its id may wait; and nothing is remembered for ever of requests that are gone."""
    half, _ = make_half(load_choice="async")
    save(half, Asked("warm", PROMPT), first_block=40)
    if ends_first == "load":
        half.request_finished(failed(half))
    else:
        request = Asked("first", PROMPT)
        job = begin(half, request)
        half.request_finished(request)
        end(half, job, ok=False)
        save(half, Asked("warm again", PROMPT), first_block=50)
    assert half.get_num_new_matched_tokens(Asked("first", PROMPT), 0) == (8, True)


@pytest.mark.parametrize(("num_available", "is_async"), [(23, True), (22, False)])
def test_a_load_waits_only_where_all_that_wait_could_begin_anew(num_available: int, is_async: bool) -> None:
    """One of them fails and needs its whole window again: vLLM gives it blocks before others go on that hold theirs."""
    groups = (BlockGroup(), BlockGroup(window_blocks=1))
    config = Config(host_memory=1 << 20, load_choice="async", write_policy="write_through")  # type: ignore[arg-type]
    half = SchedulerHalf(config, 4, groups=groups)
    blocks = ForeignBlocks()
    half.bind_block_pool(blocks)
    half.update_connector_output([StepReport(0, 0, num_host_blocks=20)])
    for start in (0, 100):
        warm = Asked(f"warm {start}", list(range(start, start + 17)))
        half.update_state_after_alloc(warm, [[40, 41, 42, 43, 44], [50, 51, 52, 53, 54]], 0, 0)
        (job,) = run(half, warm).saves
        half.update_connector_output([StepReport(half._step, 0, (job.job_id,), num_host_blocks=20)])
    first = Asked("first", list(range(17)))
    assert half.get_num_new_matched_tokens(first, 0) == (16, True)
    # Of seven blocks of each group, two of them for drafts, it has four and one. The next one needs as many.
    half.update_state_after_alloc(first, [[0, 1, 2, 3], [NO_BLOCK, NO_BLOCK, NO_BLOCK, 7]], 0, 16)
    run(half)
    blocks.num_available = num_available
    assert half.get_num_new_matched_tokens(Asked("second", list(range(100, 117))), 0) == (16, is_async)


def know_rates(half: SchedulerHalf, launch_seconds: float) -> None:
    """A hit of two blocks is loaded in a second, computing it takes longer, and launching a prompt `launch_seconds`."""
    estimate = half._loads.estimate
    estimate.observe_load(2, 1.0)
    estimate._prefill.observe(8, 1.1)
    estimate._launches.extend([launch_seconds] * 8)


def test_two_hits_that_begin_together_are_loaded_in_one_step_unless_a_third_one_decodes() -> None:
    half, _ = make_half()
    requests = [Asked(f"{number}", [number] * 10) for number in range(4)]
    for number, request in enumerate(requests):
        save(half, Asked(f"warm {number}", request.tokens), first_block=3 * number)
    know_rates(half, launch_seconds=1.0)
    assert [admit(half, request, 20 + 3 * n) for n, request in enumerate(requests[:2])] == [8, 8]
    plan = run(half, *requests[:2], computed=8)
    assert [len(jobs) for jobs in (plan.loads, plan.background_loads)] == [2, 0]
    report(half, plan)
    half.request_finished(requests[1])
    assert half.get_num_new_matched_tokens(requests[2], 0) == (8, False), "launching takes as long as its load"
    half.update_state_after_alloc(requests[2], [[30, 31, 32]], 0, 8)
    assert half.get_num_new_matched_tokens(requests[3], 0) == (8, True)


def test_what_is_loaded_in_the_background_is_not_in_the_way_of_a_load_of_the_step() -> None:
    """Beside one that decodes, where launching a prompt hides a load of two blocks, and none of four."""
    half, _ = make_half()
    lengths = (10, 18, 10)
    requests = [Asked(f"{number}", [number] * length) for number, length in enumerate(lengths)]
    for number, request in enumerate(requests):
        save(half, Asked(f"warm {number}", request.tokens), first_block=5 * number)
    know_rates(half, launch_seconds=1.0)
    assert admit(half, requests[0], 20) == 8
    report(half, run(half, requests[0], computed=8))
    assert half.get_num_new_matched_tokens(requests[1], 0) == (16, True)
    half.update_state_after_alloc(requests[1], [[30, 31, 32, 33, 34]], 0, 16)
    assert half.get_num_new_matched_tokens(requests[2], 0) == (8, False)
