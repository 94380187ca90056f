"""Worlds made for ranks that cache the same bytes: they share one copy on the host, of which each saves its share and
loads all, and one in storage. Models of one kind of layers and of several, in turn.
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
MODELS = (None, *drawn.MIXED_GROUPS)

pytestmark = pytest.mark.timeout(1500)  # all worlds at once: 2 to 4 minutes on a machine that does nothing else


def draw_engines(rng: random.Random) -> list[EngineConfig]:
    """One of two ranks or more, every other one with storage."""
    (config,) = test_layer_groups.draw_engines(rng)
    config = replace(config, num_ranks=rng.choice([2, 2, 3, 4]), pipeline=False, replicas=True)
    if rng.random() < 0.5:
        return [config]
    return [replace(config, prefetch=Prefetch.WAIT_COMPLETE, num_host_blocks=24, fetch_ms=200)]


def run(seed: int) -> Outcome:
    groups = MODELS[seed % len(MODELS)]
    return simulate_models(
        seed,
        test_layer_groups.draw_actions,
        draw_engines,
        draw_replicas=as_drawn,
        draw_groups=of_model(groups),
    )


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [run(seed) for seed in range(NUM_WORLDS)]


def test_ranks_that_share_a_copy_break_no_promise(outcomes: list[Outcome]) -> None:
    assert violations(outcomes) == []


def test_what_is_shared_comes_from_the_host_and_from_storage(outcomes: list[Outcome]) -> None:
    met = sum((outcome.met for outcome in outcomes), Counter[str]())
    for name in ("host_hit_tokens", "sync loads", "async loads", "load of the step failed", "storage_hit_tokens"):
        assert met[name] > 10, name
