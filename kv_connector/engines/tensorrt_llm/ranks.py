"""How the scheduler and the worker of rank 0 find each other, and how ranks exchange reports.

TensorRT-LLM makes a worker on each rank and a scheduler on rank 0, which know nothing of each other: metadata goes from
the scheduler to all workers in each iteration, and nothing comes back. But every rank calls `get_finished` in every
iteration, and TensorRT-LLM's own collectives are there to be called.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from .scheduler import TieredKVScheduler


class Ranks:
    """The tensor-parallel ranks of an engine. Which one this is, and what the others say, TensorRT-LLM knows in the
    thread that makes the executor and in that of its loop, and not in those that make connectors."""

    def __init__(self, llm_args: Any) -> None:
        self.count = int(getattr(llm_args, "tensor_parallel_size", None) or 1)

    def rank(self) -> int:
        """This one's number."""
        from tensorrt_llm import _utils

        return int(_utils.mpi_rank()) if self.count > 1 else 0

    def exchange(self, value: object) -> Sequence[Any]:
        """The values of all ranks, in order. Each rank calls it as often as the others, and waits for them."""
        from tensorrt_llm import _utils

        if self.count == 1:
            return [value]
        values: Sequence[Any] = _utils.mpi_allgather(value)
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
