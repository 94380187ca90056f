"""Blocks that do not fit into the form of a host block, which is known once they were copied."""

from __future__ import annotations

import pytest

from kv_connector.base import ScheduledRequest, SchedulerOutput
from kv_connector.events import BlockStored
from kv_connector.index import BlockGroup
from kv_connector.scheduler import SchedulerHalf
from kv_connector.scheduler.saves import refusals
from kv_connector.types import BlockHash, StepPlan, StepReport
from tests.scheduler.control.test_hints import Hinted
from tests.scheduler.saves import test_budget
from tests.scheduler.test_half import Asked, admit, make_half, report, run

PROMPT = list(range(17))  # four blocks, and a token


def refuse(half: SchedulerHalf, plan: StepPlan, *places: int, rank: int = 0) -> None:
    """A rank has done the step's save, but for the blocks at these places in it."""
    (job,) = plan.saves
    missing = ((job.job_id, tuple(job.host_ids[list(places)].tolist())),) if places else ()
    capacity = half.host.pool.capacity
    told = StepReport(plan.step, rank, (job.job_id,), num_host_blocks=capacity, missing=missing)
    half.update_connector_output([told])


def matched(half: SchedulerHalf, tokens: list[int] = PROMPT) -> int | None:
    return half.get_num_new_matched_tokens(Asked("looks", tokens), 0)[0]


def computed(half: SchedulerHalf, name: str, tokens: list[int] = PROMPT, first_block: int = 0) -> StepPlan:
    """The step of a request that computes what is not on the host."""
    request = Asked(name, tokens)
    hit = admit(half, request, first_block)
    return run(half, request, computed=hit)


def test_one_block_that_does_not_fit_costs_no_other() -> None:
    half, blocks = make_half()
    one, other = Asked("one", PROMPT), Asked("other", [7] * 9)
    admit(half, one)
    admit(half, other, 20)
    plan = run(half, one, other)
    assert plan.saves[0].num_blocks == 6, "a step's saves are one job"
    refuse(half, plan, 2)
    assert matched(half) == 8, "nobody hits what is behind it either"
    assert matched(half, [7] * 9) == 8
    assert half.metrics.refused_blocks == 1
    assert half.metrics.saved_blocks == 5
    assert half.metrics.failed_save_jobs == 0
    assert half.host.pool.num_free == 5, "its host block is free"
    told = [event.block_hashes for event in half.take_events() if isinstance(event, BlockStored)]
    assert told == [[h for i, h in enumerate(one.block_hashes + other.block_hashes) if i != 2]]
    assert blocks.pins() == {}
    half.check()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_block_that_does_not_fit_on_one_rank_is_on_no_host(order: tuple[int, int]) -> None:
    half, _ = make_half(world_size=2)
    plan = computed(half, "r")
    for rank in order:
        refuse(half, plan, 1 + rank, rank=rank)
    assert matched(half) == 4
    assert half.metrics.refused_blocks == 2
    half.check()


def test_a_save_of_nothing_that_fits_has_not_failed() -> None:
    half, _ = make_half()
    refuse(half, computed(half, "r"), 0, 1, 2, 3)
    assert matched(half) == 0
    assert (half.metrics.failed_save_jobs, half.host.num_copies) == (0, 0)
    half.check()


def test_what_does_not_fit_is_not_tried_again_nor_what_is_behind_it_until_a_reset() -> None:
    """Whoever asks for the same prompt would have it copied for nothing each time."""
    half, _ = make_half()
    refuse(half, computed(half, "first", PROMPT[:9]), 1)
    half.request_finished(Asked("first", PROMPT[:9]))
    assert computed(half, "second", first_block=20).saves == ()
    half.request_finished(Asked("second", PROMPT))
    assert half.reset_cache()
    plan = computed(half, "third", first_block=40)
    assert [job.num_blocks for job in plan.saves] == [4]
    report(half, plan)
    assert matched(half) == 16
    half.check()


