"""What is let in while less than should comes back of what was asked for."""

import pytest

from kv_connector.index.frailty import LOOKS, Frailty

PRIOR = 16.0


def seen(events: float, expected: float, looks: int = 50 * LOOKS) -> Frailty:
    frailty = Frailty()
    for _ in range(looks):
        frailty.add(events, expected)
    return frailty


def test_before_anything_was_expected_all_is_worth_what_its_kind_is() -> None:
    assert Frailty().factor(PRIOR) == 1.0


@pytest.mark.parametrize("events", [100.0, 250.0])
def test_where_as_much_comes_back_as_should_or_more_nothing_is_worth_less(events: float) -> None:
    assert seen(events, 100.0).factor(PRIOR) == 1.0


def test_where_half_of_it_comes_back_all_is_worth_half() -> None:
    assert seen(500.0, 1000.0).factor(PRIOR) == pytest.approx(0.5, abs=0.01)


def test_few_that_should_have_come_back_tell_little() -> None:
    assert seen(0.0, 0.1).factor(PRIOR) > 0.97


def test_a_morning_makes_good_for_a_night_in_twice_the_time_that_is_lately() -> None:
    frailty = seen(0.0, 1000.0)
    assert frailty.factor(PRIOR) < 0.01
    for _ in range(2 * LOOKS):
        frailty.add(1000.0, 1000.0)
    assert frailty.factor(PRIOR) > 0.9
