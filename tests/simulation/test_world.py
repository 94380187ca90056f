"""Worlds of engines under faults: no wrong token, nothing stuck, nothing left behind. `make simulate` runs more of
them.
"""

from __future__ import annotations

import pytest

from tests.simulation import shrink
from tests.simulation.floors import FLOORS, WITHOUT_FLOOR
from tests.simulation.outside import DISK_FAULTS
from tests.simulation.workload import TRAPS
from tests.simulation.world import simulate

FIRST_SEED = 1
NUM_PARTS = 6
WORLDS = 10


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_worlds_break_no_promise(part: int) -> None:
    for seed in range(FIRST_SEED + part * WORLDS, FIRST_SEED + (part + 1) * WORLDS):
        outcome = simulate(seed)
        if outcome.violation is not None:
            shortest = shrink.shrink(outcome, seconds=20.0)
            pytest.fail("\n".join(shrink.describe(shortest, "python -m tests.simulation")))
        assert set(outcome.met) <= {*FLOORS, *WITHOUT_FLOOR}, "what a run counts has a floor, or a reason for none"


def test_every_trap_and_every_fault_of_the_disk_has_a_floor() -> None:
    traps = {f"trap {when}: {do}" for when, what in TRAPS.items() for do in what}
    assert {name for name in FLOORS if name.startswith("trap ")} == traps
    assert {name for name in FLOORS if name.startswith("disk ")} == {f"disk {fault}" for fault in DISK_FAULTS}
    assert not set(FLOORS) & set(WITHOUT_FLOOR)
    assert all(floor >= 1 for floor in FLOORS.values())
