"""Worlds made for KV transfers of models whose layers are of several kinds: one engine computes a prompt and another
goes on with the blocks of every kind of layer, or computes it where those of one kind do not come.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from kv_connector.config import LoadChoice, PeerRole, WritePolicy
from tests.simulation import config as drawn
from tests.simulation import workload
from tests.simulation.config import EngineConfig
from tests.simulation.made import simulate_models, undisturbed, violations
from tests.simulation.workload import Action
from tests.simulation.world import Outcome

MODELS = drawn.MIXED_GROUPS
NUM_WORLDS = 8 * len(MODELS)
KINDS = {"hand": 40, "arrive": 6, "stale": 2, "abort": 2, "again": 1, "fail": 1, "freeze": 1, "network": 1, "trap": 2}
KINDS |= {"reset": 0.1, "weights": 0.1, "kill": 0.3}
ROLES = (PeerRole.PRODUCER, PeerRole.CONSUMER, PeerRole.BOTH)

pytestmark = pytest.mark.timeout(1500)  # all worlds at once: 2 to 4 minutes on a machine that does nothing else


def draw_engines(rng: random.Random) -> list[EngineConfig]:
    """Two or three of one shape: one computes prompts, one goes on with them, one may do both."""
    config = undisturbed(drawn.draw(rng), layer_groups=(drawn.LayerGroup(),))
    port = rng.choice([0, 20, 20])
    engines = []
    for index in range(rng.choice([2, 2, 3])):
        engines.append(
            undisturbed(
                drawn.draw(rng, config),
                role=ROLES[index],
                port=port and 7000 + port * index,
                deadline_ms=rng.choice([1000, 3000]),
                num_device_blocks=rng.choice([20, 28, 60]),
                num_host_blocks=rng.choice([0, 12, 60]),
                max_step_tokens=rng.choice([8, 16, 48]),
                write_policy=rng.choice([WritePolicy.WRITE_THROUGH, WritePolicy.ADAPTIVE]),
                load_choice=rng.choice([LoadChoice.ASYNC, LoadChoice.SYNC]),
            )
        )
    return engines


def draw_actions(rng: random.Random, configs: Sequence[EngineConfig]) -> list[Action]:
    time, actions = 0.0, []
    for number in range(100):
        time += rng.expovariate(1 / rng.choice([0.01, 0.1]))
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0] if number > 10 else "hand"
        engine = rng.randrange(len(configs))
        what = workload._choices(rng, kind, configs, engine, 8, number)
        actions.append(Action(number, time, kind, engine, what))
    return actions


def run(seed: int) -> Outcome:
    """A world of each kind of model in turn; in some of them the second engine has another model."""
    groups = MODELS[seed % len(MODELS)]
    others = MODELS[(seed + 1) % len(MODELS)] if seed // len(MODELS) % 8 == 7 else groups

    def draw_groups(rng: random.Random, configs: list[EngineConfig]) -> list[EngineConfig]:
        return [drawn.with_groups(c, others if index == 1 else groups) for index, c in enumerate(configs)]

    return simulate_models(
        seed,
        draw_actions,
        draw_engines,
        draw_groups=draw_groups,
    )


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [run(seed) for seed in range(NUM_WORLDS)]


def test_kv_transfers_of_layers_of_several_kinds_break_no_promise(outcomes: list[Outcome]) -> None:
    assert violations(outcomes) == []


def test_models_of_every_kind_are_continued_elsewhere(outcomes: list[Outcome]) -> None:
    for kind, groups in enumerate(MODELS):
        met = sum((outcome.met for outcome in outcomes[kind :: len(MODELS)]), Counter[str]())
        assert met["peer_hit_tokens"] > 200, groups
        assert met["receive done"] > 50, groups
