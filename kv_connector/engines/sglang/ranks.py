"""What the ranks of an engine exchange, and the clock that all of them share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch


class Ranks:
    """The ranks that schedule alike: those of SGLang's attention group. Rank 0 alone where there is no group."""

    def __init__(self, group: Any = None) -> None:
        self._group = group
        is_alone = group is None or not torch.distributed.is_initialized()
        self.rank = 0 if is_alone else torch.distributed.get_rank(group)
        self.count = 1 if is_alone else torch.distributed.get_world_size(group)

    def exchange(self, value: object) -> Sequence[Any]:
        """The values of all ranks, in order. Each rank calls it as often as the others, and waits for them."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(values, value, group=self._group)
        return values


class SharedClock:
    """Seconds that never go back and are the same on all ranks: what a scheduler half decides by a clock, all decide
    alike.

    Several ranks go by the time that rank 0 told last. Between two tellings each look at the clock is a microsecond,
    and every rank looks as often as the others.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._is_alone = ranks.count == 1
        self._now = 0.0

    def __call__(self) -> float:
        if self._is_alone:
            return time.monotonic()
        self._now += 1e-6
        return self._now

    def told(self, seconds: float) -> None:
        """By rank 0, of its own clock."""
        self._now = max(self._now, seconds)
