"""Rates of reuse: a long memory where a load stays what it is, a short one where it becomes another."""

from __future__ import annotations

import numpy as np

from kv_connector.index.rates import Rates, Table, _best_rates, _smoothed


def part(events: Table, of_class: int) -> tuple[Table, Table, int]:
    """So many events of one class at each age, as much exposure of both classes, and how long it was."""
    both = np.zeros((2, len(events)))
    both[of_class] = events
    return both, np.full(both.shape, 100.0), 10


def settled() -> Rates:
    """Of two classes and four ages. For long blocks of the first class were asked for, about two a part."""
    rates, rng = Rates(2, np.full(4, 0.5)), np.random.default_rng(3)
    for _ in range(2000):
        rates.add(*part(rng.poisson(2.0, 4).astype(float), 0))
    return rates


def test_a_load_that_becomes_another_for_good_is_learned_in_a_few_parts() -> None:
    rates = settled()
    for _ in range(6):
        rates.add(*part(np.full(4, 2.0), 1))
    before, now = rates.best(4)
    assert (now > before).all()


def test_what_is_expected_is_what_the_memories_say_that_are_believed() -> None:
    """A rate for each age, while a load stays what it is and after it has become another."""
    rates = settled()
    assert np.allclose(rates.mean[0], 0.02, rtol=0.15)
    for _ in range(60):
        rates.add(*part(np.full(4, 2.0), 1))
    before, now = rates.mean
    assert (now > 0.018).all() and (before < 0.002).all(), "the longest memory alone says 0.002 and 0.018"


def test_what_nobody_has_seen_before_leaves_the_memories_to_be_compared() -> None:
    """The same where the second class is asked for at ages at which nothing ever was."""
    rates = Rates(2, np.full(4, 0.5))
    for _ in range(2000):
        rates.add(*part(np.array([2.0, 2.0, 0.0, 0.0]), 0))
    for _ in range(6):
        rates.add(*part(np.array([0.0, 0.0, 2.0, 2.0]), 1))
    _, now = rates.best(4)
    assert (now[2:] > 0.002).all(), "of 0.02; of all that was seen it is 0.0002"


def test_who_comes_back_after_longer_than_a_memory_goes_back_is_not_who_comes_soon() -> None:
    """Each night the same documents come again. A short memory has seen all of them come, and none of them wait."""
    rates, exposure, usual = Rates(1, np.full(8, 5.0)), np.full((1, 8), 1000.0), np.zeros((1, 8))
    usual[0, 0] = 20.0
    for _ in range(2000):
        rates.add(usual, exposure, 2)
    exposure[0, 1:7] = 0.0
    for _ in range(6):
        rates.add(usual + np.array([0.0] * 7 + [400.0]), exposure, 2)
    (found,) = rates.best(8)
    assert 0.01 < found[0] < 0.04, "0.02, and 0.14 with those of the last age"
    assert found[7] > 0.1


def test_a_memory_that_goes_back_to_the_begin_of_an_age_knows_who_comes_back_at_it() -> None:
    """The last one begins after 80."""
    found = []
    for passed in (60, 80):
        rates = Rates(1, np.array([20.0, 20.0, 5.0]))
        rates.add(np.array([[20.0, 20.0, 400.0]]), np.full((1, 3), 1000.0), passed)
        found.append(rates.best(3)[0, 0])
    assert found[1] > 4 * found[0]


def test_a_quiet_part_makes_nobody_forget() -> None:
    rates = settled()
    rates.add(*part(np.zeros(4), 0))
    asked_for, never = rates.best(4)
    assert (asked_for > 3 * never).all() and (asked_for > 0.015).all()


def test_a_load_that_stays_what_it_is_is_known_by_all_that_was_seen() -> None:
    """One part has 2 events in the mean and 1.4 around that; a long memory knows the rate of 2 of 100 better."""
    asked_for, _ = settled().best(4)
    assert np.allclose(asked_for, 0.02, rtol=0.15)


def test_what_was_asked_for_once_fades_until_nothing_is_left_of_it() -> None:
    """However long an engine runs: a short memory comes to the end of what a number can be."""
    rates = settled()
    rates.add(*part(np.array([0.0, 0.0, 0.0, 5.0]), 1))
    for _ in range(4000):
        rates.add(*part(np.array([2.0, 2.0, 2.0, 0.0]), 0))
    asked_for, never = rates.best(4)
    assert (asked_for[:3] > 10 * never[:3]).all() and np.isfinite(rates._scores).all()


def test_nothing_is_said_of_ages_that_nothing_has_reached() -> None:
    found = settled().best(3)
    assert found.shape == (2, 4) and (found[:, :3] > 0).all() and not found[:, 3].any()


def test_a_class_that_nobody_asks_for_is_soon_not_taken_for_the_others() -> None:
    """Where the others would have been asked for ten times, a tenth of their rate is left."""
    events, exposure = np.zeros((2, 8)), np.zeros((2, 8))
    events[1], exposure[1], exposure[0] = 1000.0, 10_000.0, 100.0
    smoothed, seen = _smoothed(events, exposure, np.full(8, 0.5))
    assert (smoothed[0] / seen[0] < smoothed[1] / seen[1] / 10).all()


def test_what_comes_back_at_an_age_that_was_never_looked_at_is_worth_most() -> None:
    """The second class is asked for at the last age each time, and was looked at only at ages before that one."""
    exposure = np.array([[1000.0] * 20, [1000.0] * 19 + [0.0]])
    events = np.array([[1.0] * 20, [0.0] * 19 + [2000.0]])
    one_off, periodic = _best_rates(*_smoothed(events, exposure, np.full(20, 0.5)), np.full((20, 20), True))
    assert (periodic > one_off).all()
