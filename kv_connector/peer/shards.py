"""Which part of an engine's KV cache a rank holds, where tensor parallelism (TP) divides the KV heads of each layer."""

from __future__ import annotations

from dataclasses import dataclass

MOST_PARTNERS = 32
"""Ranks of another engine that a rank's heads may be divided over: as many links, and as many parts of a transfer."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of an engine that has `tp_size` of them in each stage of its pipeline, numbered stage by stage."""

    rank: int
    tp_size: int

    def partners(self, tp_size: int) -> range:
        """Ranks of an engine of that TP size which hold some of this one's heads, or all of them; none where neither
        size is a multiple of the other, of `MOST_PARTNERS` times at most, or there is no such engine."""
        small, large = sorted((self.tp_size, tp_size))
        if small < 1 or large % small or large // small > MOST_PARTNERS:
            return range(0)
        stage, position = divmod(self.rank, self.tp_size)
        first = stage * tp_size + position * tp_size // self.tp_size
        return range(first, first + max(1, tp_size // self.tp_size))

    def first_head(self, num_heads: int) -> int:
        """The first of a model's `num_heads` KV heads that this rank holds. Where there are fewer heads than ranks,
        each is held by several ranks that follow one another."""
        return self.rank % self.tp_size * num_heads // self.tp_size
