"""Worlds made for storage of models whose layers are of several kinds: engines that start anew again and again, and
find their prefixes in a folder, or in a store of objects, whole for every kind of layer or not at all.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kv_connector.config import Backup, LoadChoice, Prefetch, WritePolicy
from tests.simulation import config as drawn
from tests.simulation import workload
from tests.simulation.config import EngineConfig
from tests.simulation.made import simulate_models, violations
from tests.simulation.workload import Action
from tests.simulation.world import Outcome

NUM_WORLDS = 4 * len(drawn.MIXED_GROUPS)
KINDS = {"arrive": 36, "kill": 3, "disk": 1, "abort": 1, "fail": 1, "reset": 0.1}


def draw_engines(rng: random.Random) -> list[EngineConfig]:
    """One or two, alike, which may have different models; the host holds a few prompts."""
    num_ranks, load_choice = rng.choice([1, 1, 2]), rng.choice([LoadChoice.SYNC, LoadChoice.ASYNC])
    config = EngineConfig(
        asynchronous=rng.random() < 0.5,
        num_ranks=num_ranks,
        num_host_blocks=rng.choice([24, 48]),
        num_device_blocks=rng.choice([24, 72]),
        max_running=rng.choice([1, 4]),
        max_step_tokens=rng.choice([8, 16]),
        prefetch=rng.choice([Prefetch.WAIT_COMPLETE, Prefetch.WAIT_COMPLETE, Prefetch.BEST_EFFORT]),
        backup=rng.choice(list(Backup)),
        write_policy=rng.choice([WritePolicy.WRITE_THROUGH, WritePolicy.ADAPTIVE]),
        load_choice=load_choice,
        seconds={"compute": 2e-2, "load": 2e-3, "save": 2e-3},  # nothing is sooner computed than read
    )
    return [replace(config, max_step_tokens=rng.choice([8, 16])) for _ in range(rng.choice([1, 2]))]


def draw_actions(rng: random.Random, configs: Sequence[EngineConfig]) -> list[Action]:
    time, actions = 0.0, []
    for number in range(120):
        time += rng.expovariate(1 / 0.3)
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0] if number > 20 else "arrive"
        engine = rng.randrange(len(configs))
        what = workload._choices(rng, kind, configs, engine, 8, number)
        if kind == "arrive":
            what |= {"document": rng.randrange(3), "share": rng.choice([0.6, 1.0])}
        actions.append(Action(number, time, kind, engine, what))
    return actions


def run(seed: int) -> Outcome:
    """A world of each kind of model in turn, in a folder or in objects of two or four blocks; in some of them the
    second engine has another model."""
    kinds = drawn.MIXED_GROUPS
    groups = kinds[seed % len(kinds)]
    others = kinds[(seed + 1) % len(kinds)] if seed // len(kinds) % 4 == 3 else groups
    size = [0, 2, 4, 0][seed // len(kinds) % 4]

    def draw_groups(rng: random.Random, configs: list[EngineConfig]) -> list[EngineConfig]:
        return [drawn.with_groups(c, g) for c, g in zip(configs, (groups, others), strict=False)]

    def draw_roomy(rng: random.Random) -> list[EngineConfig]:
        """Prompts are of several blocks of every group."""
        return [replace(config, num_device_blocks=max(48, config.num_device_blocks)) for config in draw_engines(rng)]

    return simulate_models(
        seed,
        draw_actions,
        draw_roomy,
        draw_groups=draw_groups,
        draw_group_blocks=lambda rng: [size, size] if size else [],
        draw_folder=lambda rng: (4, 100),
    )


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [run(seed) for seed in range(NUM_WORLDS)]


def test_storage_of_layers_of_several_kinds_breaks_no_promise(outcomes: list[Outcome]) -> None:
    assert violations(outcomes) == []


def test_models_of_every_kind_are_fetched_after_restarts(outcomes: list[Outcome]) -> None:
    for kind, groups in enumerate(drawn.MIXED_GROUPS):
        met = sum((outcome.met for outcome in outcomes[kind :: len(drawn.MIXED_GROUPS)]), Counter[str]())
        assert met["engine killed"] > 2, groups
        assert met["storage_hit_tokens"] > 10, groups
        if any(group.window or group.is_recurrent for group in groups):
            assert met["fetches of windows and states"] > 5, groups
            assert met["backups of windows and states"] > 5, groups
