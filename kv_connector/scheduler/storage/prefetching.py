"""What storage has of one prefix, from the first question to the last fetched block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...index import Terms
from ...types import BlockHash
from .search import Question, Search


@dataclass(slots=True)
class Prefetching:
    """Of a request that was seen and not admitted, or of nobody. `is_thorough`: it is there to have all of it brought,
    however long that takes and whoever waits."""

    request_ids: tuple[str, ...]  # its own, or none
    block_hashes: Sequence[BlockHash]
    stop: int  # of the hashes so many may be hit
    search: Search
    deadline: float
    terms: Terms  # of the blocks
    is_thorough: bool
    look_ups: dict[int, Question] = field(default_factory=dict)  # of the search, by job under way
    jobs: dict[int, set[int]] = field(default_factory=dict)  # under way, and the hashes whose tokens they bring
    fetched: set[int] = field(default_factory=set)  # hashes whose tokens have come
    coalesced: set[int] = field(default_factory=set)  # those of the jobs that fetch for others
    has_lost: bool = False  # of what it was to have something has not come: see `PrefetchPlanner._may_have_more`
    is_repeated: bool = False  # it is looked up for the second time, and last

    @property
    def is_done(self) -> bool:
        """Whether nothing is asked or on its way."""
        return not self.search.questions and not self.jobs
