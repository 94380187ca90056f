"""Worlds of engines under faults: no wrong token, nothing stuck, nothing left behind. `make simulate` runs more of
them.
"""

from __future__ import annotations

import pytest

from tests.simulation import shrink
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
