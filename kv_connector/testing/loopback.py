"""A backend within one process, for tests: what it carries arrives when, and if, the test says so."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import count

import numpy as np

from ..peer.base import Arrived, Ids, Lost, Message, PeerCounters, PeerEvent, PeerPool, Push, Pushed
from ..peer.carriers.pool import HostBlocks, shared_part
from ..peer.wire.messages import WireMessage, decode, encode
from ..peer.wire.peer_info import PeerInfo


class LoopbackNet:
    """Where loopback transports find each other: by port. `hold` keeps pushes back until it is cleared."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.transports: dict[int, LoopbackTransport] = {}
        self.ports = count(1)
        self.links = count(1)
        self._hold = False

    @property
    def hold(self) -> bool:
        """Whether pushes are kept back."""
        return self._hold

    @hold.setter
    def hold(self, value: bool) -> None:
        with self.changed:
            self._hold = value
            self.changed.notify_all()

    def cut(self, port: int) -> None:
        """Every link of the transport at this port is lost."""
        with self.changed:
            transport = self.transports[port]
            for link in list(transport.ends):
                transport.drop(link, "the link was cut")


class LoopbackTransport:
    """See `PeerTransport`. A push is copied by the receiver, in its `poll`."""

    is_one_sided = False

    def __init__(self, net: LoopbackNet, pool: PeerPool, info: PeerInfo, secret: bytes = b"") -> None:
        self.counters = PeerCounters()
        self.port = next(net.ports)
        self.ends: dict[int, tuple[LoopbackTransport, int]] = {}  # by link: the other transport, and its link
        self._net = net
        self._pool = pool
        self._info = info
        self._secret = secret
        self._grants: dict[tuple[int, int], Ids] = {}
        self._inbox: deque[PeerEvent] = deque()
        self._pushes: deque[tuple[int, Push]] = deque()
        self._is_awake = False
        with net.changed:
            net.transports[self.port] = self

    def connect(self, host: str, port: int) -> int:
        """See `PeerTransport.connect`."""
        with self._net.changed:
            link, other = next(self._net.links), self._net.transports.get(port)
            reason = "cannot be reached" if other is None else self._refusal(other)
            if other is None or reason:
                self._tell(Lost(link, reason))
                self.counters.refused_links += 1
                return link
            back = next(self._net.links)
            self.ends[link], other.ends[back] = (other, back), (self, link)
            self._tell(other._info.connected(link))
            other._tell(self._info.connected(back))
            return link

    def send(self, link: int, message: WireMessage) -> None:
        """See `PeerTransport.send`."""
        heard = decode(encode(message))
        with self._net.changed:
            if link in self.ends:
                other, back = self.ends[link]
                other._tell(Message(back, heard))

    def grant(self, link: int, number: int, block_ids: Sequence[int]) -> None:
        """See `PeerTransport.grant`."""
        with self._net.changed:
            self._grants[link, number] = np.array(block_ids, dtype=np.int64)

    def revoke(self, link: int, number: int) -> None:
        """See `PeerTransport.revoke`."""
        with self._net.changed:
            self._grants.pop((link, number), None)

    def push(self, link: int, push: Push) -> None:
        """See `PeerTransport.push`."""
        ids = push.source_ids
        assert len(ids) and 0 <= ids.min() <= ids.max() < self._pool.num_blocks, f"{ids} of {self._pool.num_blocks}"
        with self._net.changed:
            if link in self.ends:
                self._pushes.append((link, push))
                self._net.changed.notify_all()
            else:
                self._tell(Pushed(push.number, False))

    def cancel(self, number: int) -> None:
        """See `PeerTransport.cancel`."""
        with self._net.changed:
            if any(push.number == number for _, push in self._pushes):
                self._pushes = deque(entry for entry in self._pushes if entry[1].number != number)
                self._tell(Pushed(number, False))

    def drop(self, link: int, reason: str) -> None:
        """See `PeerTransport.drop`."""
        with self._net.changed:
            if link in self.ends:
                other, back = self.ends[link]
                self._lose(link, reason)
                other._lose(back, "it closed the connection")

    def poll(self, timeout: float) -> list[PeerEvent]:
        """See `PeerTransport.poll`."""
        deadline = time.monotonic() + timeout
        with self._net.changed:
            while not (self._inbox or self._is_awake or (self._pushes and not self._net.hold)):
                left = deadline - time.monotonic()
                if left <= 0 or not self._net.changed.wait(left):
                    break
            while self._pushes and not self._net.hold:
                self._carry(*self._pushes.popleft())
            self._is_awake = False
            events = list(self._inbox)
            self._inbox.clear()
            return events

    def quiet_in(self, link: int) -> float:
        """See `PeerTransport.quiet_in`."""
        return 0.0

    def wake(self) -> None:
        """See `PeerTransport.wake`."""
        with self._net.changed:
            self._is_awake = True
            self._net.changed.notify_all()

    def close(self) -> None:
        """See `PeerTransport.close`."""
        with self._net.changed:
            for link in list(self.ends):
                self.drop(link, "closed")
            self._net.transports.pop(self.port, None)

    def _refusal(self, other: LoopbackTransport) -> str:
        if other._secret != self._secret:
            return "it does not know the secret"
        return "; ".join(self._info.identity.differences(other._info.identity))

    def _part_for(self, other: LoopbackTransport) -> PeerPool:
        return shared_part(self._pool, self._info.identity, other._info.identity)

    def _carry(self, link: int, push: Push) -> None:
        other, back = self.ends[link]
        granted = other._grants.get((back, push.grant))
        if granted is not None and push.first + len(push.source_ids) > len(granted):
            self._tell(Pushed(push.number, False))
            other.drop(back, "blocks that were not granted")
            return
        if granted is not None:
            ours, theirs = self._part_for(other), other._part_for(self)
            count_, size = len(push.source_ids), ours.bytes_of(push.regions)
            packed = np.empty((count_, size), dtype=np.uint8)
            HostBlocks(ours).pack(push.source_ids, push.regions, packed)
            HostBlocks(theirs).unpack(granted[push.first : push.first + count_], push.regions, packed)
            self.counters.sent_bytes += packed.size
            other.counters.received_bytes += packed.size
            other._tell(Arrived(back, push.grant, push.first, count_, push.regions))
        self._tell(Pushed(push.number, True))

    def _lose(self, link: int, reason: str) -> None:
        if self.ends.pop(link, None) is None:
            return
        lost = [push.number for owner, push in self._pushes if owner == link]
        self._pushes = deque(entry for entry in self._pushes if entry[0] != link)
        for number in lost:
            self._tell(Pushed(number, False))
        self.counters.lost_links += 1
        self._tell(Lost(link, reason))

    def _tell(self, event: PeerEvent) -> None:
        self._inbox.append(event)
        self._net.changed.notify_all()
