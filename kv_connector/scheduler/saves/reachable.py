"""Which of a request's blocks a lookup could reach if they were saved: none goes beyond a missing block."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from ...index import BlockState
from ...types import BlockHash
from ..shared import Shared
from ..tables import BlockTable
from .refusals import Refusals


@dataclass(slots=True)
class Reach:
    """How far what is saved of a request can be reached, in hashes. Only `Reachable` writes to it."""

    first_unreachable: int = sys.maxsize
    """The first hash of a block that is not saved in some block group. Nothing behind is in any, but for what an
    operator has pinned: nobody could reach it."""
    num_refusals: int = 0  # that were found when its blocks were looked for among them: see `Refusals.num_found`


class Reachable:
    """Says what is worth saving of a request, by where the first hole is in what of it is on the host.

    `absent_is_lost`: what a request has shown before, and is not on the host, has gone from it for good.
    """

    def __init__(self, shared: Shared, refusals: Refusals, absent_is_lost: bool) -> None:
        self._grouped = shared.grouped
        self._tree = shared.grouped.tree
        self._host = shared.host
        self._metrics = shared.metrics
        self._refusals = refusals
        self._absent_is_lost = absent_is_lost

    def look_for_holes(
        self, reach: Reach, hashes: Sequence[BlockHash], tables: Sequence[BlockTable], num_hashes: int
    ) -> None:
        """Nobody can reach what comes behind a block that has gone from the host since it was saved, or did not fit."""
        for group in self._grouped.full:
            table, size = tables[group], self._grouped.groups[group].hashes_per_block
            keys, full = self._grouped.keys(hashes, group), num_hashes // size
            first = table.unsaved[0] if table.unsaved else min(table.next_block, full)
            if first and self._has_gone(keys[first - 1]):
                self._lose_from(reach, size, first - 1)
            if reach.num_refusals < self._refusals.num_found:  # perhaps of what this request has shown before
                self.lose_unfit(reach, size, keys[: min(table.next_block, full)], 0)
        reach.num_refusals = self._refusals.num_found

    def lose_unfit(self, reach: Reach, size: int, keys: Sequence[BlockHash], first: int) -> None:
        """Of these, which are the blocks of `size` hashes from `first` on, nobody could reach what is behind one that
        does not fit."""
        if (num_fit := self._refusals.first_in(keys)) < len(keys):
            self._lose_from(reach, size, first + num_fit)

    def declined(self, reach: Reach, size: int, keys: Sequence[BlockHash], indices: Sequence[int]) -> list[int]:
        """The first of these blocks is worth less than what would go for it, so nobody could reach the others: see
        `of`."""
        self._lose_from(reach, size, indices[0])
        return self.of(reach, size, keys, indices)

    def of(self, reach: Reach, size: int, keys: Sequence[BlockHash], indices: Sequence[int]) -> list[int]:
        """Of these blocks of `size` hashes, which are in order, those that somebody could reach on the host, and what
        an operator has pinned right behind them; the others are declined, and counted."""
        indices, stop = list(indices), reach.first_unreachable // size
        if not indices or indices[-1] < stop:
            return indices
        num_kept = bisect_left(indices, stop)
        num_kept += self.num_pinned(keys, indices[num_kept:])
        self._metrics.declined_saves_blocks += len(indices) - num_kept
        return indices[:num_kept]

    def num_pinned(self, keys: Sequence[BlockHash], indices: Sequence[int]) -> int:
        """How many of these blocks, which are in order, are pinned, up to one that does not fit: prefixes are, so the
        first ones."""
        for num_pinned, index in enumerate(indices):
            node = self._tree.get(keys[index])
            if node is None or not self._tree.pins[node] or keys[index] in self._refusals:
                return num_pinned
        return len(indices)

    def _has_gone(self, key: BlockHash) -> bool:
        """Whether a block has gone from the host since it was saved, for good."""
        if not self._absent_is_lost:
            return False
        node = self._tree.get(key)
        return node is None or self._host.node_state(node) is BlockState.ABSENT

    def _lose_from(self, reach: Reach, size: int, first: int) -> None:
        reach.first_unreachable = min(reach.first_unreachable, first * size)
