"""When loads in the background are expected to end, whatever a link and its callers do: fail, drop, be late, rest."""

from __future__ import annotations

from math import isfinite

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_connector.config import Config
from kv_connector.metrics import CacheMetrics
from kv_connector.scheduler.loads.choice import BackgroundLoad, LoadPlanner
from kv_connector.types import CopyJob, Direction

RATE = 100  # blocks a second


class Link:
    """Serves loads in order, each from `delay` after its admission on. Ranks look right behind the plan of a step, what
    they say comes in `lag` steps later, and the engine plans no step that has to wait."""

    def __init__(self, lag: int = 0) -> None:
        self.now = 1000.0
        self.planner = LoadPlanner(Config(load_choice="async", max_load_stall_ms=0), CacheMetrics(), lambda: self.now)
        self.planner.estimate.observe_load(RATE, 1.0)
        self.open: dict[int, tuple[CopyJob, BackgroundLoad, float, bool]] = {}  # and its end, and whether it fails
        self.early: dict[int, float] = {}  # seconds from a load's announcement to its end
        self._lag = lag
        self._seen: list[tuple[int, float]] = []  # steps, and when ranks looked
        self._step = self._next = 0
        self._free_at = 0.0
        self.rate = float(RATE)  # of loads that come from now on; what is known of the link follows

    @property
    def announced(self) -> set[int]:
        return set(self.early)

    @property
    def expected(self) -> list[float]:
        """Seconds from now to the expected ends of loads under way, in the order of the link."""
        return [load.expected_end - self.now for _, load, *_ in self.open.values() if load.expected_end is not None]

    def reserve(self, count: int, may_announce: bool = True) -> BackgroundLoad:
        self._next += 1
        return self.planner.reserve(range(1000 * self._next, 1000 * self._next + count), may_announce)

    def load(self, count: int, delay: float = 0.0, fails: bool = False, may_announce: bool = True) -> int:
        """One that fails does so when it is to begin."""
        load = self.reserve(count, may_announce)
        ids = np.array(load.host_ids, dtype=np.int64)
        self._free_at = max(self.now + delay, self._free_at) + (0.0 if fails else count / self.rate)
        self.planner.begin(load, self._next)
        job = CopyJob(self._next, Direction.LOAD, ids, ids, f"r{self._next}")
        self.open[self._next] = job, load, self._free_at, fails
        return self._next

    def step(self, seconds: float = 0.02) -> None:
        self.now += seconds
        self._step += 1
        self.planner.estimate.step_planned(self._step, 1, 1, 0, self.now)
        for job_id in self.planner.announce(self._step)[0]:
            self.early[job_id] = self.open[job_id][2] - self.now
        self._seen.append((self._step, self.now))
        if len(self._seen) > self._lag:
            self._report(*self._seen.pop(0))

    def _report(self, step: int, at: float) -> None:
        ended = [job_id for job_id, (_, _, end, _) in self.open.items() if end <= at]
        count = 0
        for job_id in ended:
            job, _, _, fails = self.open.pop(job_id)
            self.planner.end(job, not fails)
            count += 0 if fails else job.num_blocks
        if count:
            self.planner.observe(count, count / self.rate)
        self.planner.note_reported(step)

    def run_until_idle(self) -> None:
        while self.open:
            self.step()


def test_a_load_that_failed_is_not_expected_any_more() -> None:
    link = Link()
    link.load(3000, fails=True)  # half a minute, that it does not take
    behind = link.load(30)
    assert link.expected[1] == pytest.approx(30.3)
    link.step()
    assert link.expected == [pytest.approx(0.3)]
    link.run_until_idle()
    assert behind in link.announced
    link.load(3000, fails=True)
    link.step()
    link.load(30)
    assert link.expected == [pytest.approx(0.3)]


def test_a_load_that_was_dropped_before_it_was_planned_is_not_expected() -> None:
    link = Link()
    link.planner.release(link.reserve(3000))
    link.load(30)
    assert link.expected == [pytest.approx(0.3)]
    link.run_until_idle()
    front, dropped, behind = link.load(30), link.reserve(3000), link.load(30)
    link.planner.release(dropped)
    while front in link.open:
        link.step()
    assert link.expected == [pytest.approx(0.3)]
    link.run_until_idle()
    assert behind in link.announced


