"""Worlds made for pipelines that know what a step has come to before they plan the next one of a request: stages run
apart, and chunks of a prompt are under way in each. Models of one kind of layers and of several, in turn.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from tests.simulation import config as drawn
from tests.simulation import test_layer_groups
from tests.simulation.config import EngineConfig
from tests.simulation.made import of_model, simulate_models, violations
from tests.simulation.world import Outcome

NUM_WORLDS = 36
MODELS = (None, *drawn.MIXED_GROUPS)


def draw_engines(rng: random.Random) -> list[EngineConfig]:
    """One of two stages or three."""
    (config,) = test_layer_groups.draw_engines(rng)
    return [replace(config, asynchronous=False, pipeline=True, num_ranks=rng.choice([2, 3]))]


def run(seed: int) -> Outcome:
    groups = MODELS[seed % len(MODELS)]
    return simulate_models(
        seed,
        test_layer_groups.draw_actions,
        draw_engines,
        draw_groups=of_model(groups),
    )


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [run(seed) for seed in range(NUM_WORLDS)]


def test_stages_that_run_apart_break_no_promise(outcomes: list[Outcome]) -> None:
    assert violations(outcomes) == []


def test_stages_load_in_every_way(outcomes: list[Outcome]) -> None:
    met = sum((outcome.met for outcome in outcomes), Counter[str]())
    for name in (
        "host_hit_tokens",
        "sync loads",
        "async loads",
        "load of the step failed",
        "preempted with a step under way",
    ):
        assert met[name] > 10, name
