"""Observed rates, and how a hit comes to the device by them."""

from __future__ import annotations

import pytest

from kv_connector.config import Config
from kv_connector.metrics import CacheMetrics
from kv_connector.scheduler.loads.choice import LoadPlanner
from kv_connector.scheduler.loads.rates import HitLoad, LoadEstimate, LoadMode


def make_estimate(blocks_per_second: float = 1000, tokens_per_second: float = 1000) -> LoadEstimate:
    """Rates as steps and loads of one second show them."""
    estimate = LoadEstimate(max_stall_seconds=0.01)
    estimate.observe_load(int(blocks_per_second), 1.0)
    estimate.step_planned(1, int(tokens_per_second), int(tokens_per_second), 0, now=10.0)
    estimate.step_ended(1, now=11.0)
    return estimate


def choose(
    estimate: LoadEstimate,
    blocks: int = 100,
    new: int = 1,
    others: int = 1,
    coalesced: float | None = None,
    is_short: bool = False,
) -> LoadMode:
    """A hit of blocks of 16 tokens."""
    return estimate.choose(HitLoad(blocks, 16 * blocks, new, others), coalesced, found_no_room=is_short)


def teach(planner: LoadPlanner) -> None:
    """1,000 blocks a second are loaded, and 10,000 tokens computed."""
    planner.estimate.observe_load(1000, 1.0)
    for number in range(1, 8):
        planner.estimate.step_planned(number, 1000, 1000, 0, now=10.0 + 0.1 * number)
        planner.estimate.step_ended(number, now=10.1 + 0.1 * number)


def test_as_long_as_a_rate_is_unknown_hits_are_loaded_at_once() -> None:
    estimate = LoadEstimate(max_stall_seconds=0.01)
    assert choose(estimate) is LoadMode.SYNC
    estimate.observe_load(100, 1.0)
    assert choose(estimate) is LoadMode.SYNC


def test_a_load_that_holds_others_up_runs_beside_them() -> None:
    estimate = make_estimate()
    assert choose(estimate) is LoadMode.ASYNC
    assert choose(estimate, others=0) is LoadMode.SYNC, "there is nobody to hold up"
    assert choose(estimate, new=100) is LoadMode.SYNC, "it hides behind what the request computes"
    assert choose(estimate, blocks=5) is LoadMode.SYNC, "5 ms are allowed"


@pytest.mark.parametrize(
    ("num_others", "new", "mode"), [(1, 1, "sync"), (2, 1, "async"), (2, 400, "sync"), (20, 1, "async")]
)
def test_where_blocks_are_scarce_what_counts_is_for_how_long_they_lie_idle(
    num_others: int, new: int, mode: str
) -> None:
    """A load of 100 ms, of which 10 hide behind each 100 new tokens: in the step it holds up what everybody has, and in
    the background what the request has for 200 ms."""
    estimate = make_estimate(tokens_per_second=10_000)
    assert choose(estimate, others=num_others, new=new, is_short=True).value == mode
    assert choose(estimate, others=num_others, new=new) is LoadMode.ASYNC, "there are more blocks"


def teach_launches(planner: LoadPlanner, seconds: float, num_tokens: int = 100, num_loaded: int = 0) -> None:
    """Eight steps that compute a prompt took the thread so long."""
    for number in range(8):
        planner.estimate.step_planned(number, num_tokens, num_tokens, num_loaded, now=20.0)
        planner.estimate.step_ended(number, now=20.0, launch_seconds=seconds)


