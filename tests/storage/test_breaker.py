"""The breaker of a remote store: when requests are let through, and when it is probed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_connector.storage.breaker import Breaker, BreakerState


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_it_opens_on_failures_in_a_row_and_closes_by_a_probe() -> None:
    clock = Clock()
    breaker = Breaker(clock, max_failures=3, first_pause=1)
    for end in (breaker.failed, breaker.failed, breaker.succeeded, breaker.failed, breaker.failed):
        end()
        assert breaker.allows
    assert breaker.seconds_to_probe() is None
    breaker.failed()
    assert (breaker.state, breaker.allows, breaker.seconds_to_probe()) == (BreakerState.OPEN, False, 1)
    assert not breaker.begin_probe(), "the pause is not over"
    clock.now = 1
    assert breaker.begin_probe()
    assert (breaker.state, breaker.allows) == (BreakerState.HALF_OPEN, False), "requests are no probes"
    assert not breaker.begin_probe(), "one probe at a time"
    assert breaker.seconds_to_probe() is None, "whoever waits to probe has nothing to do until this one has ended"
    breaker.end_probe(ok=True)
    assert breaker.allows
    breaker.failed()
    assert breaker.allows, "failures of before are forgotten"


def test_what_ends_it_at_once_opens_it_at_once() -> None:
    breaker = Breaker(Clock())
    breaker.failed(at_once=True)
    breaker.failed(at_once=True)  # was under way when it opened
    breaker.succeeded()
    assert (breaker.allows, breaker.num_opened) == (False, 1)


def test_a_store_that_stays_away_is_probed_ever_less_often() -> None:
    clock = Clock()
    breaker = Breaker(clock, first_pause=1, longest_pause=5, is_open=True)
    pauses = []
    for _ in range(5):
        clock.now += breaker.seconds_to_probe() or 0
        assert breaker.begin_probe()
        breaker.end_probe(ok=False)
        pauses.append(breaker.seconds_to_probe())
    assert pauses == [2, 4, 5, 5, 5]
    clock.now += 5
    assert breaker.begin_probe()
    breaker.end_probe(ok=True)
    breaker.failed(at_once=True)
    assert breaker.seconds_to_probe() == 1, "a new episode starts with a short pause"


def test_it_can_start_open_with_a_probe_due() -> None:
    breaker = Breaker(Clock(), is_open=True)
    assert (breaker.allows, breaker.seconds_to_probe()) == (False, 0)
    assert breaker.begin_probe()


def test_a_probe_that_was_not_granted_cannot_end() -> None:
    with pytest.raises(AssertionError, match="a probe ended"):
        Breaker(Clock()).end_probe(ok=True)


EVENTS = st.sampled_from(["succeeded", "failed", "fatal", "wait", "probe ok", "probe failed"])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(EVENTS, max_size=60), st.integers(1, 4))
def test_whatever_happens_it_is_open_only_for_a_reason_and_never_for_good(events: list[str], limit: int) -> None:
    clock = Clock()
    breaker = Breaker(clock, max_failures=limit, first_pause=1, longest_pause=4)
    in_a_row = 0
    for event in events:
        was_closed = breaker.allows
        if event in ("failed", "fatal"):
            breaker.failed(at_once=event == "fatal")
            in_a_row += 1
            assert not was_closed or breaker.allows == (in_a_row < limit and event == "failed")
        elif event == "succeeded":
            breaker.succeeded()
            assert breaker.allows == was_closed, "only a probe closes it"
            in_a_row = 0
        elif event == "wait":
            clock.now += 1
        elif breaker.begin_probe():
            breaker.end_probe(ok=event == "probe ok")
            assert breaker.allows == (event == "probe ok")
        if breaker.allows:
            in_a_row = 0 if not was_closed else in_a_row
        else:
            wait = breaker.seconds_to_probe()
            assert wait is not None and wait <= 4
    if not breaker.allows:
        clock.now += 4
        assert breaker.begin_probe(), "there is always a way back"
