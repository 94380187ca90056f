"""How many of the device blocks next in line for reuse a step looks at."""

from __future__ import annotations

import pytest

from kv_connector.scheduler.saves.lookahead import LookAhead


@pytest.fixture
def ahead() -> LookAhead:
    """Of which a step has taken ten blocks, so that twenty were looked at."""
    ahead = LookAhead(least=4)
    ahead.admitted(10, 0)
    assert ahead.next_step() == 20
    return ahead


def test_twice_as_many_as_a_step_takes_are_kept_saved(ahead: LookAhead) -> None:
    """They are looked at anew when half of them are gone."""
    for _ in range(5):
        ahead.begun(2)
        looked_at = ahead.next_step()
    assert looked_at == 4, "ten are left, and steps take less by now"
    ahead.begun(10)
    assert ahead.next_step() == 20


def test_blocks_that_are_hit_are_not_next_in_line_any_more(ahead: LookAhead) -> None:
    """They were looked at, and others take their places."""
    ahead.admitted(1, 0)
    assert ahead.next_step() == 4
    ahead.admitted(1, 12)
    assert ahead.next_step() > 4


def test_a_step_that_took_many_is_forgotten(ahead: LookAhead) -> None:
    """Steps that take one block each look at few from then on."""
    for _ in range(100):
        ahead.begun(1)
        ahead.next_step()
    looked_at = set()
    for _ in range(100):
        ahead.begun(1)
        looked_at.add(ahead.next_step())
    assert max(looked_at) < 20


def test_all_are_looked_at_after_something_was_freed(ahead: LookAhead) -> None:
    ahead.may_find = True
    assert ahead.next_step() == 18, "twice as many as steps take by now"
