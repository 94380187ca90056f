"""Worlds made for blocks that are coded on their way to other engines: between engines of one TP size and of two, of
models of one kind of layers and of several. Some engines do not code, and some blocks do not fit.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from kv_connector.config import WireForm
from tests.simulation import config as drawn
from tests.simulation import outside, test_peer_groups, test_tp_sizes
from tests.simulation.config import EngineConfig
from tests.simulation.made import violations
from tests.simulation.world import Outcome

NUM_WORLDS = 18


def code(rng: random.Random, configs: list[EngineConfig]) -> list[EngineConfig]:
    usual = [WireForm.LOSSLESS] * 9
    return [replace(c, wire_form=rng.choice([*usual, WireForm.RAW])) for c in configs]


def run(seed: int) -> Outcome:
    worlds: Any = test_tp_sizes if seed % 3 == 2 else test_peer_groups
    with patch.object(drawn, "draw_wire_forms", code), patch.object(outside, "CARRIERS", ("staged",)):
        outcome: Outcome = worlds.run(seed)
    return outcome


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [run(seed) for seed in range(NUM_WORLDS)]


def test_coded_slots_break_no_promise(outcomes: list[Outcome]) -> None:
    assert violations(outcomes) == []


def test_blocks_come_coded_and_raw(outcomes: list[Outcome]) -> None:
    met = sum((outcome.met for outcome in outcomes), Counter[str]())
    assert met["engines that sent coded blocks"] > NUM_WORLDS / 4
    assert met["peer_hit_tokens"] > 1000 and met["receive done"] > 100
