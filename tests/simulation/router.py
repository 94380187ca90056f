"""What a router makes of an engine's events, which has to be what the engine's host holds."""

from __future__ import annotations

from collections.abc import Iterable

from kv_connector.events import BlockRemoved, BlockStored, CacheEvent
from kv_connector.index import BlockState
from kv_connector.scheduler import SchedulerHalf
from kv_connector.types import BlockHash, Tier

from .checks import Violation


class Router:
    """Of one engine, whose events it takes from the first one on."""

    def __init__(self, half: SchedulerHalf) -> None:
        self._half = half
        self._on_host: set[BlockHash] = set()

    def hear(self, events: Iterable[CacheEvent]) -> None:
        """All that there are at this moment."""
        for event in events:
            if event.tier is not Tier.HOST:
                continue
            if isinstance(event, BlockStored):
                self._on_host.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self._on_host.difference_update(event.block_hashes)
        host = self._half.host
        held = {*host.hashes_of(b for b in host.copies() if host.state(b) is BlockState.RESIDENT)}
        if wrong := len(held ^ self._on_host):
            raise Violation("events", f"of {wrong} blocks routers are wrong whether they are on the host")
