"""What a step computes of requests: their block tables grow, and what gets full is saved, and offered to others."""

from __future__ import annotations

from collections.abc import Sequence

from ..base import ScheduledRequest, SchedulerOutput, StateBlock
from .companions import Companions
from .requests import RequestState, RequestTable
from .saves.planner import SavePlanner
from .shared import Shared
from .steps import InFlightSteps, first_written
from .watchdog import CopyWatchdog


class ScheduledPlanner:
    """Tells `saves` and companions what each step computes, and `steps` what it writes to. Nothing is saved while
    copies hang."""

    def __init__(
        self,
        shared: Shared,
        requests: RequestTable,
        saves: SavePlanner,
        companions: Companions,
        steps: InFlightSteps,
        watchdog: CopyWatchdog,
    ) -> None:
        self._group_sizes = shared.group_sizes
        self._requests = requests
        self._saves = saves
        self._companions = companions
        self._steps = steps
        self._watchdog = watchdog

    def plan(self, step: int, output: SchedulerOutput, now: float) -> tuple[int, int]:
        """What the step saves and writes to; returns how many tokens it computes, and the most of one request."""
        num_tokens, most, sizes = 0, 0, self._group_sizes
        written: list[int] = []
        told: dict[str, list[StateBlock]] = {}
        for block in output.states:
            if block.request_id in self._requests:
                told.setdefault(block.request_id, []).append(block)
        for item in output.scheduled:
            state = self._requests[item.request_id]
            num_tokens += item.num_scheduled_tokens
            most = max(most, item.num_scheduled_tokens)
            if item.new_block_ids:
                for table, ids in zip(state.tables, item.new_block_ids, strict=False):
                    table.block_ids.extend(ids)
            first = first_written(item.num_computed_tokens, state.request.num_tokens)
            for size, table in zip(sizes, state.tables, strict=False):
                written += table.block_ids[first // size :]
            self._computed(state, item, told.pop(item.request_id, ()), now)
        for request_id, states in told.items():
            so_far = ScheduledRequest(request_id, max(block.num_tokens for block in states), 0)
            self._computed(self._requests[request_id], so_far, states, now)
        if not self._watchdog.hangs:
            self._saves.plan_before_reuse()
        self._steps.planned(step, written)
        return num_tokens, most

    def _computed(self, state: RequestState, item: ScheduledRequest, told: Sequence[StateBlock], now: float) -> None:
        """What is saved, and offered to others, of what the step computes of a request."""
        if not self._watchdog.hangs:
            self._saves.plan(state, item, told, now)
        self._companions.scheduled(item, state.tables, told)
