"""Worlds made for ranks that share out a context: each has a part of every block's tokens, and the next token rests on
all of them. Engines are alone, share a folder or objects, or continue one another's prompts; in some worlds one of them
shares out its tokens in another way, and must be given nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from tests.simulation import test_layer_groups, test_peer_groups, test_storage_groups
from tests.simulation.config import EngineConfig, LayerGroup, with_groups
from tests.simulation.made import simulate_models, violations
from tests.simulation.world import Outcome

PLACES = (test_layer_groups, test_storage_groups, test_peer_groups)
"""What engines are asked for, and what they share."""
SHAPES = ((2, 2, 1), (2, 2, 2), (4, 2, 1), (4, 4, 1))
"""Ranks, parts of a block, and tokens of a part that lie together."""
MODELS = ((LayerGroup(),), (LayerGroup(hashes_per_block=2), LayerGroup(is_recurrent=True)))
"""States are whole on every rank, in blocks of fewer tokens."""
NUM_WORLDS = 36

pytestmark = pytest.mark.timeout(1500)  # all worlds at once: 2 to 4 minutes on a machine that does nothing else


def share_out(config: EngineConfig, shape: tuple[int, int, int]) -> EngineConfig:
    """The same engine, whose blocks have as many tokens on each rank as that had in all."""
    num_ranks, num_parts, interleave = shape
    return replace(
        config,
        num_ranks=num_ranks,
        num_parts=num_parts,
        interleave=interleave,
        block_size=4,
        pipeline=False,
        num_device_blocks=max(24, config.num_device_blocks),
    )


def run(seed: int) -> Outcome:
    """A world of each place and shape in turn."""
    place, turn = PLACES[seed % len(PLACES)], seed // len(PLACES)
    shape, groups = SHAPES[turn % len(SHAPES)], MODELS[turn // len(SHAPES) % len(MODELS)]
    other = SHAPES[(turn + 1) % len(SHAPES)] if turn % 6 == 5 else shape

    def draw_groups(rng: random.Random, configs: list[EngineConfig]) -> list[EngineConfig]:
        drawn = [share_out(config, other if index == 1 else shape) for index, config in enumerate(configs)]
        return [with_groups(config, groups) for config in drawn]

    return simulate_models(
        seed,
        place.draw_actions,
        place.draw_engines,
        draw_groups=draw_groups,
    )


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [run(seed) for seed in range(NUM_WORLDS)]


def test_ranks_that_share_out_a_context_break_no_promise(outcomes: list[Outcome]) -> None:
    assert violations(outcomes) == []


@pytest.mark.parametrize(
    ("place", "counter"), [(0, "host_hit_tokens"), (1, "storage_hit_tokens"), (2, "peer_hit_tokens")]
)
def test_parts_come_back_from_everywhere(outcomes: list[Outcome], place: int, counter: str) -> None:
    met = [sum((outcome.met for outcome in outcomes[3 * n + place :: 12]), Counter[str]()) for n in range(len(SHAPES))]
    assert all(shape[counter] > 0 for shape in met)
    assert sum(shape[counter] for shape in met) > 300
