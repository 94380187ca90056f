"""How a hit comes to the device, and loads in the background."""

from __future__ import annotations

import numpy as np
import pytest

from kv_connector.config import Config
from kv_connector.metrics import CacheMetrics
from kv_connector.scheduler.loads.choice import LoadPlanner, is_light
from kv_connector.scheduler.loads.rates import HitLoad, LoadMode
from kv_connector.types import CopyJob, Direction


class Background:
    """A planner whose loads take a second for 100 blocks; steps are planned every 0.2 s, and none holds others up."""

    def __init__(self) -> None:
        self.now = 10.0
        self.metrics = CacheMetrics()
        self.planner = LoadPlanner(Config(load_choice="async", max_load_stall_ms=0), self.metrics, lambda: self.now)
        self.planner.estimate.observe_load(100, 1.0)
        self.step = 0
        for _ in range(5):
            self.plan()
            self.planner.note_reported(self.step)

    def load(self, job_id: int, first_host: int, count: int) -> CopyJob:
        ids = np.arange(first_host, first_host + count)
        self.planner.begin(self.planner.reserve(ids.tolist()), job_id)
        return CopyJob(job_id, Direction.LOAD, ids, ids, f"r{job_id}")

    def plan(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(announced, awaited) of the next step."""
        self.now += 0.2
        self.step += 1
        self.planner.estimate.step_planned(self.step, 1, 1, 0, self.now)
        return self.planner.announce(self.step)


def test_a_load_is_announced_a_step_before_it_ends_and_awaited_once_the_engine_knows() -> None:
    loads = Background()
    job = loads.load(1, 0, 50)  # ends at + 0.5
    assert loads.plan() == ((), ()), "two more steps fit in"
    loads.planner.note_reported(loads.step)
    assert loads.plan() == ((1,), ()), "it will be there when the step behind this one begins"
    assert loads.plan() == ((), ()), "planned before the engine took note"
    loads.planner.note_reported(loads.step)
    assert loads.plan() == ((), (1,)), "it is late, and requests may read its blocks"
    assert loads.plan() == ((), (1,)), "every step waits until it has ended"
    assert loads.metrics.awaited_async_loads == 1, "one load"
    loads.planner.end(job)
    assert loads.plan() == ((), ())


def test_an_engine_that_plans_ahead_is_told_a_step_earlier() -> None:
    loads = Background()
    loads.plan()
    loads.load(1, 0, 70)  # ends at + 0.7
    assert loads.plan()[0] == (), "0.5 s are left"
    loads.planner.note_reported(loads.step - 1)
    assert loads.plan()[0] == (1,), "0.3 s are left, and the engine takes note while the next step runs"


def test_loads_follow_one_another_on_the_link() -> None:
    """Each is expected to end when those before it have: told sooner, the engine would plan steps that wait for it."""
    loads = Background()
    first, _ = loads.load(1, 0, 50), loads.load(2, 100, 45)  # end at + 0.5 and + 0.95
    announced = []
    for number in range(5):
        announced.append(loads.plan()[0])
        if number == 2:
            loads.planner.end(first)
            loads.planner.observe(50, 0.5)
        loads.planner.note_reported(loads.step)
    assert announced == [(), (1,), (), (2,), ()]


def test_a_step_does_not_wait_for_a_load_that_the_engine_has_not_heard_of() -> None:
    """Where steps are planned ahead, what comes in is of one from before the announcement: nobody reads the blocks."""
    loads = Background()
    loads.load(1, 0, 10)  # ends at + 0.1
    assert loads.plan() == ((1,), ())
    loads.planner.note_reported(loads.step - 1)
    assert loads.plan() == ((), ())
    assert loads.metrics.awaited_async_loads == 0
    loads.planner.note_reported(loads.step - 1)
    assert loads.plan() == ((), (1,))


def test_loads_behind_one_that_took_longer_end_later() -> None:
    loads = Background()
    first, _ = loads.load(1, 0, 10), loads.load(2, 100, 95)  # end at + 0.1 and + 1.05
    loads.now += 1.1
    loads.planner.end(first)
    loads.planner.observe(10, 1.1)  # a second late
    for _ in range(3):
        assert loads.plan() == ((), ())
        loads.planner.note_reported(loads.step)
    assert loads.plan()[0] == (2,), "0.15 s are left"


def run_alone(loads: Background, job_id: int, delay: float) -> float:
    """A load whose copies begin so long after its admission: for how many seconds the step waits that reads it."""
    size, waited = 40 + job_id * 7 % 20, 0.0
    job, end = loads.load(job_id, 0, size), loads.now + delay + size / 100
    while loads.now < end:  # in each step ranks look right behind its plan
        _, awaited = loads.plan()
        if loads.now < end:
            waited = end - loads.now if awaited else 0.0
            loads.now += waited
            loads.planner.note_reported(loads.step)
    loads.planner.end(job)
    loads.planner.observe(size, size / 100)
    loads.planner.note_reported(loads.step)
    return waited


def test_loads_that_begin_later_than_they_are_admitted_are_announced_later() -> None:
    """A step that waits for one keeps all other requests waiting. Where they begin at once again, that is forgotten."""
    loads = Background()
    waited = [run_alone(loads, job_id, delay=0.45) for job_id in range(40)]
    assert min(waited[:2]) > 0.2 and max(waited[10:]) < 0.1
    assert 0.3 < loads.planner.estimate.delay_seconds <= 0.45, "no more than is proven, by steps of 0.2"
    for job_id in range(40, 47):
        run_alone(loads, job_id, delay=0.0)
    assert loads.planner.estimate.delay_seconds == 0


def test_of_loads_that_begin_at_once_none_is_announced_later() -> None:
    """Their ends are heard of up to a step late."""
    loads = Background()
    assert not any(run_alone(loads, job_id, delay=0.0) for job_id in range(20))
    assert loads.planner.estimate.delay_seconds == 0


def test_one_load_that_was_very_late_delays_no_other() -> None:
    loads = Background()
    run_alone(loads, 1, delay=30.0)
    assert loads.planner.estimate.delay_seconds == 0


def test_loads_behind_one_that_is_late_are_not_announced_before_it_ends() -> None:
    """Who is told waits for both. When the first has ended, the second is as late as that one was, and no later."""
    loads = Background()
    first, _ = loads.load(1, 0, 10), loads.load(2, 100, 60)  # end at + 0.1 and + 0.7
    for _ in range(5):
        assert 2 not in loads.plan()[0], "the first is under way"
        loads.planner.note_reported(loads.step)
    assert loads.plan() == ((), (1,))  # + 1.2
    loads.now += 0.4
    loads.planner.end(first)
    loads.planner.observe(10, 1.1)  # it ended at + 1.1, which is heard of at + 1.6
    loads.planner.note_reported(loads.step)
    assert loads.plan()[0] == (2,), "it ended at + 1.7"


def test_a_load_that_failed_makes_no_other_look_sooner() -> None:
    """How long it ran is not known, and the link may have been idle since."""
    loads = Background()
    loads.planner.end(loads.load(1, 0, 1000), ok=False)
    loads.now += 20.0
    first, _ = loads.load(2, 0, 10), loads.load(3, 100, 50)  # end at + 0.1 and + 0.6
    loads.now += 0.1
    loads.planner.end(first)
    loads.planner.observe(10, 0.1)
    assert loads.plan()[0] == (), "0.3 s are left"
    loads.planner.note_reported(loads.step)
    assert loads.plan()[0] == (3,)


def test_the_link_is_idle_once_all_loads_have_ended() -> None:
    loads = Background()
    loads.planner.end(loads.load(1, 0, 100))  # sooner than expected
    loads.planner.observe(100, 1.0)
    loads.load(2, 0, 30)  # ends at + 0.3
    assert loads.plan()[0] == (2,)


def test_with_an_unknown_rate_nothing_is_announced() -> None:
    loads = Background()
    loads.planner = LoadPlanner(Config(load_choice="async"), loads.metrics, lambda: loads.now)
    loads.load(1, 0, 1)
    assert [loads.plan() for _ in range(5)] == [((), ())] * 5


@pytest.mark.parametrize("choice", ["sync", "async", "auto"])
def test_no_step_loads_for_an_engine_that_is_told_of_failures_by_request(choice: str) -> None:
    """Such an engine ends where blocks of a step failed: none is in a step, nor said to be there before it is."""
    planner = LoadPlanner(Config(load_choice=choice), CacheMetrics(), lambda: 10.0, fails_by_block=False)
    assert planner.choose("r1", HitLoad(10, 160, 1, 0), (0,)) is LoadMode.ASYNC
    planner.estimate.observe_load(10**6, 1.0)
    planner.begin(planner.reserve(range(10)), 1)
    assert planner.announce(1) == ((), ()), "it would end in 10 us"
    assert planner.choose("r2", HitLoad(10, 160, 1, 1), (0,)) is LoadMode.COALESCED


@pytest.mark.parametrize(("fails_by_block", "mode"), [(True, LoadMode.SYNC), (False, LoadMode.RECOMPUTE)])
def test_who_has_waited_in_vain_does_not_wait_again(fails_by_block: bool, mode: LoadMode) -> None:
    """vLLM refuses blocks to a request that is to wait while others have theirs reserved, and looks at nobody else."""
    planner = LoadPlanner(Config(load_choice="async"), CacheMetrics(), lambda: 10.0, fails_by_block)
    assert planner.choose("r", HitLoad(10, 160, 1, 1), ()) is LoadMode.ASYNC
    assert planner.choose("r", HitLoad(10, 160, 1, 1), (), may_wait=False) is mode


def test_who_asks_again_and_again_rides_on_a_load_once() -> None:
    """An engine asks for every request that waits, in every step."""
    metrics = CacheMetrics()
    planner = LoadPlanner(Config(load_choice="async"), metrics, lambda: 10.0)
    planner.reserve(range(10))
    for request_id in ("a", "b"):
        for _ in range(3):
            assert planner.choose(request_id, HitLoad(10, 160, 1, 1), (0,)) is LoadMode.COALESCED
    assert metrics.coalesced_loads == 2


@pytest.mark.parametrize(("num_computed_tokens", "expected"), [(0, True), (20, True), (21, False)])
def test_a_step_is_light_that_computes_a_sixteenth_of_what_it_loads(num_computed_tokens: int, expected: bool) -> None:
    ids = np.arange(10)
    loads = [CopyJob(number, Direction.LOAD, ids, ids) for number in range(2)]
    assert is_light(loads, 16, num_computed_tokens) is expected
    assert not is_light([], 16, num_computed_tokens), "it loads nothing"