@pytest.mark.parametrize(
    ("num_beginning", "num_in_step", "launch", "mode"),
    [
        (0, 0, 0.1, "sync"),  # a step begins with it in any case, which takes as long
        (0, 0, 0.09, "async"),
        (0, 0, 0.0, "async"),
        (1, 100, 0.1, "sync"),  # one step of 200 ms for both, or two of 100
        (1, 100, 0.09, "async"),  # 20 ms longer than two of 90
        (1, 20, 0.06, "sync"),
        (1, 20, 0.05, "async"),
        (1, 0, 0.05, "sync"),  # of 100 ms for both, or two of 50
        (1, 0, 0.04, "async"),
    ],
)
def test_a_load_holds_nobody_up_for_as_long_as_launching_a_prompt_does(
    num_beginning: int, num_in_step: int, launch: float, mode: str
) -> None:
    """Of 100 ms, beside one that decodes, or begins in the same step."""
    planner = LoadPlanner(Config(), CacheMetrics(), lambda: 10.0)
    teach(planner)
    teach_launches(planner, launch)
    planner.load_in_step(num_in_step)
    assert planner.choose("a", HitLoad(100, 1600, 2, 1, num_beginning), ()).value == mode
    planner.announce(8)
    assert planner.choose("b", HitLoad(100, 1600, 2, 1), ()).value == ("sync" if launch == 0.1 else "async")


def test_a_prompt_of_which_one_token_is_left_is_launched_as_one_that_decodes() -> None:
    """In a graph, which takes no time: so nothing hides its load from those that decode."""
    planner = LoadPlanner(Config(), CacheMetrics(), lambda: 10.0)
    teach(planner)
    teach_launches(planner, 0.2)
    modes = [planner.choose(f"{new}", HitLoad(100, 1600, new, 1), ()) for new in (1, 2)]
    assert modes == [LoadMode.ASYNC, LoadMode.SYNC]


def test_who_decodes_is_held_up_no_longer_for_the_sake_of_those_who_begin() -> None:
    """One that begins, and one that decodes: the step is to take no longer for a second one that begins."""
    planner = LoadPlanner(Config(), CacheMetrics(), lambda: 10.0)
    teach(planner)
    teach_launches(planner, 0.2)
    planner.load_in_step(100)
    assert planner.choose("a", HitLoad(101, 1600, 2, 2, 1), ()) is LoadMode.SYNC
    planner.load_in_step(101)
    assert planner.choose("b", HitLoad(100, 1600, 2, 3, 2), ()) is LoadMode.ASYNC


@pytest.mark.parametrize(
    ("num_tokens", "num_loaded", "num_known", "mode"),
    [
        (100, 0, 8, "sync"),
        (1025, 0, 8, "async"),
        (31, 0, 8, "async"),
        (100, 900, 8, "sync"),
        (100, 920, 8, "async"),
        (100, 1300, 8, "async"),
        (100, 1400, 8, "sync"),
        (100, 0, 7, "async"),
    ],
)
def test_launches_are_learned_from_steps_with_short_prompts_whose_thread_has_waited_for_nothing(
    num_tokens: int, num_loaded: int, num_known: int, mode: str
) -> None:
    """Where much is computed the thread may have waited for the device, and for a load where that takes as long; drafts
    are launched as tokens are. Of eight the shortest counts: one may have been compiled."""
    planner = LoadPlanner(Config(), CacheMetrics(), lambda: 10.0)
    teach(planner)
    teach_launches(planner, 1.0, num_tokens, num_loaded)
    if num_known < 8:
        planner.estimate.step_planned(9, 100, 100, 0, now=30.0)
        planner.estimate.step_ended(9, now=30.0, launch_seconds=0.001)
    assert planner.choose("a", HitLoad(100, 1600, 2, 1), ()).value == mode