@pytest.mark.parametrize("policy", ["write_through", "adaptive"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_request_saves_nothing_behind_a_block_of_its_own_that_does_not_fit(place: int, policy: str) -> None:
    """It is computed in chunks, and what others could hit would go for what nobody can reach."""
    half, _ = make_half(write_policy=policy)
    report(half, computed(half, "other"))
    half.request_finished(Asked("other", PROMPT))
    request = Asked("r", list(range(1000, 1041)))
    admit(half, request, 20)
    saved = []
    for start in range(0, 40, 8):
        plan = half.build_connector_meta(SchedulerOutput([ScheduledRequest("r", start, 8)]))
        saved.append(sum(job.num_blocks for job in plan.saves))
        if plan.saves:
            refuse(half, plan, *([place] if start == 0 else []))
    assert saved == [2, 0, 0, 0, 0]
    assert matched(half) == 16
    half.check()


def test_what_waits_is_not_saved_behind_a_block_that_another_request_found_not_to_fit() -> None:
    """Two of one prompt, and a budget of two blocks a step: the second one has the fourth block saved."""
    half, _, watch = test_budget.make_half(20 * test_budget.BLOCK_BYTES)
    one, other = Asked("one", list(range(41))), Asked("other", list(range(41)))
    test_budget.admit(half, one)
    test_budget.admit(half, other, 100)
    tried: list[int] = []
    for items in ([("one", 0, 41)], [("other", 0, 41), ("one", 41, 0)], *[[("one", 41, 0)]] * 6):
        watch.now += 0.1
        plan = half.build_connector_meta(SchedulerOutput([ScheduledRequest(*item) for item in items]))
        host_ids = [block_id for job in plan.saves for block_id in job.host_ids.tolist()]
        names = [one.block_hashes.index(name) for name in half.host.hashes_of(host_ids)]
        tried += names
        jobs = tuple(job.job_id for job in plan.saves)
        missing = ((jobs[0], (host_ids[names.index(3)],)),) if 3 in names else ()
        told = (jobs, (), 300, test_budget.BLOCK_BYTES // 2)
        half.update_connector_output([StepReport(plan.step, rank, *told, missing=missing) for rank in range(2)])
    assert tried == [0, 1, 2, 3]
    half.check()


def test_a_block_of_a_window_that_does_not_fit_is_not_tried_again() -> None:
    half, _, _ = test_budget.make_half(0, groups=(BlockGroup(window_blocks=2),))
    for name, saves in (("one", 4), ("other", 0)):
        plan = computed(half, name)
        assert sum(job.num_blocks for job in plan.saves) == saves
        if plan.saves:
            refuse(half, plan, 2)
            refuse(half, plan, rank=1)
        half.request_finished(Asked(name, PROMPT))
    assert (matched(half), half.metrics.refused_blocks) == (8, 1)
    half.check()


def test_of_blocks_that_did_not_fit_the_last_ones_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "_MOST", 3)
    known = refusals.Refusals()
    keys = [BlockHash(bytes([i]) * 32) for i in range(5)]
    known.judge(0, keys[:2])
    known.judge(10, keys[2:])
    assert [key in known for key in keys] == [False, False, True, True, True]
    assert (known.first_in(keys), known.first_in(keys[:2])) == (2, 2)


def test_an_idle_engine_does_not_try_what_did_not_fit_again_and_again() -> None:
    """It steps for as long as there is something to save before reuse, and the others are saved all the same."""
    half, blocks = make_half(write_policy="write_back")
    request = Asked("r", PROMPT)
    admit(half, request)
    run(half, request)
    half.request_finished(request)
    blocks.order = [(i, request.block_hashes[i]) for i in (3, 2, 1, 0)]
    num_steps = 0
    while half.has_pending_push_work():
        plan = run(half)
        if plan.saves:
            refused = [i for i, b in enumerate(plan.saves[0].device_ids.tolist()) if b == 2]
            refuse(half, plan, *refused)
        num_steps += 1
        assert num_steps < 5
    assert (half.metrics.saved_blocks, half.metrics.refused_blocks) == (3, 1)
    half.check()


def test_a_block_that_was_forgotten_as_it_was_copied_is_not_refused_under_another_s_name() -> None:
    """A reset has let go of it: what its host block is the copy of is nobody's business."""
    half, _ = make_half()
    plan = computed(half, "r")
    half.request_finished(Asked("r", PROMPT))
    half.reset_cache()
    refuse(half, plan, 0)
    plan = computed(half, "again", first_block=20)
    assert [job.num_blocks for job in plan.saves] == [4]
    refuse(half, plan)
    assert matched(half) == 16
    half.check()


def saved(half: SchedulerHalf, names: str, *unfit: int) -> list[int]:
    """Requests of four blocks each, of which those at some places do not fit: how many of each are tried."""
    tried = []
    for name in names:
        plan = computed(half, name, [ord(name)] * 17)
        tried.append(sum(job.num_blocks for job in plan.saves))
        if plan.saves:
            refuse(half, plan, *unfit)
        half.request_finished(Asked(name, [ord(name)] * 17))
    return tried


ALL = range(4)


def test_where_half_of_the_last_blocks_do_not_fit_nothing_is_saved_until_a_reset(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What fitted is served; ranks hear of it, an operator once, and statistics tell."""
    half, _ = make_half(num_host_blocks=100)
    half.refusals.judged_blocks = 16
    assert saved(half, "abcxyz") == [4] * 6
    assert saved(half, "d", *ALL) == [4]
    assert not run(half).unfit
    assert half.get_kv_connector_stats()["saves_are_off"] == 0
    assert saved(half, "efg", *ALL) == [4, 0, 0], "two of the last four"
    assert run(half).unfit
    assert half.get_kv_connector_stats()["saves_are_off"] == 1
    (told,) = [text for text in map(str, caplog.messages) if "do not fit" in text]
    assert told.startswith("8 of the last 16 blocks") and told.endswith('give host_form="raw"')
    assert matched(half, [ord("a")] * 17) == 16, "what fitted is there"
    assert half.reset_cache()
    assert saved(half, "abc", *ALL) == [4] * 3, "of other weights nothing is known yet"
    assert not run(half).unfit
    assert half.get_kv_connector_stats()["saves_are_off"] == 0
    half.check()


def test_a_cache_is_judged_by_a_thousand_blocks() -> None:
    """A few long prompts, of which one may be unusual."""
    for num_judged, are_too_many in ((1023, False), (1024, True)):
        known = refusals.Refusals()
        known.judge(num_judged - 512, [])
        known.judge(0, [BlockHash(i.to_bytes(32, "big")) for i in range(512)])
        assert known.are_too_many is are_too_many


def test_saves_of_before_a_reset_are_not_among_the_last_ones() -> None:
    """Nor is what they refused taken from what was refused since then."""
    known = refusals.Refusals()
    known.judged_blocks = 8
    unfit = [BlockHash(bytes([i]) * 32) for i in range(8)]
    known.judge(0, unfit[:3])
    known.reset()
    known.judge(3, [])
    known.judge(5, [])
    assert not known.are_too_many
    known.judge(3, unfit[3:])
    assert known.are_too_many, "five of the last eight"


def test_how_much_ever_did_not_fit_is_counted_over_resets() -> None:
    """A request of before one knows how many there were, and looks for its own where there are more."""
    known = refusals.Refusals()
    known.judge(0, [BlockHash(b"a" * 32), BlockHash(b"b" * 32)])
    known.reset()
    assert known.num_found == 2
    known.judge(0, [BlockHash(b"a" * 32)])
    assert known.num_found == 3


def test_a_prompt_that_does_not_fit_or_a_few_blocks_of_each_turn_nothing_off() -> None:
    half, _ = make_half(num_host_blocks=200)
    half.refusals.judged_blocks = 16
    assert saved(half, "z", *ALL) == [4]
    assert saved(half, "abcdefghijklmnopqrst", 3) == [4] * 20
    half.check()


def test_an_idle_engine_that_saves_nothing_any_more_takes_no_steps_for_it() -> None:
    half, blocks = make_half(write_policy="write_back")
    half.refusals.judged_blocks = 4
    for name, first in (("one", 0), ("other", 20)):
        request = Asked(name, PROMPT if name == "one" else [7] * 17)
        admit(half, request, first)
        run(half, request)
        half.request_finished(request)
        blocks.order = [(first + i, request.block_hashes[i]) for i in (3, 2, 1, 0)]
        if name == "one":
            refuse(half, run(half), *ALL)
        assert not half.has_pending_push_work()
        assert run(half).saves == ()
    half.check()


def test_what_was_computed_before_saves_were_turned_off_is_not_saved_before_it_is_reused() -> None:
    half, blocks = make_half(write_policy="write_back")
    half.refusals.judged_blocks = 4
    for number, name in enumerate(("known", "unfit")):
        computed(half, name, [number] * 17, first_block=20 * number)
        half.request_finished(Asked(name, [number] * 17))
    orders = [[(20 * n + i, Asked("", [n] * 17).block_hashes[i]) for i in ALL] for n in range(2)]
    blocks.order = orders[1]
    refuse(half, run(half), *ALL)
    blocks.order = orders[0]
    assert run(half).saves == ()
    half.check()


@pytest.mark.parametrize("is_operators", [True, False])
def test_a_pinned_block_that_does_not_fit_is_not_tried_again_and_turns_nothing_off(is_operators: bool) -> None:
    half, _ = make_half(num_host_blocks=40)
    half.refusals.judged_blocks = 8
    asked = Hinted("first", PROMPT, cache=None if is_operators else {"pin": True})
    if is_operators:
        half.pin_prefix(asked.block_hashes, are_given=False)
    admit(half, asked)
    plan = run(half, asked)
    refuse(half, plan, 1)
    half.request_finished(asked)
    for number in range(10):
        again = Hinted(str(number), PROMPT, cache=None if is_operators else {"pin": True})
        assert admit(half, again) == 4
        plan = run(half, again, computed=4)
        assert plan.saves == ()
        report(half, plan)
        half.request_finished(again)
    assert half.metrics.refused_blocks == 1 and not half.refusals.are_too_many
    half.check()
