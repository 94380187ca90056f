"""The table of block states: every (tier, state, event) either leads somewhere or raises."""

from __future__ import annotations

import itertools

import pytest

from kv_connector.index import BlockState as S
from kv_connector.index import Event as E
from kv_connector.index import IllegalTransition, advance
from kv_connector.types import Tier as T

FILLING = {
    T.DEVICE: {S.COMPUTING: E.COMPUTE, S.SWAPPING_TO_DEVICE: E.SWAP_IN},
    T.HOST: {S.SWAPPING_TO_HOST: E.SWAP_OUT, S.LOADING_FROM_STORAGE: E.FETCH},
    T.STORAGE: {S.BACKING_UP: E.BACK_UP},
}


def expected(tier: T, state: S, event: E) -> S | None:
    """What the drawing at the top of `states.py` says."""
    if state is S.ABSENT:
        return next((filling for filling, start in FILLING[tier].items() if start is event), None)
    if state in FILLING[tier]:
        return {E.FILL: S.RESIDENT, E.FAIL: S.ABSENT, E.DELETE: S.DELETING}.get(event)
    if state is S.RESIDENT:
        return {E.EVICT: S.ABSENT, E.DELETE: S.DELETING}.get(event)
    return S.ABSENT if state is S.DELETING and event is E.FREE else None


@pytest.mark.parametrize(("tier", "state", "event"), list(itertools.product(T, S, E)))
def test_every_transition(tier: T, state: S, event: E) -> None:
    after = expected(tier, state, event)
    if after is None:
        with pytest.raises(IllegalTransition, match=f"{event.name} on a {tier.name} copy that is {state.name}"):
            advance(tier, state, event)
    else:
        assert advance(tier, state, event) == after
