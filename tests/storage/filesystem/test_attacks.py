"""Attacks on a folder and its disk, from a seed; `integration/attacks.py` tries each far more often."""

from __future__ import annotations

import pytest

from integration.attack import Attack
from integration.attacks_on_disks import CALLS, DISK_ATTACKS
from integration.attacks_on_storage import DAMAGES, STORAGE_ATTACKS

TRIES = {
    "kills": 3,
    "flips": 6,
    "damages": 2 * len(DAMAGES),
    "same_prefix": 4,
    "namespaces": 1,
    "hangs": len(CALLS) + 1,
    "faults": 5,
    "clocks": 1,
}


@pytest.mark.parametrize("attack", STORAGE_ATTACKS + DISK_ATTACKS, ids=lambda attack: attack.name)
def test_nothing_that_happens_to_a_folder_gives_wrong_bytes_or_spoils_it(attack: Attack) -> None:
    outcome = attack.run(TRIES[attack.name], 3)
    assert outcome.claims == dict.fromkeys(outcome.claims, 0)