@pytest.mark.parametrize(
    ("num_tokens", "most_tokens", "num_loaded", "launch", "mode"),
    [
        (17, 17, 1, 0.09, "async"),
        (100, 100, 1, 0.09, "async"),
        (5000, 5000, 0, 0.09, "async"),
        (9, 1, 1, 0.09, "sync"),  # a graph launched it, as a step that decodes
        (64, 8, 0, 0.09, "sync"),  # drafts
    ],
)
def test_what_launching_a_prompt_has_taken_in_bad_times_is_forgotten_though_all_prompts_load(
    num_tokens: int, most_tokens: int, num_loaded: int, launch: float, mode: str
) -> None:
    """Eight prompts in a row were slow to launch, as the host was busy. Since then all have hits, which are loaded in
    the step: it would stay so."""
    planner = LoadPlanner(Config(), CacheMetrics(), lambda: 10.0)
    teach(planner)
    teach_launches(planner, 0.1)
    planner.estimate.step_planned(8, num_tokens, most_tokens, num_loaded, now=30.0)
    planner.estimate.step_ended(8, now=40.0, launch_seconds=launch)
    assert planner.choose("a", HitLoad(100, 1600, 2, 1), ()).value == mode


@pytest.mark.parametrize(("num_tokens", "num_loaded"), [(100, 200), (5000, 0)])
def test_a_thread_that_has_waited_for_a_load_or_the_device_has_not_launched_for_as_long(
    num_tokens: int, num_loaded: int
) -> None:
    """However many steps of that kind there are."""
    planner = LoadPlanner(Config(), CacheMetrics(), lambda: 10.0)
    teach(planner)
    teach_launches(planner, 0.09)
    teach_launches(planner, 0.2, num_tokens, num_loaded)
    assert planner.choose("a", HitLoad(100, 1600, 2, 1), ()) is LoadMode.ASYNC


def test_a_step_that_was_over_before_it_was_looked_at_took_no_longer_than_from_its_plan_on() -> None:
    """The thread launches the next step first: the report of this one is looked at right behind that of the one before,
    however long it took. In an engine that is always busy with short prompts no other step is ever seen, and the first
    one was slow."""
    estimate = make_estimate()
    for number, num_tokens, seconds in ((2, 1000, 1.5), (4, 1000, 0.030), (6, 1000, 0.5)):
        estimate.step_planned(number, 10, 10, 0, now=10.0 * number)
        estimate.step_planned(number + 1, num_tokens, num_tokens, 0, now=10.0 * number)
        estimate.step_ended(number, 10.0 * number + seconds - 0.001)
        estimate.step_ended(number + 1, 10.0 * number + seconds, launch_seconds=0.028)
        assert estimate.recompute_seconds(1000) == pytest.approx(1.0 if number == 2 else 0.030)


def test_steps_whose_reports_come_in_together_leave_nothing_behind() -> None:
    """Of several at once the last one is looked at, and the others are over."""
    estimate = make_estimate()
    for number in range(2, 50):
        estimate.step_planned(number, 1000, 1000, 0, now=10.0 * number)
        if number % 2:
            estimate.step_ended(number, now=10.0 * number + 1)
    assert not estimate._steps


def test_who_begins_with_others_spares_them_a_step_that_computes_its_prompt() -> None:
    """Its step takes 145 ms, and launching it 28: a load may take 10 ms longer than two such steps."""
    estimate = make_estimate(tokens_per_second=1000)
    estimate.step_planned(2, 40, 40, 0, now=20.0)
    estimate.step_ended(2, now=20.0, launch_seconds=0.028)
    modes = [estimate.choose(HitLoad(blocks, 16 * blocks, 145, 1, 1), None) for blocks in (299, 301)]
    assert modes == [LoadMode.SYNC, LoadMode.ASYNC]


def test_where_blocks_are_scarce_what_others_load_in_the_step_is_not_counted_for_them() -> None:
    """A load of 100 ms behind one of 80 holds up three for 300 together, and in the background its own for 200."""
    hit = HitLoad(100, 1600, 1, 2)
    assert make_estimate().choose(hit, None, num_in_step=80, found_no_room=True) is LoadMode.ASYNC


