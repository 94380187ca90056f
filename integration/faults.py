"""Faults that tests put into the worker half of a real engine."""

from __future__ import annotations

from typing import Any

from kv_connector.errors import TransferError
from kv_connector.types import Direction


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
