"""Worlds made for models whose layers are of several kinds: blocks of several sizes, windows, recurrent states. Engines
are alone, short of device memory, and asked for the same documents again and again, so that every group is loaded.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from kv_connector.config import LoadChoice, WritePolicy
from tests.simulation import config as drawn
from tests.simulation import workload
from tests.simulation.config import EngineConfig
from tests.simulation.made import of_model, simulate_models, undisturbed, violations
from tests.simulation.workload import Action
from tests.simulation.world import Outcome

WORLDS = [(seed, drawn.MIXED_GROUPS[seed % len(drawn.MIXED_GROUPS)]) for seed in range(54)]
WORLDS += [(seed, drawn.LONE_WINDOW) for seed in range(54, 62)]
KINDS = {"arrive": 40, "abort": 2, "again": 1, "fail": 3, "freeze": 1, "reset": 0.5, "weights": 0.5, "trap": 6}
POLICIES = [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK]


def draw_engines(rng: random.Random) -> list[EngineConfig]:
    """One, whose host holds more than its device."""
    return [
        undisturbed(
            drawn.draw(rng),
            layer_groups=(drawn.LayerGroup(),),
            num_device_blocks=rng.choice([14, 20]),
            num_host_blocks=rng.choice([24, 100, 200]),
            write_policy=rng.choice(POLICIES),
            load_choice=rng.choice([LoadChoice.ASYNC, LoadChoice.SYNC]),
            max_step_tokens=rng.choice([8, 16]),
        )
    ]


def draw_actions(rng: random.Random, configs: Sequence[EngineConfig]) -> list[Action]:
    time, actions = 0.0, []
    for number in range(100):
        time += rng.expovariate(1 / rng.choice([0.01, 0.1]))
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0] if number > 10 else "arrive"
        what = workload._choices(rng, kind, configs, 0, 8, number)
        actions.append(Action(number, time, kind, 0, what))
    return actions


def run(seed: int, groups: tuple[drawn.LayerGroup, ...]) -> Outcome:
    return simulate_models(
        seed,
        draw_actions,
        draw_engines,
        draw_groups=of_model(groups),
    )


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [run(seed, groups) for seed, groups in WORLDS]


def test_layers_of_several_kinds_break_no_promise(outcomes: list[Outcome]) -> None:
    assert violations(outcomes) == []


def test_models_of_every_kind_are_loaded(outcomes: list[Outcome]) -> None:
    met = {groups: Counter[str]() for _, groups in WORLDS}
    for (_, groups), outcome in zip(WORLDS, outcomes, strict=True):
        met[groups] += outcome.met
    assert len(met) == len(drawn.MIXED_GROUPS) + 1
    for groups, counts in met.items():
        assert counts["host_hit_tokens"] > 50, groups
