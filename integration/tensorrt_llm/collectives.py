"""Ranks as threads of one process, and a stand-in for what the connector asks of the package `tensorrt_llm`."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_own = threading.local()


class World:
    """Some ranks that meet at collectives. One that all have entered ends for all of them; a rank that has ended breaks
    those that it has not entered, instead of a standstill."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._condition = threading.Condition()
        self._has_left = False
        self._num_entered = [0] * size
        self._values: dict[int, dict[int, Any]] = {}  # of each collective that some have entered, by rank

    def enter(self, rank: int) -> None:
        """The current thread is one of this rank."""
        _own.world, _own.rank = self, rank

    def leave(self) -> None:
        """A rank has ended: nobody waits for it."""
        with self._condition:
            self._has_left = True
            self._condition.notify_all()

    def allgather(self, rank: int, value: Any) -> list[Any]:
        """The values of all ranks, in order. Raises RuntimeError where one has ended before it."""
        with self._condition:
            number = self._num_entered[rank]
            self._num_entered[rank] += 1
            values = self._values.setdefault(number, {})
            values[rank] = value
            if len(values) == self.size:
                del self._values[number]
                self._condition.notify_all()
            met = self._condition.wait_for(lambda: len(values) == self.size or self._has_left, timeout=60.0)
            if len(values) < self.size:
                raise RuntimeError("another rank has ended" if met else "the other ranks have not come in 60 seconds")
            return [values[other] for other in range(self.size)]


def mpi_rank() -> int:
    """Of the current thread."""
    return int(_own.rank)


def mpi_allgather(value: Any) -> list[Any]:
    """The values of all ranks, in order, as they arrive in other processes; each calls it as often as the others."""
    values: list[bytes] = _own.world.allgather(_own.rank, pickle.dumps(value))
    return [pickle.loads(value) for value in values]


def mpi_broadcast(value: Any, root: int = 0) -> Any:
    """The value of one rank."""
    return mpi_allgather(value)[root]


@contextmanager
def stand_in() -> Iterator[None]:
    """While it lasts, `tensorrt_llm` is these functions."""
    package, utils = ModuleType("tensorrt_llm"), ModuleType("tensorrt_llm._utils")
    vars(package).update(__version__="modelled", _utils=utils)
    vars(utils).update(mpi_rank=mpi_rank, mpi_allgather=mpi_allgather)
    before = {name: sys.modules.get(name) for name in ("tensorrt_llm", "tensorrt_llm._utils")}
    sys.modules.update({"tensorrt_llm": package, "tensorrt_llm._utils": utils})
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
