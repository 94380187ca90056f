"""Worlds made for KV transfers between engines of two TP sizes: each rank of the one that goes on gets its heads from
the ranks of the other that hold them, or the prompt is computed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest

from kv_connector.config import LoadChoice, PeerRole, WritePolicy
from tests.simulation import config as drawn
from tests.simulation import outside, workload
from tests.simulation.config import EngineConfig, LayerGroup
from tests.simulation.made import as_drawn, simulate_made, undisturbed, violations
from tests.simulation.peers import CARRIERS
from tests.simulation.workload import Action
from tests.simulation.world import Outcome

SIZES = ((1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (4, 1))
MODELS = (4, (LayerGroup(),)), (2, (LayerGroup(),)), (4, (LayerGroup(), LayerGroup(window=5))), (1, (LayerGroup(),))
"""KV heads, fewer than ranks in some, and block groups."""
NUM_WORLDS = 2 * len(SIZES) * len(MODELS)
KINDS = {"hand": 40, "arrive": 6, "stale": 2, "abort": 2, "again": 1, "fail": 1, "freeze": 1, "network": 1, "trap": 2}
KINDS |= {"reset": 0.1, "weights": 0.1, "kill": 0.3}
ROLES = (PeerRole.PRODUCER, PeerRole.CONSUMER)


def draw_actions(rng: random.Random, configs: Sequence[EngineConfig]) -> list[Action]:
    time, actions = 0.0, []
    for number in range(80):
        time += rng.expovariate(1 / rng.choice([0.01, 0.1]))
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0] if number > 10 else "hand"
        engine = 0 if kind == "hand" else rng.randrange(len(configs))
        what = workload._choices(rng, kind, configs, engine, 8, number)
        actions.append(Action(number, time, kind, engine, what))
    return actions


def run(seed: int, carrier: str = "") -> Outcome:
    """A world of each pair of sizes and each model in turn. Heads are divided anew in host memory only; where all ranks
    hold the same, anything will do."""
    sizes, (num_heads, groups) = SIZES[seed % len(SIZES)], MODELS[seed // len(SIZES) % len(MODELS)]

    def draw_engines(rng: random.Random) -> list[EngineConfig]:
        config = replace(drawn.draw(rng), layer_groups=groups)
        port = rng.choice([0, 20, 20])
        return [
            undisturbed(
                drawn.draw(rng, config),
                role=ROLES[index],
                num_ranks=sizes[index],
                num_heads=num_heads,
                heads_first=seed % 2 == 0,
                pipeline=False,
                port=port and 7000 + port * index,
                deadline_ms=rng.choice([1000, 3000]),
                num_device_blocks=rng.choice([20, 28, 60]) * len(groups),
                num_host_blocks=rng.choice([0, 12, 60]),
                max_step_tokens=rng.choice([8, 16, 48]),
                write_policy=rng.choice([WritePolicy.WRITE_THROUGH, WritePolicy.ADAPTIVE]),
                load_choice=rng.choice([LoadChoice.ASYNC, LoadChoice.SYNC]),
            )
            for index in range(2)
        ]

    carriers = CARRIERS if num_heads == 1 else ("staged",)
    with patch.object(outside, "CARRIERS", (carrier,) if carrier else carriers):
        return simulate_made(
            seed,
            draw_actions,
            draw_world=draw_engines,
            draw_policies=as_drawn,
            draw_remembered=as_drawn,
            draw_replicas=as_drawn,
            draw_groups=lambda rng, configs: configs,
        )


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [run(seed) for seed in range(NUM_WORLDS)]


def test_kv_transfers_between_tp_sizes_break_no_promise(outcomes: list[Outcome]) -> None:
    assert violations(outcomes) == []


def test_every_pair_of_sizes_continues_prompts_of_every_model(outcomes: list[Outcome]) -> None:
    for kind in range(len(SIZES) * len(MODELS)):
        met = sum((outcome.met for outcome in outcomes[kind :: len(SIZES) * len(MODELS)]), Counter[str]())
        what = SIZES[kind % len(SIZES)], MODELS[kind // len(SIZES)]
        assert met["peer_hit_tokens"] > 60, what
        assert met["receive done"] > 10, what


@pytest.mark.parametrize("carrier", [carrier for carrier in CARRIERS if carrier != "staged"])
@pytest.mark.parametrize("seed", [0, 3])
def test_what_writes_from_pool_to_pool_divides_no_heads(carrier: str, seed: int) -> None:
    """Prompts are computed: whole pieces lie in no pool whose pieces have other heads."""
    outcome = run(seed, carrier)
    assert violations([outcome]) == []
    assert outcome.met["handed over behind"] + outcome.met["handed over at once"] > 3
    assert outcome.met["receive failed"] and not outcome.met["receive done"]
