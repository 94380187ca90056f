"""When what a step computes is planned to be saved: with the step, or with the one behind it.

An engine that plans ahead plans a step while the device computes the one before, so planning costs it nothing, but in
front of a step that finds the device idle, as the first one of a batch does. A prompt's blocks are many, and their
saves take longer to plan than all else: 10 ms for nine prompts of 2048 tokens (vLLM 0.25.1, H200, 2026-11-24). So they
wait for the next plan, which such an engine makes before it hears how the step went, and so before a request can end by
it.

    noted      computed by the step that was planned last
    planned    with the next step, if the request has its blocks still, as it was admitted
    dropped    at its end, when it loses its blocks, and when a copy fails: what was computed may rest on it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...base import ScheduledRequest, StateBlock
from ..requests import RequestState
from .planner import SavePlanner


class ComputedSaves(Protocol):
    """Hands what steps compute to the save planner."""

    def begin(self, now: float) -> None:
        """The next step is being planned."""

    def add(self, state: RequestState, item: ScheduledRequest, told: Sequence[StateBlock], now: float) -> None:
        """It computes this; see `SavePlanner.plan`."""

    def distrust(self) -> None:
        """A copy has failed."""


class SavesNow:
    """What a step computes is planned with it."""

    def __init__(self, planner: SavePlanner) -> None:
        self._planner = planner

    def begin(self, now: float) -> None:
        """Nothing has waited."""

    def add(self, state: RequestState, item: ScheduledRequest, told: Sequence[StateBlock], now: float) -> None:
        """See `ComputedSaves.add`."""
        self._planner.plan(state, item, told, now)

    def distrust(self) -> None:
        """The ledger knows the jobs that carry it."""


class SavesLater:
    """What a step computes is planned with the next one: for groups that keep their blocks, and tell of no states."""

    def __init__(self, planner: SavePlanner, block_size: int) -> None:
        """`block_size`: tokens of a block hash."""
        self._planner = planner
        self._block_size = block_size
        self._noted: list[tuple[RequestState, int, ScheduledRequest]] = []

    def begin(self, now: float) -> None:
        """See `ComputedSaves.begin`."""
        noted, self._noted = self._noted, []
        for state, admission, item in noted:
            if state.admission == admission:
                self._planner.plan(state, item, (), now)

    def add(self, state: RequestState, item: ScheduledRequest, told: Sequence[StateBlock], now: float) -> None:
        """See `ComputedSaves.add`. By the next plan more tokens may be known than the step has computed right: it may
        have computed drafts in their places."""
        num_known = len(state.request.block_hashes) * self._block_size - item.num_computed_tokens
        item = item._replace(num_scheduled_tokens=min(item.num_scheduled_tokens, num_known))
        self._noted.append((state, state.admission, item))

    def distrust(self) -> None:
        """See `ComputedSaves.distrust`."""
        self._noted.clear()
