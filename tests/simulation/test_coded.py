"""Worlds in which blocks are coded on the host, and some of them do not fit."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from kv_connector.config import HostFormName
from tests.simulation import config as drawn
from tests.simulation import test_layer_groups, test_refusals
from tests.simulation.config import EngineConfig
from tests.simulation.made import as_drawn, of_model, simulate_models, violations
from tests.simulation.world import Outcome

NUM_WORLDS = 20
MODELS = (None, None, *drawn.MIXED_GROUPS)


def code(rng: random.Random, configs: list[EngineConfig]) -> list[EngineConfig]:
    return [replace(c, host_form=HostFormName.LOSSLESS, judged_blocks=rng.choice([4, 1024])) for c in configs]


def run(seed: int) -> Outcome:
    return simulate_models(
        seed,
        test_layer_groups.draw_actions,
        test_refusals.draw_engines,
        draw_groups=of_model(MODELS[seed % len(MODELS)]),
        draw_replicas=as_drawn,
        draw_refusals=code,
    )


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [run(seed) for seed in range(NUM_WORLDS)]


def test_coded_blocks_break_no_promise(outcomes: list[Outcome]) -> None:
    assert violations(outcomes) == []


def test_coded_blocks_come_back_from_the_host_and_from_storage(outcomes: list[Outcome]) -> None:
    met = sum((outcome.met for outcome in outcomes), Counter[str]())
    for name in ("refused_blocks", "host_hit_tokens", "storage_hit_tokens"):
        assert met[name] > 10, name
