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
    """Some ranks that meet at collectives. A rank that has ended breaks them for all, instead of a standstill."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=60.0)
        self._values: list[Any] = [None] * size

    def enter(self, rank: int) -> None:
        """The current thread is one of this rank."""
        _own.world, _own.rank = self, rank

    def leave(self) -> None:
        """A rank has ended: nobody waits for it."""
        self._barrier.abort()

    def allgather(self, rank: int, value: Any) -> list[Any]:
        """The values of all ranks, in order."""
        if self.size == 1:
            return [value]
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()  # before the next value is put
        return values


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
