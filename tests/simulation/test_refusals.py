"""Worlds in which a share of what is saved does not fit into the form of a host block: known only once it was copied.
Where most does not, nothing is saved any more. Ranks apart and such as share a copy, with storage and without, models
of one kind of layers and of several.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from kv_connector.config import Prefetch
from tests.simulation import config as drawn
from tests.simulation import test_layer_groups
from tests.simulation.config import EngineConfig
from tests.simulation.made import as_drawn, of_model, simulate_models, violations
from tests.simulation.world import Outcome

NUM_WORLDS = 40
MODELS = (None, None, *drawn.MIXED_GROUPS)


def draw_engines(rng: random.Random) -> list[EngineConfig]:
    """One; every other one with storage."""
    (config,) = test_layer_groups.draw_engines(rng)
    config = replace(config, replicas=config.num_ranks > 1 and not config.pipeline and rng.random() < 0.5)
    if rng.random() < 0.5:
        return [config]
    return [replace(config, prefetch=Prefetch.WAIT_COMPLETE, num_host_blocks=24, fetch_ms=200)]


def refuse(rng: random.Random, configs: list[EngineConfig]) -> list[EngineConfig]:
    return [
        replace(config, refused_share=rng.choice([0.02, 0.1, 0.3, 1.0]), judged_blocks=rng.choice([16, 64, 1024]))
        for config in configs
    ]


def run(seed: int) -> Outcome:
    return simulate_models(
        seed,
        test_layer_groups.draw_actions,
        draw_engines,
        draw_groups=of_model(MODELS[seed % len(MODELS)]),
        draw_replicas=as_drawn,
        draw_refusals=refuse,
    )


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [run(seed) for seed in range(NUM_WORLDS)]


def test_what_does_not_fit_breaks_no_promise(outcomes: list[Outcome]) -> None:
    assert violations(outcomes) == []


def test_engines_save_nothing_any_more_where_most_does_not_fit_and_others_go_on(outcomes: list[Outcome]) -> None:
    num_off = sum(outcome.met["saves_are_off"] for outcome in outcomes)
    assert NUM_WORLDS / 10 < num_off < NUM_WORLDS * 2 / 3


def test_what_fits_comes_back_from_the_host_and_from_storage(outcomes: list[Outcome]) -> None:
    met = sum((outcome.met for outcome in outcomes), Counter[str]())
    for name in ("refused_blocks", "host_hit_tokens", "storage_hit_tokens", "load of the step failed"):
        assert met[name] > 10, name
