"""Attacks on the links between engines, from a seed; `integration/attacks.py` tries each far more often."""

from __future__ import annotations

import pytest

from integration.attack import Attack
from integration.attacks_on_peers import PEER_ATTACKS

SHARE = {"fuzz": 0.02, "junk": 0.01, "relay": 0.1}


@pytest.mark.parametrize("attack", PEER_ATTACKS, ids=lambda attack: attack.name)
def test_nothing_that_anybody_sends_does_harm(attack: Attack) -> None:
    outcome = attack.run(int(attack.tries * SHARE[attack.name]), 3)
    assert outcome.claims == dict.fromkeys(outcome.claims, 0)
    assert outcome.details.get("memory_grown_mib", 0) < 32
    assert outcome.details.get("messages_changed", 1) > 0
