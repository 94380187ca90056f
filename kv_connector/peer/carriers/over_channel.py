"""What transports over a side channel have in common: their links, and the word that blocks of a grant have arrived.

A link is met once the backend has made of the peer's info what it needs. What comes over one that is not met, or not
any more, is nobody's; whatever goes wrong while a peer is met or heard costs its link.
"""

from __future__ import annotations

import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ...errors import KVConnectorError
from ..base import Arrived, Connected, Lost, Message, PeerCounters, PeerEvent, PeerPool
from ..clock import CLOCK, Clock
from ..wire.channel import SideChannel
from ..wire.messages import WireMessage
from ..wire.peer_info import PeerInfo
from .leases import Process, WriteLeases
from .processes import PeerProcess, own_process

logger = logging.getLogger("kv_connector.peer")


class Channel(Protocol):
    """Links by number, as `SideChannel` has them: in order and once, or lost. One thread calls all but `wake`."""

    port: int

    def info_of(self, link: int) -> PeerInfo | None:
        """What the peer of an open link said of itself."""

    def connect(self, host: str, port: int) -> int:
        """See `PeerTransport.connect`."""

    def send(self, link: int, message: WireMessage) -> None:
        """See `PeerTransport.send`."""

    def watch(self, sock: socket.socket, serve: Callable[[], None]) -> None:
        """Call `serve` in each `poll` that finds something to read at a socket."""

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


@dataclass(frozen=True, slots=True)
class Endpoint:
    """As whom a transport presents itself, in `info`, and where it listens; port 0 takes any. `seconds`: see
    `SideChannel`, which `open_channel` opens."""

    info: PeerInfo
    bind: str
    port: int
    secret: bytes = field(repr=False)
    seconds: float
    open_channel: OpenChannel = SideChannel
    clock: Clock = CLOCK


class OverChannel(ABC):
    """See `PeerTransport` for the calls. What is pushed goes another way, which the backend adds and names."""

    transport: str
    poll_seconds: float
    """How long `poll` waits at most while something is under way that tells nothing by itself."""
    longest_transfer_seconds: float
    """What was posted to a peer's memory lands within so many seconds or never; 0 where nothing is."""

    def __init__(self, pool: PeerPool, extra: Mapping[str, Any], endpoint: Endpoint) -> None:
        """`extra` is what the backend tells a peer of itself. Raises ConfigError where the address cannot be used."""
        self.counters = PeerCounters()
        self._pool = pool
        self._clock = endpoint.clock
        own = {"transport": self.transport, "process": own_process()}
        self._info = replace(endpoint.info, extra={**own, **extra})
        self._channel = endpoint.open_channel(
            endpoint.bind, endpoint.port, endpoint.secret, self._info, endpoint.seconds, self.counters
        )
        self._leases = WriteLeases(self._channel.send, self.longest_transfer_seconds, endpoint.clock.monotonic)
        self._events: list[PeerEvent] = []
        self._met: set[int] = set()
        self._is_closed = False

    @property
    def port(self) -> int:
        """See `PeerTransport.port`."""
        return self._channel.port

    def connect(self, host: str, port: int) -> int:
        """See `PeerTransport.connect`."""
        return self._channel.connect(host, port)

    def send(self, link: int, message: WireMessage) -> None:
        """See `PeerTransport.send`."""
        self._channel.send(link, message)

    def drop(self, link: int, reason: str) -> None:
        """See `PeerTransport.drop`."""
        self._met.discard(link)  # nothing that follows may look as if it had been told
        self._channel.drop(link, reason)

    def wake(self) -> None:
        """See `PeerTransport.wake`."""
        self._channel.wake()

    def poll(self, timeout: float) -> list[PeerEvent]:
        """See `PeerTransport.poll`."""
        self._leases.turn()
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
    def _meet(self, link: int, info: PeerInfo) -> None:
        """A link is open. Raises PeerError where the peer's info is none that one can work with."""

    @abstractmethod
    def _hear(self, link: int, message: WireMessage) -> bool:
        """Take what a peer that was met says, if it is for the backend. Raises PeerError for what it may not say."""

    @abstractmethod
    def _lost(self, link: int) -> None:
        """A link is gone, which may not have been met."""

    @abstractmethod
    def _advance(self) -> None:
        """Go on with what is under way."""

    def _take(self, event: PeerEvent) -> None:
        """The channel tells of a link."""
        if isinstance(event, Connected):
            info = self._channel.info_of(event.link)
            if info is not None and self._guarded(event.link, self._meet, event.link, info):
                self._met.add(event.link)
                self._leases.met(event.link, self._process_of(info))
                self._events.append(event)
        elif isinstance(event, Message):
            if event.link in self._met:
                self._guarded(event.link, self._told, event)
        elif isinstance(event, Lost):
            self._met.discard(event.link)
            self._leases.lost(event.link)
            self._lost(event.link)
            self._events.append(event)

    def _process_of(self, info: PeerInfo) -> Process:
        return PeerProcess(info.extra.get("process"))

    def _told(self, event: Message) -> None:
        if not self._leases.hear(event.link, event.message) and not self._hear(event.link, event.message):
            self._events.append(event)

    def _guarded(self, link: int, act: Callable[..., object], *arguments: object) -> bool:
        """Whatever goes wrong with a link costs that link; whether all went well."""
        try:
            act(*arguments)
        except (OSError, KVConnectorError) as error:
            self.drop(link, str(error))
            return False
        except Exception:  # what a peer has found that nobody thought of
            logger.exception("an internal error costs a link to another engine")
            self.counters.link_faults += 1
            self.drop(link, "an error of this side")
            return False
        return True

    def _arrived(self, pool: PeerPool, arrived: Arrived) -> None:
        """Blocks are there; `pool` is what the peer holds of them."""
        self.counters.received_bytes += arrived.count * pool.bytes_of(arrived.regions)
        self._events.append(arrived)
