"""What transports over a side channel have in common: its links, the word that blocks of a grant have arrived, and the
leases within which one side writes into the other's memory.

A link is met once the backend has made of the peer's info what it needs. What comes over one that is not met, or not
any more, is nobody's; whatever goes wrong while a peer is met or heard costs its link.
"""

from __future__ import annotations

import logging
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from ...errors import KVConnectorError
from ..base import (
    Arrived,
    Connected,
    Lost,
    Message,
    PeerCounters,
    PeerError,
    PeerEvent,
    PeerPool,
    Push,
    Pushed,
)
from ..clock import CLOCK, Clock
from ..wire.channel import SideChannel
from ..wire.messages import Filled, Want, WireMessage
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


class OverChannel(ABC):
    """See `PeerTransport` for the calls. What is pushed goes another way, which the backend adds and names."""

    transport: str
    poll_seconds: float
    """How long `poll` waits at most while something is under way that tells nothing by itself."""
    longest_transfer_seconds: float
    """What was posted to a peer's memory lands within so many seconds or never; 0 where nothing is."""

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
        clock: Clock = CLOCK,
    ) -> None:
        """`extra` is what the backend tells a peer of itself. Raises ConfigError where the address cannot be used."""
        self.counters = PeerCounters()
        self._pool = pool
        self._clock = clock
        info = PeerInfo(
            info.identity,
            info.engine_id,
            info.num_blocks,
            {"transport": self.transport, "process": own_process(), **extra},
        )
        self._info = info
        self._channel = open_channel(bind, port, secret, info, seconds, self.counters)
        self._leases = WriteLeases(self._channel.send, self.longest_transfer_seconds, clock.monotonic)
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


class OneSided(OverChannel):
    """Where the pusher's own copies write: a grant is a number of blocks to check the peer's word against, and a push
    waits for a lease."""

    is_one_sided = True

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
        clock: Clock = CLOCK,
    ) -> None:
        """See `OverChannel`."""
        super().__init__(pool, info, extra, bind, port, secret, seconds, open_channel, clock)
        self._num_granted: dict[tuple[int, int], int] = {}
        self._waiting: dict[int, deque[Push]] = {}  # for a lease, by link

    def push(self, link: int, push: Push) -> None:
        """See `PeerTransport.push`."""
        ids = push.source_ids
        assert len(ids) and 0 <= ids.min() <= ids.max() < self._pool.num_blocks, f"{ids} of {self._pool.num_blocks}"
        if link in self._met:
            self._waiting.setdefault(link, deque()).append(push)
            self._post_waiting()
        else:
            self._events.append(Pushed(push.number, False))

    def grant(self, link: int, number: int, block_ids: Sequence[int]) -> None:
        """See `PeerTransport.grant`."""
        self._num_granted[link, number] = len(block_ids)

    def revoke(self, link: int, number: int) -> None:
        """See `PeerTransport.revoke`: the peer has to be told, too."""
        self._num_granted.pop((link, number), None)

    def cancel(self, number: int) -> None:
        """See `PeerTransport.cancel`: what was posted ends by itself."""
        for link, waiting in self._waiting.items():
            self._end_waiting(link, [push for push in waiting if push.number == number])

    def quiet_in(self, link: int) -> float:
        """See `PeerTransport.quiet_in`."""
        return self._leases.quiet_in(link)

    def close(self) -> None:
        """See `PeerTransport.close`. Waits for what is being written: it is read from memory that goes."""
        if self._is_closed:
            return
        self._is_closed = True
        end = self._clock.monotonic() + self.longest_transfer_seconds
        while self._finish_writing() and self._clock.monotonic() < end:
            self._leases.turn()
            for event in self._channel.poll(0.0):
                self._take(event)
            self._clock.sleep(self.poll_seconds)
        self._channel.close()
        self._release()

    @abstractmethod
    def _release(self) -> None:
        """Free everything; no link is open any more."""

    @abstractmethod
    def _finish_writing(self) -> bool:
        """Tell of writes that have ended; whether others are under way."""

    @abstractmethod
    def _post(self, link: int, push: Push, may_write: Callable[[], bool]) -> bool:
        """Begin to write, and say so; Pushed comes once it is over, at once where the link is lost. While a write is
        made this side may stand still: nothing is begun where `may_write`, asked right in front of it, says no."""

    def _meet(self, link: int, info: PeerInfo) -> None:
        here, there = self._info.identity, info.identity
        if here.pieces != there.pieces:
            raise PeerError(
                f"tp_size is {here.tp_size} here and {there.tp_size} there, and KV heads are divided anew in host "
                'memory only: give both engines peer.route "staged"'
            )

    def _hear(self, link: int, message: WireMessage) -> bool:
        if isinstance(message, Want):
            self._leases.may_write(link)  # asks: the answer is there when the first blocks are computed
        return False

    def _advance(self) -> None:
        self._post_waiting()
        self._finish_writing()

    def _lost(self, link: int) -> None:
        self._num_granted = {key: count for key, count in self._num_granted.items() if key[0] != link}
        self._end_waiting(link, list(self._waiting.get(link, ())))
        self._waiting.pop(link, None)

    def _post_waiting(self) -> None:
        for link in [link for link, waiting in self._waiting.items() if waiting]:
            self._guarded(link, self._post_leased, link)

    def _post_leased(self, link: int) -> None:
        """Post what this side has a lease for; looked at before each write is made, and again in front of it."""
        waiting, may_write = self._waiting[link], partial(self._leases.may_write, link)
        while waiting and link in self._met and may_write():
            push = waiting.popleft()
            if not self._post(link, push, may_write):
                waiting.appendleft(push)

    def _hear_written(self, link: int, told: Filled) -> None:
        """The peer says what it has written. Raises PeerError where that was not granted."""
        arrived = told.arrived(link, len(self._pool.regions))
        granted = self._num_granted.get((link, arrived.grant))
        if granted is None:
            return  # revoked while this was on its way
        check_granted(arrived, granted)
        self._arrived(self._pool, arrived)

    def _end_waiting(self, link: int, pushes: Sequence[Push]) -> None:
        for push in pushes:
            self._waiting[link].remove(push)
            self._events.append(Pushed(push.number, False))


def check_granted(arrived: Arrived, num_blocks: int) -> None:
    """Raises PeerError where it goes beyond the grant's blocks."""
    stop = arrived.first + arrived.count
    if stop > num_blocks:
        raise PeerError(f"it filled blocks {arrived.first} to {stop} of {num_blocks} that were granted")
