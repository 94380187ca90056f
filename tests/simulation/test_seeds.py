"""Worlds that have shown a fault once, and what it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.simulation.world import simulate

SEEDS = {
    858: "a session that went on after a reset saved what it had computed before it, and others matched that",
    3001960: "an engine that was to sleep waited for ever: a reset was not done before a failed load had come",
    20017: "drafts of a step wrote to blocks that a load had filled: a step without requests was reported in between",
    101197: "two requests whose loads had failed waited for one another",
    101621: "two requests whose loads had failed waited for one another, as in 101197",
    102346: "a block was saved that had left its window by drafts in flight, and had been given to another request",
    3541: "a request whose load had failed went on behind blocks in front of its window, which nothing was to fill",
    290045: "a session with blocks waited behind a failed load's request: vLLM's own standstill, taken for ours",
}


RESULT = Path(__file__).parents[2] / "integration" / "bench" / "results" / "simulation.json"


def test_every_seed_that_the_last_long_run_has_found_is_here() -> None:
    rows = json.loads(RESULT.read_text())["rows"]
    assert {row["seed"] for row in rows if "violation" in row} <= set(SEEDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_world_that_has_shown_a_fault_shows_none(seed: int) -> None:
    assert simulate(seed).violation is None, SEEDS[seed]
