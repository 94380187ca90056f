"""What transports over a side channel have in common: its links, and the word that blocks of a grant have arrived."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ..base import Arrived, PeerCounters, PeerError, PeerEvent, PeerPool
from ..wire.channel import SideChannel
from ..wire.handshake import PeerInfo


class Channel(Protocol):
    """Links by number, as `SideChannel` has them: in order and once, or lost. One thread calls all but `wake`."""

    port: int

    def info_of(self, link: int) -> PeerInfo | None:
        """What the peer of an open link said of itself."""

    def connect(self, host: str, port: int) -> int:
        """See `PeerTransport.connect`."""

    def send(self, link: int, body: Mapping[str, Any]) -> None:
        """See `PeerTransport.send`."""

    def drop(self, link: int, reason: str) -> None:
        """See `PeerTransport.drop`."""

    def poll(self, timeout: float) -> list[PeerEvent]:
        """Links opened, lost, and messages; waits up to `timeout` seconds for the first."""

    def wake(self) -> None:
        """See `PeerTransport.wake`."""

    def close(self) -> None:
        """Close every link."""


OpenChannel = Callable[[str, int, bytes, PeerInfo, float, PeerCounters], Channel]
"""Listens at an address and port, as `SideChannel` does with its first six arguments."""


class OverChannel(ABC):
    """See `PeerTransport` for the calls. What is pushed goes another way, which the backend adds and names."""

    transport: str
    poll_seconds: float
    """How long `poll` waits at most while something is under way that tells nothing by itself."""

    def __init__(
        self,
        pool: PeerPool,
        info: PeerInfo,
        extra: Mapping[str, Any],
        bind: str,
        port: int,
        secret: bytes,
        seconds: float,
        open_channel: OpenChannel = SideChannel,
    ) -> None:
        """`extra` is what the backend tells a peer of itself. Raises ConfigError where the address cannot be used."""
        self.counters = PeerCounters()
        self._pool = pool
        info = PeerInfo(info.identity, info.engine_id, info.num_blocks, {"transport": self.transport, **extra})
        self._channel = open_channel(bind, port, secret, info, seconds, self.counters)
        self._events: list[PeerEvent] = []
        self._is_closed = False

    @property
    def port(self) -> int:
        """See `PeerTransport.port`."""
        return self._channel.port

    def connect(self, host: str, port: int) -> int:
        """See `PeerTransport.connect`."""
        return self._channel.connect(host, port)

    def send(self, link: int, body: Mapping[str, Any]) -> None:
        """See `PeerTransport.send`."""
        self._channel.send(link, body)

    def drop(self, link: int, reason: str) -> None:
        """See `PeerTransport.drop`."""
        self._channel.drop(link, reason)

    def wake(self) -> None:
        """See `PeerTransport.wake`."""
        self._channel.wake()

    def poll(self, timeout: float) -> list[PeerEvent]:
        """See `PeerTransport.poll`."""
        if self._is_busy():
            timeout = min(timeout, self.poll_seconds)
        for event in self._channel.poll(0.0 if self._events else timeout):
            self._take(event)
        self._advance()
        events, self._events = self._events, []
        return events

    @abstractmethod
    def _is_busy(self) -> bool:
        """Whether something is under way."""

    @abstractmethod
    def _take(self, event: PeerEvent) -> None:
        """The channel tells of a link."""

    @abstractmethod
    def _advance(self) -> None:
        """Go on with what is under way."""

    def _arrived(self, arrived: Arrived) -> None:
        self.counters.received_bytes += arrived.count * self._pool.bytes_of(arrived.regions)
        self._events.append(arrived)


class OneSided(OverChannel):
    """Where the pusher's own copies write: a grant is a number of blocks to check the peer's word against."""

    is_one_sided = True
    quiet_seconds = 1.0

    def __init__(
        self,
        pool: PeerPool,
        info: PeerInfo,
        extra: Mapping[str, Any],
        bind: str,
        port: int,
        secret: bytes,
        seconds: float,
        open_channel: OpenChannel = SideChannel,
    ) -> None:
        """See `OverChannel`."""
        super().__init__(pool, info, extra, bind, port, secret, seconds, open_channel)
        self._num_granted: dict[tuple[int, int], int] = {}

    def grant(self, link: int, number: int, block_ids: Sequence[int]) -> None:
        """See `PeerTransport.grant`."""
        self._num_granted[link, number] = len(block_ids)

    def revoke(self, link: int, number: int) -> None:
        """See `PeerTransport.revoke`: the peer has to be told, too."""
        self._num_granted.pop((link, number), None)

    def cancel(self, number: int) -> None:
        """See `PeerTransport.cancel`: what was handed on ends by itself."""

    def _hear_written(self, link: int, body: Mapping[str, Any]) -> None:
        """The peer says what it has written. Raises PeerError where that was not granted."""
        arrived = Arrived.decode(link, body, len(self._pool.regions))
        granted = self._num_granted.get((link, arrived.grant))
        if granted is None:
            return  # revoked while this was on its way
        check_granted(arrived, granted)
        self._arrived(arrived)

    def _forget_grants(self, link: int) -> None:
        self._num_granted = {key: count for key, count in self._num_granted.items() if key[0] != link}


def check_granted(arrived: Arrived, num_blocks: int) -> None:
    """Raises PeerError where it goes beyond the grant's blocks."""
    stop = arrived.first + arrived.count
    if stop > num_blocks:
        raise PeerError(f"it filled blocks {arrived.first} to {stop} of {num_blocks} that were granted")
