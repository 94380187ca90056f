"""How many of the device blocks next in line for reuse a step looks at."""

from __future__ import annotations

import pytest

from kv_connector.base import ScheduledRequest, SchedulerOutput
from kv_connector.scheduler.saves.lookahead import LookAhead
from tests.scheduler.test_half import Asked, admit, make_half, run


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


def test_what_runs_counts_for_what_it_begins_and_what_is_hit_as_taken() -> None:
    """Requests whose blocks the device has take them out of the line; one that decodes takes a block now and then."""
    half, blocks = make_half(write_policy="write_back", write_back_lookahead=2)
    prompt = Asked("prompt", list(range(40)))
    admit(half, prompt)
    run(half, prompt)
    assert blocks.looked_ahead == 20
    for num_tokens in range(40, 48):
        new = [[num_tokens // 4]] if num_tokens % 4 == 0 else ()
        half.build_connector_meta(SchedulerOutput([ScheduledRequest("prompt", num_tokens, 1, new)]))
        assert blocks.looked_ahead == 2, "it has begun a block, and 20 are kept saved"
    again = [Asked(f"{number}", prompt.tokens) for number in range(2)]
    for number, request in enumerate(again):
        admit(half, request, 20 + 10 * number, num_local=36)
    run(half, *again, computed=36)
    assert blocks.looked_ahead > 2, "18 of them are in use"
