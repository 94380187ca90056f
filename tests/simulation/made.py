"""Worlds made for something: engines and histories are drawn by functions of a test, in place of the usual ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from . import config, workload
from .world import Outcome, simulate


def simulate_made(seed: int, draw_actions: Callable[..., Any], **choices: Callable[..., Any]) -> Outcome:
    """A world with this history. `choices` stand for the functions of these names in `config`."""
    with ExitStack() as stack:
        for name, choose in choices.items():
            stack.enter_context(patch.object(config, name, choose))
        stack.enter_context(patch.object(workload, "draw", draw_actions))
        return simulate(seed)


def violations(outcomes: Iterable[Outcome]) -> list[tuple[int, str]]:
    """By seed, what did not hold."""
    return [(outcome.seed, str(outcome.violation)) for outcome in outcomes if outcome.violation is not None]


def as_drawn(rng: object, configs: Any) -> Any:
    """A choice that changes nothing."""
    return configs


def undisturbed(engine: config.EngineConfig, **choices: Any) -> config.EngineConfig:
    """With these choices: its host is ready at once, its saves have no limit, and no process of its ranks stalls."""
    return replace(engine, save_bandwidth=0, host_ready_seconds=0.0, stalls=0.0, **choices)


def simulate_models(
    seed: int, draw_actions: Callable[..., Any], draw_engines: Callable[..., Any], **choices: Callable[..., Any]
) -> Outcome:
    """A world of these engines, with the policies and memories that they were drawn with."""
    made = {"draw_world": draw_engines, "draw_policies": as_drawn, "draw_remembered": as_drawn}
    return simulate_made(seed, draw_actions, **made, **choices)


def of_model(groups: tuple[config.LayerGroup, ...] | None) -> Callable[..., Any]:
    """As `draw_groups`: engines have this model, or for None the one that they were drawn with."""
    if groups is None:
        return as_drawn
    return lambda rng, configs: [config.with_groups(engine, groups) for engine in configs]
