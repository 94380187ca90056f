"""Worlds made for engines whose hits end inside of blocks: where a prompt has ended, recurrent states are kept, and the
rows of full attention with them. What engines share is that of other made worlds; beside other engines hits end where
blocks do.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from tests.simulation import test_layer_groups, test_peer_groups, test_storage_groups
from tests.simulation.config import EngineConfig, LayerGroup
from tests.simulation.made import of_model, simulate_models, violations
from tests.simulation.world import Outcome

PLACES = (test_layer_groups, test_storage_groups, test_peer_groups)
MODELS = (
    (LayerGroup(hashes_per_block=2), LayerGroup(hashes_per_block=2, is_recurrent=True)),
    (LayerGroup(hashes_per_block=4), *[LayerGroup(hashes_per_block=2, is_recurrent=True)] * 2),
    (LayerGroup(hashes_per_block=2), LayerGroup(is_recurrent=True)),
    (LayerGroup(), LayerGroup(hashes_per_block=3, is_recurrent=True)),
    (LayerGroup(hashes_per_block=2), LayerGroup(hashes_per_block=3), LayerGroup(hashes_per_block=3, is_recurrent=True)),
)
NUM_WORLDS = 45

pytestmark = pytest.mark.timeout(1500)  # all worlds at once: 2 to 4 minutes on a machine that does nothing else


def run(seed: int) -> Outcome:
    """A world of each place and model in turn."""
    place, turn = PLACES[seed % len(PLACES)], seed // len(PLACES)

    def draw_engines(rng: random.Random) -> list[EngineConfig]:
        return [replace(config, ends_within=True) for config in place.draw_engines(rng)]

    groups = of_model(MODELS[turn % len(MODELS)])
    return simulate_models(seed, place.draw_actions, draw_engines, draw_groups=groups)


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [run(seed) for seed in range(NUM_WORLDS)]


def test_hits_that_end_inside_of_blocks_break_no_promise(outcomes: list[Outcome]) -> None:
    assert violations(outcomes) == []


@pytest.mark.parametrize("model", range(len(MODELS)))
def test_models_of_every_kind_hit_inside_of_blocks(outcomes: list[Outcome], model: int) -> None:
    met = sum((o.met for o in outcomes if o.seed // len(PLACES) % len(MODELS) == model), Counter[str]())
    assert met["ends within"] > 20
    assert met["loads that end within"] > 10