def learn(link: Link, delay: float) -> None:
    for _ in range(3):
        link.load(30, delay, may_announce=False)  # nobody waits on the device, and it is seen how late it is
        link.run_until_idle()
    assert link.planner.estimate.delay_seconds > delay - 0.1


@pytest.mark.parametrize("rate", [RATE * 1.05, RATE * 1.5, RATE * 4])
@pytest.mark.parametrize("fails", [False, True])
def test_a_long_load_that_was_faster_than_expected_counts_once_for_those_behind_it(rate: float, fails: bool) -> None:
    """Else they are announced before they have begun, and steps wait for them. One may fail in the same step."""
    link = Link()
    link.rate = rate
    link.load(1000)
    if fails:
        link.load(30, fails=True)
    for _ in range(4):
        link.load(60)
    link.run_until_idle()
    assert max(link.early.values(), default=0.0) <= 0.02 + 1e-6


def test_a_load_is_expected_behind_one_that_reads_the_same_blocks_as_one_that_was_dropped() -> None:
    link = Link()
    front = link.load(300)
    _, load, *_ = link.open[front]
    link.planner.release(link.planner.reserve(load.host_ids))
    link.load(30)
    assert link.expected[1] >= 3.3 - 1e-6


def test_a_load_that_was_just_admitted_does_not_begin_with_the_end_of_the_one_in_front_of_it() -> None:
    link = Link()
    learn(link, 0.45)
    front = link.load(30, 0.45)
    while link.expected[0] > 0.05:
        link.step()
    link.load(30, 0.45)
    while front in link.open:
        link.step()
    assert 0.5 < link.expected[0] < 0.75


@pytest.mark.parametrize("delay", [0.45, 30.0])
def test_what_was_learned_while_the_link_was_idle_is_forgotten_while_it_never_is(delay: float) -> None:
    """Else nobody would be told of a load before it has ended as long as somebody always has one under way."""
    link = Link()
    learn(link, delay)
    loads = list[int]()
    while len(loads) < 40:
        while len(link.open) < 2:
            loads.append(link.load(30))
        link.step()
    link.run_until_idle()
    assert link.announced >= set(loads[8:])


@settings(deadline=None, max_examples=60)
@given(
    lag=st.integers(0, 2),
    events=st.lists(
        st.tuples(
            st.sampled_from(["step", "step", "step", "load", "load", "fail", "drop", "silent"]),
            st.sampled_from([0, 1, 30, 400]),
            st.sampled_from([0.0, 0.03, 0.4, 7.0]),
            st.sampled_from([0.0, 0.01, 0.02, 0.3, 3000.0]),
        ),
        max_size=80,
    ),
)
def test_no_expectation_outlives_what_it_was_made_of(lag: int, events: list[tuple[str, int, float, float]]) -> None:
    link, most = Link(lag), 0.0  # that was learned
    for what, count, delay, seconds in events:
        if what == "step":
            link.step(seconds)
        elif what == "drop":
            link.planner.release(link.reserve(count))
        else:
            link.load(count, delay, fails=what == "fail", may_announce=what != "silent")
        learned = link.planner.estimate.delay_seconds
        most = max(most, learned)
        assert all(map(isfinite, (*link.expected, link.planner._busy_until, learned))) and learned >= 0
        if link.open:
            _, first, *_ = next(iter(link.open.values()))
            begin = max(link.now, first.reserved_at + most)
            assert first.expected_end is not None and first.expected_end <= begin + first.seconds + 1e-6
    link.run_until_idle()
    for _ in range(lag + 1):
        link.step()
    assert not link.planner.any_in_background and link.planner._busy_until <= link.now
    for _ in range(8):  # loads that begin at once, whatever came before
        link.load(30)
        link.run_until_idle()
    assert link.planner.estimate.delay_seconds <= 0.02 * (lag + 1)
    link.load(30)
    assert link.expected[0] <= 0.3 + 0.02 * (lag + 1) + 1e-6
