"""Worlds made for hits that begin together: users ask in bursts, for the same documents again and again, of engines
where a load takes longer than what a request computes, and computing the hit longer still. So loads in a step, in the
background, and of others' prefixes mix, under faults."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from kv_connector.config import LoadChoice, WritePolicy
from kv_connector.scheduler.loads import rates
from kv_connector.scheduler.loads.choice import LoadPlanner
from kv_connector.scheduler.loads.rates import HitLoad, LoadEstimate, LoadMode, Rate
from tests.simulation import config as drawn
from tests.simulation import workload
from tests.simulation.config import EngineConfig
from tests.simulation.made import of_model, simulate_models, undisturbed, violations
from tests.simulation.workload import Action

SEEDS = range(24)
KINDS = {"arrive": 40, "abort": 3, "again": 2, "fail": 4, "freeze": 1, "reset": 0.5, "weights": 0.5, "trap": 6}


class Known(Rate):
    """A rate that is not learned."""

    def observe(self, amount: float, seconds: float) -> None:
        """It stays as it is."""


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How hits came to the device of requests that asked for the first time, beside others that began in the step."""
    met = Counter[str]()
    begin, choose = LoadEstimate.__init__, LoadPlanner.choose

    def begin_knowing(estimate: LoadEstimate, max_stall_seconds: float) -> None:
        begin(estimate, max_stall_seconds)
        estimate._loading, estimate._prefill = Known(value=100.0), Known(value=200.0)

    def count(planner: LoadPlanner, request_id: str, hit: HitLoad, *rest: Any) -> LoadMode:
        is_first = request_id not in planner._asked
        mode = choose(planner, request_id, hit, *rest)
        if is_first and hit.num_beginning >= hit.num_others > 0:
            met[mode.value] += 1
        return mode

    monkeypatch.setattr(LoadEstimate, "__init__", begin_knowing)
    monkeypatch.setattr(LoadPlanner, "choose", count)
    monkeypatch.setattr(rates, "_PROMPT_TOKENS", 4)  # prompts are short here
    return met


def draw_engines(rng: random.Random) -> list[EngineConfig]:
    """One, with room for some requests at a time."""
    return [
        undisturbed(
            drawn.draw(rng),
            layer_groups=(drawn.LayerGroup(),),
            num_device_blocks=rng.choice([24, 48]),
            num_host_blocks=rng.choice([100, 200]),
            write_policy=rng.choice([WritePolicy.WRITE_THROUGH, WritePolicy.ADAPTIVE]),
            load_choice=LoadChoice.AUTO,
            max_running=rng.choice([2, 4, 8]),
            max_step_tokens=rng.choice([48, 200]),
            host_seconds=rng.choice([1e-3, 0.03, 0.1]),
        )
    ]


def draw_actions(rng: random.Random, configs: Sequence[EngineConfig]) -> list[Action]:
    time, actions = 0.0, []
    for number in range(120):
        time += rng.expovariate(1 / 0.2) * (rng.random() < 0.3)
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0] if number > 10 else "arrive"
        actions.append(Action(number, time, kind, 0, workload._choices(rng, kind, configs, 0, 8, number)))
    return actions


def test_hits_that_begin_together_break_no_promise(begun: Counter[str]) -> None:
    model = of_model((drawn.LayerGroup(),))
    outcomes = [simulate_models(seed, draw_actions, draw_engines, draw_groups=model) for seed in SEEDS]
    assert violations(outcomes) == []
    assert min(begun[mode.value] for mode in (LoadMode.SYNC, LoadMode.ASYNC)) >= 20, begun
    assert sum(outcome.met["host_hit_tokens"] for outcome in outcomes) > 1000
