"""Events of blocks that were stored or removed, for cache-aware routers (layer 0)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .types import BlockHash, Tier

_MAX_PENDING = 1 << 16


@dataclass(frozen=True, slots=True)
class BlockStored:
    """These blocks can now be loaded from `tier`."""

    block_hashes: Sequence[BlockHash]
    tier: Tier


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """These blocks are no longer on `tier`; after a reset of a large host a million of them."""

    block_hashes: Sequence[BlockHash]
    tier: Tier


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Too many events were not fetched: the content of `tier` is unknown, and readers must start afresh."""

    tier: Tier


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventLog:
    """Events since the last `take`, bounded: a log that nobody reads turns into one `AllBlocksCleared`. Without
    `is_read` nothing is kept at all."""

    def __init__(self, is_read: bool = True) -> None:
        self.is_read = is_read
        self._events: list[CacheEvent] = []

    def add(self, event: CacheEvent) -> None:
        """Append one event."""
        if not self.is_read:
            return
        if len(self._events) >= _MAX_PENDING:
            self._events = [AllBlocksCleared(event.tier)]
        self._events.append(event)

    def take(self) -> list[CacheEvent]:
        """All events since the last call, oldest first."""
        events, self._events = self._events, []
        return events
