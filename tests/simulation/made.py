"""Worlds made for something: engines and histories are drawn by functions of a test, in place of the usual ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
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
