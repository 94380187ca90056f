"""Slots that NIXL knows outlive their link: what a peer has posted may still land in them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from kv_connector.peer.carriers.staged.nixl import RegisteredRings

SLOTS = 2, 4096


class Agent:
    """Registers anything."""

    def register_memory(self, entries: object, memory: str) -> object:
        return object()


def test_slots_are_not_given_away_while_a_write_may_land_in_them() -> None:
    agent, is_quiet = Agent(), False
    rings = RegisteredRings(agent)
    first = rings.take(*SLOTS)
    rings.give_back(first, lambda: is_quiet)
    assert rings.take(*SLOTS) is not first
    is_quiet = True
    assert rings.take(*SLOTS) is first
    assert rings.take(*SLOTS) is not first, "it is in use"


def test_slots_of_another_size_stay_for_who_wants_them() -> None:
    rings = RegisteredRings(agent := Agent())
    small = rings.take(*SLOTS)
    rings.give_back(small, lambda: True)
    assert rings.take(2, 8192) is not small
    assert rings.take(*SLOTS) is small
    del agent


def test_the_memory_of_slots_lives_as_long_as_the_agent() -> None:
    """A write that came late would end the process."""
    agent: Any = Agent()
    rings = RegisteredRings(agent)
    taken = rings.take(*SLOTS)
    rings.give_back(taken, lambda: True)
    gone = weakref.ref(taken.ring)
    del taken, rings
    gc.collect()
    assert gone() is not None
    del agent
    gc.collect()
    assert gone() is None