def test_what_short_loads_of_one_step_hold_others_up_for_is_limited_in_all() -> None:
    """Each may take 10 ms beside one that decodes, and takes 4."""
    estimate, hit = make_estimate(tokens_per_second=100), HitLoad(4, 64, 0, 2, 1)
    modes = [estimate.choose(hit, None, num_in_step) for num_in_step in (0, 4, 8)]
    assert modes == [LoadMode.SYNC, LoadMode.SYNC, LoadMode.ASYNC]


def test_a_stall_of_the_most_that_is_allowed_is_allowed() -> None:
    estimate = LoadEstimate(max_stall_seconds=0.5)
    estimate.observe_load(64, 1.0)
    estimate.step_planned(1, 512, 512, 0, now=10.0)
    estimate.step_ended(1, now=11.0)
    modes = [estimate.choose(HitLoad(blocks, 16 * blocks, 0, 1), None) for blocks in (32, 33)]
    assert modes == [LoadMode.SYNC, LoadMode.ASYNC]


def test_a_request_that_asks_again_has_found_no_room_unless_it_was_told_to_ask_again() -> None:
    planner = LoadPlanner(Config(), CacheMetrics(), lambda: 10.0)
    teach(planner)
    asked = [planner.choose("a", HitLoad(100, 1600, 1, 1), ()) for _ in range(3)]
    assert asked == [LoadMode.ASYNC, LoadMode.SYNC, LoadMode.SYNC]
    assert planner.admit("a") is LoadMode.SYNC
    assert planner.choose("a", HitLoad(100, 1600, 1, 1), ()) is LoadMode.ASYNC, "it was preempted, and asks anew"
    load = planner.reserve(range(7, 17))
    assert planner.choose("b", HitLoad(10, 1600, 1, 1), (7,)) is LoadMode.COALESCED
    planner.release(load)
    assert planner.choose("b", HitLoad(100, 1600, 1, 1), (7,)) is LoadMode.ASYNC


def test_what_is_sooner_computed_is_computed_but_not_for_ever() -> None:
    estimate = make_estimate(tokens_per_second=10**6)
    for _ in range(8):
        assert choose(estimate) is LoadMode.RECOMPUTE
        estimate.admitted(LoadMode.RECOMPUTE)
    assert choose(estimate) is not LoadMode.RECOMPUTE, "or an estimate that was spoilt once would never mend"
    estimate.admitted(LoadMode.ASYNC)
    assert choose(estimate) is LoadMode.RECOMPUTE


def test_one_slow_load_is_forgotten_with_the_next_fast_one() -> None:
    estimate = LoadEstimate(max_stall_seconds=0.01)
    estimate.observe_load(100, 60.0)
    estimate.observe_load(100, 0.1)
    assert estimate.load_seconds(100) == 0.1
    estimate.observe_load(100, 60.0)
    seconds = estimate.load_seconds(100)
    assert seconds is not None and seconds < 0.2


def test_sharers_ride_unless_computing_is_sooner() -> None:
    estimate = make_estimate()
    assert choose(estimate, coalesced=0.5) is LoadMode.COALESCED
    assert choose(estimate, coalesced=2.0) is LoadMode.RECOMPUTE
    assert choose(LoadEstimate(0.01), coalesced=0.0) is LoadMode.COALESCED


def test_steps_overlap_and_small_ones_say_nothing() -> None:
    estimate = make_estimate()
    estimate.step_planned(2, 10, 10, 0, now=11.0)
    estimate.step_ended(2, now=20.0)
    assert estimate.recompute_seconds(1600) == 1.6, "10 tokens took 9 seconds, which is no speed of prefill"
    estimate.step_planned(3, 10_000, 10_000, 1, now=20.0)
    estimate.step_ended(3, now=60.0)
    assert estimate.recompute_seconds(1600) == 1.6, "of 40 seconds some were those of a load"
    estimate.step_planned(4, 1000, 1000, 0, now=20.5)
    estimate.step_ended(4, now=61.0)
    assert choose(estimate, coalesced=1.5) is LoadMode.COALESCED, "still 1,000 tokens a second: computing takes 1.6 s"
