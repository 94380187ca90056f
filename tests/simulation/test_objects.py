"""Worlds made for storage in groups: engines that start anew again and again, and find their prefixes in a store of
objects that fails. Each byte that is fetched shows in a token.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from kv_connector.config import Backup, LoadChoice, Prefetch, WritePolicy
from tests.simulation import workload
from tests.simulation.config import EngineConfig
from tests.simulation.made import simulate_made, violations
from tests.simulation.workload import Action
from tests.simulation.world import Outcome

NUM_WORLDS = 16
KINDS = {"arrive": 30, "kill": 3, "disk": 3, "abort": 1, "fail": 1}


def draw_engines(rng: random.Random) -> list[EngineConfig]:
    """One or two, alike, with a host that holds two prompts or so."""
    backup, num_ranks = rng.choice(list(Backup)), rng.choice([1, 1, 2])
    return [
        EngineConfig(
            asynchronous=rng.random() < 0.5,
            num_ranks=num_ranks,
            num_host_blocks=rng.choice([16, 32]),
            num_device_blocks=24,
            max_running=rng.choice([1, 4]),
            prefetch=rng.choice([Prefetch.WAIT_COMPLETE, Prefetch.TIMEOUT]),
            backup=backup,
            write_policy=WritePolicy.WRITE_THROUGH,
            load_choice=rng.choice([LoadChoice.SYNC, LoadChoice.ASYNC]),
        )
        for _ in range(rng.choice([1, 2]))
    ]


def draw_actions(rng: random.Random, configs: Sequence[EngineConfig]) -> list[Action]:
    time, actions = 0.0, []
    for number in range(120):
        time += rng.expovariate(1 / 0.05)
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0] if number > 20 else "arrive"
        engine = rng.randrange(len(configs))
        what = workload._choices(rng, kind, configs, engine, 8, number)
        actions.append(Action(number, time, kind, engine, what))
    return actions


def run(seed: int) -> Outcome:
    """A world of groups of two, four, or both."""
    size = 2 + 2 * (seed % 2)
    sizes = [size, size * (1 + seed // 2 % 2)]
    return simulate_made(seed, draw_actions, draw_world=draw_engines, draw_group_blocks=lambda rng: sizes)


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [run(seed) for seed in range(NUM_WORLDS)]


def test_groups_break_no_promise(outcomes: list[Outcome]) -> None:
    assert violations(outcomes) == []


def test_groups_are_met_whole_and_in_part(outcomes: list[Outcome]) -> None:
    met = sum((outcome.met for outcome in outcomes), Counter[str]())
    assert met["fetch done"] > 50
    assert met["fetches that skip blocks of a group"] > 10
    assert met["backups of a group where a request has ended"] > 100
    assert met["storage_hit_tokens"] > 200
