"""Faults that tests put into the worker half of a real engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from kv_connector.errors import TransferError
from kv_connector.transfer.engine import TransferEngine
from kv_connector.types import CopyJob, Direction


class BreakablePath:
    """Moves bytes like another path, but loads fail while `broken`; it has no fallback then."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.broken = False

    def copy(self, copy: Any) -> None:
        """As `CopyPath.copy`."""
        if self.broken and copy.direction is Direction.LOAD:
            raise TransferError("the link is down")
        self.inner.copy(copy)

    def close(self) -> None:
        """As `CopyPath.close`."""
        self.inner.close()


def break_loads(half: Any, broken: bool) -> None:
    """Loads of this worker half fail from now on, or do so no more."""
    queue = half._engine._queues[Direction.LOAD]
    path = queue.paths[0]
    if not isinstance(path, BreakablePath):
        path = BreakablePath(path)
    path.broken = broken
    queue.paths = (path,)


class HeldLoads:
    """Takes loads in the background for a `TransferEngine`, and begins them when it is told to."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._held: list[tuple[Sequence[CopyJob], Any]] = []

    def __call__(self, jobs: Sequence[CopyJob], after: Any) -> frozenset[int]:
        """As `TransferEngine.submit_background_load`."""
        self._held.append((jobs, after))
        return frozenset()

    def release(self) -> None:
        """They begin now."""
        del self._engine.submit_background_load
        self._begin()

    def _begin(self) -> None:
        held, self._held = self._held, []
        for jobs, after in held:
            TransferEngine.submit_background_load(self._engine, jobs, after)


class LateLoads(HeldLoads):
    """As those that are held, but begun when a step is to wait for any: on a GPU such a wait ends some time."""

    _WAITS = ("wait_jobs", "fence", "drain")

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        for name in self._WAITS:
            setattr(engine, name, partial(self._begin_and, name))

    def release(self) -> None:
        """As those that are held."""
        super().release()
        for name in self._WAITS:
            delattr(self._engine, name)

    def _begin_and(self, name: str, *args: Any) -> Any:
        self._begin()
        return getattr(TransferEngine, name)(self._engine, *args)


def hold_loads(half: Any, held: bool, kind: type[HeldLoads] = HeldLoads) -> None:
    """Loads of this worker half in the background are held from now on, or begin."""
    if held:
        half._engine.submit_background_load = kind(half._engine)
    else:
        half._engine.submit_background_load.release()
