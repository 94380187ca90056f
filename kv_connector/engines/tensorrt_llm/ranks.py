"""What the two objects of rank 0 know of each other, and how ranks tell one another.

TensorRT-LLM makes a worker on each rank and a scheduler on rank 0, which know nothing of each other: metadata goes from
the scheduler to all workers in each iteration, and nothing comes back. But every rank calls `get_finished` in every
iteration, and TensorRT-LLM's own collectives, over MPI or Ray, are there to be called.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from .scheduler import TieredKVScheduler


class Ranks:
    """The tensor-parallel ranks of an engine."""

    def __init__(self) -> None:
        from tensorrt_llm import _utils

        self._utils = _utils
        self.rank: int = _utils.mpi_rank()
        self.count: int = _utils.mpi_world_size()

    def exchange(self, value: object) -> Sequence[Any]:
        """The values of all ranks, in order. Each rank calls it as often as the others, and waits for them."""
        if self.count == 1:
            return [value]
        values: Sequence[Any] = self._utils.mpi_allgather(value)
        return values


class MeetingPlace:
    """Where the worker of rank 0 finds its scheduler. Both keep it."""

    def __init__(self) -> None:
        self.scheduler: TieredKVScheduler | None = None


_places: WeakValueDictionary[int, MeetingPlace] = WeakValueDictionary()
_lock = threading.Lock()


def meeting_place(llm_args: object) -> MeetingPlace:
    """The same for both objects of an engine, which are made at the same time in two threads of one process, with the
    same `llm_args`. Both keep these, so that nobody else's have their id."""
    with _lock:
        place = _places.get(id(llm_args))
        if place is None:
            place = _places[id(llm_args)] = MeetingPlace()
        return place
