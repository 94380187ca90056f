"""Worlds made for layers whose attention is local to chunks, beside full attention: a hit needs the blocks of the chunk
that its next token is in, and none where it ends with a chunk. What engines share is that of other made worlds.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation import test_layer_groups, test_peer_groups, test_storage_groups
from tests.simulation.config import LayerGroup
from tests.simulation.made import of_model, simulate_models, violations
from tests.simulation.world import Outcome

PLACES = (test_layer_groups, test_storage_groups, test_peer_groups)
MODELS = (
    (LayerGroup(), LayerGroup(chunk_blocks=2)),
    (LayerGroup(), LayerGroup(chunk_blocks=3), LayerGroup(chunk_blocks=3)),
    (LayerGroup(), LayerGroup(chunk_blocks=1)),
)
NUM_WORLDS = 36


def run(seed: int) -> Outcome:
    """A world of each place and model in turn."""
    place, turn = PLACES[seed % len(PLACES)], seed // len(PLACES)
    return simulate_models(
        seed,
        place.draw_actions,
        place.draw_engines,
        draw_groups=of_model(MODELS[turn % len(MODELS)]),
    )


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [run(seed) for seed in range(NUM_WORLDS)]


def test_chunked_attention_breaks_no_promise(outcomes: list[Outcome]) -> None:
    assert violations(outcomes) == []


@pytest.mark.parametrize(
    ("place", "counter"), [(0, "host_hit_tokens"), (1, "storage_hit_tokens"), (2, "peer_hit_tokens")]
)
def test_chunks_come_back_from_everywhere(outcomes: list[Outcome], place: int, counter: str) -> None:
    met = sum((outcome.met for outcome in outcomes[place :: len(PLACES)]), Counter[str]())
    assert met[counter] > 300
