"""The side channel: authenticated links over TCP, driven by one thread's `poll`. Bytes of blocks go another way.

What an unauthenticated connection can do: hold one of a bounded number of places for the time of a handshake. Garbage,
a wrong secret, a message over the bound or a peer that stops reading cost its own link and nothing else.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import ConfigError
from ...log_limiter import LogLimiter
from ...values import shown
from ..base import Connected, Lost, Message, PeerCounters, PeerError, PeerEvent
from .handshake import Handshake, PeerInfo
from .sockets import Connection

_MOST_UNAUTHENTICATED = 64
"""Connections whose handshake is not over; the oldest goes when there are more."""


class SideChannel:
    """Links by number. `seconds` limits a handshake and a peer that does not read."""

    def __init__(
        self,
        bind: str,
        port: int,
        secret: bytes,
        info: PeerInfo,
        seconds: float,
        counters: PeerCounters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listens at once; port 0 takes any. Raises ConfigError where the address cannot be used."""
        self._selector = selectors.DefaultSelector()
        self._secret = secret
        self._info = info
        self._seconds = seconds
        self._counters = counters
        self._clock = clock
        self._links: dict[int, Connection] = {}
        self._peers: dict[int, PeerInfo] = {}
        self._next_link = 0
        self._events: list[PeerEvent] = []
        self._log_limiter = LogLimiter(clock)
        try:
            family = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((bind, port), family=family, backlog=128)
        except (OSError, OverflowError, UnicodeError) as error:
            raise ConfigError(
                f"peer.bind={shown(bind)}, port {port}: cannot listen there ({error}); give an address of this machine "
                "and a port that is free for every rank: the port, and as many behind it"
            ) from error
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._wake_lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, self._woken)

    def info_of(self, link: int) -> PeerInfo | None:
        """What the peer of an open link said of itself."""
        return self._peers.get(link)

    def connect(self, host: str, port: int) -> int:
        """See `PeerTransport.connect`."""
        link = self._new_link()
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, kind, protocol)
        except (OSError, OverflowError, UnicodeError) as error:
            self._never(link, f"{host}:{port}", f"cannot be reached: {error}")
            return link
        handshake = Handshake(self._secret, self._info, is_caller=True)
        connection = Connection(link, sock, f"{host}:{port}", handshake, self._clock(), self._seconds)
        try:
            connection.tune(self._seconds)
            connection.begin_connect(address)
        except OSError as error:
            sock.close()
            self._never(link, connection.host, f"cannot be reached: {error}")
            return link
        self._add(connection)
        for body in handshake.begin():
            self._queue(connection, body)
        return link

    def send(self, link: int, body: Mapping[str, Any]) -> None:
        """See `PeerTransport.send`."""
        connection = self._links.get(link)
        if connection is not None and connection.is_open:
            self._queue(connection, body)

    def drop(self, link: int, reason: str) -> None:
        """See `PeerTransport.drop`."""
        connection = self._links.get(link)
        if connection is not None:
            self._lose(connection, reason)

    def poll(self, timeout: float) -> list[PeerEvent]:
        """Links opened, lost, and messages; waits up to `timeout` seconds for the first."""
        now = self._clock()
        limits = [connection.deadline - now for connection in self._links.values() if connection.deadline is not None]
        for key, mask in self._selector.select(0 if self._events else max(0.0, min([timeout, *limits]))):
            if isinstance(key.data, Connection):
                self._serve(key.data, mask)
            else:
                key.data()
        now = self._clock()
        for connection in list(self._links.values()):
            reason = connection.overdue(now)
            if reason is not None:
                self._lose(connection, reason)
        events, self._events = self._events, []
        return events

    def wake(self) -> None:
        """See `PeerTransport.wake`."""
        with self._wake_lock:  # the descriptor may be somebody else's once it is closed
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Close every socket."""
        for connection in list(self._links.values()):
            connection.sock.close()
        self._links.clear()
        self._listener.close()
        self._selector.close()
        with self._wake_lock:
            fd, self._wake_fd = self._wake_fd, -1
        os.close(fd)

    def _new_link(self) -> int:
        self._next_link += 1
        return self._next_link

    def _never(self, link: int, host: str, reason: str) -> None:
        self._log_limiter.fault(host, reason)
        self._events.append(Lost(link, reason))

    def _add(self, connection: Connection) -> None:
        self._links[connection.link] = connection
        self._selector.register(connection.sock, connection.events(), connection)

    def _queue(self, connection: Connection, body: Mapping[str, Any]) -> None:
        connection.queue(body, self._clock())
        self._selector.modify(connection.sock, connection.events(), connection)

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError:
            return  # it is gone already, or we are out of descriptors: the next one may do better
        unauthenticated = [c for c in self._links.values() if not c.is_open]
        if len(unauthenticated) >= _MOST_UNAUTHENTICATED:
            self._lose(unauthenticated[0], f"{len(unauthenticated)} connections without a handshake")
        handshake = Handshake(self._secret, self._info, is_caller=False)
        connection = Connection(self._new_link(), sock, str(address[0]), handshake, self._clock(), self._seconds)
        try:
            connection.tune(self._seconds)
        except OSError:
            sock.close()
            return
        self._add(connection)

    def _woken(self) -> None:
        os.eventfd_read(self._wake_fd)

    def _serve(self, connection: Connection, mask: int) -> None:
        if self._links.get(connection.link) is not connection:
            return  # lost a moment ago
        try:
            if mask & selectors.EVENT_WRITE:
                connection.write(self._clock())
            messages = connection.read() if mask & selectors.EVENT_READ else []
            while messages:
                if connection.is_open:
                    self._events += [Message(connection.link, body) for body in messages]
                    break
                self._shake(connection, messages[0])
                messages = connection.take()
            self._selector.modify(connection.sock, connection.events(), connection)
        except EOFError:
            self._lose(connection, "it closed the connection")
        except (PeerError, OSError) as error:
            self._lose(connection, str(error) or type(error).__name__)

    def _shake(self, connection: Connection, body: dict[str, Any]) -> None:
        handshake = connection.handshake
        try:
            answers = handshake.take(body)
        except PeerError:
            if handshake.refusal:
                self._queue(connection, {"t": "refused", "reason": handshake.refusal})
                connection.write(self._clock())
            raise
        for answer in answers:
            self._queue(connection, answer)
        if handshake.peer is not None:
            connection.opened()
            self._peers[connection.link] = handshake.peer
            self._log_limiter.well(connection.host)
            self._events.append(Connected(connection.link, handshake.peer.engine_id, handshake.peer.num_blocks))

    def _lose(self, connection: Connection, reason: str) -> None:
        del self._links[connection.link]
        self._peers.pop(connection.link, None)
        self._selector.unregister(connection.sock)
        connection.sock.close()
        if connection.is_open:
            self._counters.lost_links += 1
        else:
            self._counters.refused_links += 1
        self._log_limiter.fault(connection.host, reason)
        self._events.append(Lost(connection.link, reason))
