"""Who remembers pins for the engine's next start."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from ...types import BlockHash, KeptPin

logger = logging.getLogger("kv_connector.scheduler")


class PinKeeper(Protocol):
    """Remembers pins for the next start. Called from the thread of the scheduler half: it waits for nothing and raises
    nothing."""

    def take(self) -> Sequence[KeptPin]:
        """Those of the last start whose time is not over; called once, first."""

    def kept(self, pin: KeptPin) -> None:
        """A prefix is pinned, or for longer."""

    def ended(self, name: tuple[int, BlockHash, bool]) -> None:
        """It is pinned no more; `KeptPin.name`, and perhaps of none that was kept."""

    def close(self) -> None:
        """No pin changes any more. Idempotent."""


class NoKeeper:
    """Pins end with the engine."""

    def take(self) -> Sequence[KeptPin]:
        return ()

    def kept(self, pin: KeptPin) -> None:
        """It is not."""

    def ended(self, name: tuple[int, BlockHash, bool]) -> None:
        """It was not kept."""

    def close(self) -> None:
        """Nothing is held."""


class WarningKeeper(NoKeeper):
    """The same where storage outlives the engine, and so might its pins: the first one that is made is told of."""

    def __init__(self, kind: str) -> None:
        """`kind` of storage."""
        self._kind = kind
        self._has_told = False

    def kept(self, pin: KeptPin) -> None:
        """See `NoKeeper.kept`."""
        if not self._has_told:
            self._has_told = True
            logger.warning("pins end with this engine: storage of kind %r keeps none, a folder does", self._kind)
