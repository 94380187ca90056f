"""Worlds in which blocks are coded on the host, some of them do not fit, and whoever takes coded bytes for raw ones, or
those of one piece for another's, brings a wrong token. The coder is a plain one: the simulated model's numbers have no
exponents.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from kv_connector.config import HostFormName
from kv_connector.transfer.memory import host_form
from kv_connector.transfer.paths import torch as torch_path
from tests.simulation import config as drawn
from tests.simulation import test_layer_groups, test_refusals
from tests.simulation.config import EngineConfig
from tests.simulation.made import as_drawn, of_model, simulate_models, violations
from tests.simulation.world import Outcome

NUM_WORLDS = 20
MODELS = (None, None, *drawn.MIXED_GROUPS)
HEAD = 16
MARK = 0x5A


def coded_bytes(piece_bytes: int) -> int:
    return HEAD + piece_bytes


def encode(pieces: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Backwards, other bits, and a head; one piece of 32 does not fit."""
    head = torch.full((len(pieces), HEAD), MARK, dtype=torch.uint8)
    coded, fits = torch.cat([head, pieces.flip(1) ^ MARK], dim=1), pieces[:, 0] % 32 != 0
    coded[~fits] = 0xEE
    return coded, fits


def decode(coded: torch.Tensor, piece_bytes: int) -> torch.Tensor:
    assert coded.shape[1] == coded_bytes(piece_bytes)
    assert bool((coded[:, :HEAD] == MARK).all()), "a block is loaded that did not fit, or was never saved"
    return (coded[:, HEAD:] ^ MARK).flip(1)


@pytest.fixture(scope="module", autouse=True)
def coder() -> Iterator[None]:
    with (
        patch.object(host_form, "_can_code", lambda region: True),
        patch.object(host_form, "coded_bytes", coded_bytes),
        patch.object(torch_path, "encode_reference", encode),
        patch.object(torch_path, "decode_reference", decode),
    ):
        yield


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
def outcomes(coder: None) -> list[Outcome]:
    return [run(seed) for seed in range(NUM_WORLDS)]


def test_coded_blocks_break_no_promise(outcomes: list[Outcome]) -> None:
    assert violations(outcomes) == []


def test_coded_blocks_come_back_from_the_host_and_from_storage(outcomes: list[Outcome]) -> None:
    met = sum((outcome.met for outcome in outcomes), Counter[str]())
    for name in ("refused_blocks", "host_hit_tokens", "storage_hit_tokens"):
        assert met[name] > 10, name
