"""The side channel: authenticated links over TCP, driven by one thread's `poll`. Bytes of blocks go another way.

    connect -> (a name: looked up beside this thread, `resolver`) -> handshake -> open: every message is sealed -> lost

What an unauthenticated connection can do: hold one of a bounded number of places for the time of a handshake, or until
it is the oldest and another one comes. Those that came from outside and those that this side has begun, which go where
requests say, have places of their own. Garbage, a wrong secret, a message that was changed, one over the bound or a
peer that stops reading cost their own link and nothing else, and so does an error of ours while a link is served.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ...errors import ConfigError
from ...log_limiter import LogLimiter
from ...values import shown
from ..base import Lost, Message, PeerCounters, PeerError, PeerEvent
from .handshake import Handshake
from .messages import WireMessage
from .peer_info import PeerInfo
from .resolver import Address, LookUp, Resolver
from .sockets import Connection

_MOST_UNAUTHENTICATED = 64
"""Connections from outside whose handshake is not over; the oldest goes when there are more."""
MOST_CALLS = 256
"""Connections that this side has begun whose handshake is not over; the oldest goes when there are more."""
logger = logging.getLogger("kv_connector.peer")


@dataclass(frozen=True, slots=True)
class _Naming:
    """A link to a host whose name is being looked up."""

    host: str
    deadline: float


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
        look_up: LookUp = socket.getaddrinfo,
    ) -> None:
        """Listens at once; port 0 takes any. `look_up` is what names are looked up with. Raises
        ConfigError where the address cannot be used."""
        self._selector = selectors.DefaultSelector()
        self._secret = secret
        self._info = info
        self._seconds = seconds
        self._counters = counters
        self._clock = clock
        self._links: dict[int, Connection] = {}
        self._naming: dict[int, _Naming] = {}
        self._resolver = Resolver(self.wake, look_up)
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
        link, shown = self._new_link(), f"{host}:{port}"
        try:
            address = self._resolver.address_of(host, port)
            if address is None:
                self._resolver.ask(link, host, port)
                self._naming[link] = _Naming(shown, self._clock() + self._seconds)
            else:
                self._call(link, shown, address)
        except PeerError as error:
            self._never(link, shown, str(error))
        return link

    def send(self, link: int, message: WireMessage) -> None:
        """See `PeerTransport.send`."""
        connection = self._links.get(link)
        if connection is not None and connection.is_open:
            connection.say(message, self._clock())
            self._selector.modify(connection.sock, connection.events(), connection)

    def watch(self, sock: socket.socket, serve: Callable[[], None]) -> None:
        """Call `serve` in each `poll` that finds something to read at a socket; raises nothing itself."""
        self._selector.register(sock, selectors.EVENT_READ, serve)

    def drop(self, link: int, reason: str) -> None:
        """See `PeerTransport.drop`."""
        connection = self._links.get(link)
        if connection is not None:
            self._lose(connection, reason)
        naming = self._naming.pop(link, None)
        if naming is not None:
            self._never(link, naming.host, reason)

    def poll(self, timeout: float) -> list[PeerEvent]:
        """Links opened, lost, and messages; waits up to `timeout` seconds for the first."""
        now = self._clock()
        limits = [connection.deadline - now for connection in self._links.values() if connection.deadline is not None]
        limits += [naming.deadline - now for naming in self._naming.values()]
        for key, mask in self._selector.select(0 if self._events else max(0.0, min([timeout, *limits]))):
            if isinstance(key.data, Connection):
                self._serve(key.data, mask)
            else:
                key.data()
        self._take_names()
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
        self._naming.clear()
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

    def _call(self, link: int, shown: str, address: Address) -> None:
        """Begin to reach a peer; raises PeerError where that fails at once."""
        self._make_room(MOST_CALLS, is_caller=True)
        try:
            sock = socket.socket(address.family, address.kind, address.protocol)
        except OSError as error:
            raise PeerError(f"cannot be reached: {error}") from None
        handshake = Handshake(self._secret, self._info, is_caller=True)
        connection = Connection(link, sock, shown, handshake, self._clock(), self._seconds)
        try:
            connection.tune(self._seconds)
            connection.begin_connect(address.address)
        except OSError as error:
            sock.close()
            raise PeerError(f"cannot be reached: {error}") from None
        for payload in handshake.begin():
            connection.queue(payload, self._clock())
        self._add(connection)

    def _take_names(self) -> None:
        """Go on with names that were found, and give up those that take too long."""
        for found in self._resolver.take():
            naming = self._naming.pop(found.link, None)
            if naming is None:
                continue  # dropped meanwhile
            try:
                if found.address is None:
                    raise PeerError(found.reason)
                self._call(found.link, naming.host, found.address)
            except PeerError as error:
                self._never(found.link, naming.host, str(error))
        now = self._clock()
        for link, naming in [entry for entry in self._naming.items() if entry[1].deadline <= now]:
            del self._naming[link]
            self._never(link, naming.host, f"its name was not found within {self._seconds:g} s; give an address")

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError:
            return  # it is gone already, or we are out of descriptors: the next one may do better
        self._make_room(_MOST_UNAUTHENTICATED, is_caller=False)
        handshake = Handshake(self._secret, self._info, is_caller=False)
        connection = Connection(self._new_link(), sock, str(address[0]), handshake, self._clock(), self._seconds)
        try:
            connection.tune(self._seconds)
        except OSError:
            sock.close()
            return
        self._add(connection)

    def _make_room(self, most: int, is_caller: bool) -> None:
        """For one more connection whose handshake is not over."""
        waiting = [c for c in self._links.values() if not c.is_open and c.handshake.is_caller is is_caller]
        if len(waiting) >= most:
            self._lose(waiting[0], f"it is the oldest of {most} without a handshake")

    def _woken(self) -> None:
        os.eventfd_read(self._wake_fd)

    def _serve(self, connection: Connection, mask: int) -> None:
        if self._links.get(connection.link) is not connection:
            return  # lost a moment ago
        try:
            if mask & selectors.EVENT_WRITE:
                connection.write(self._clock())
            if mask & selectors.EVENT_READ:
                connection.read()
                self._hear(connection)
            self._selector.modify(connection.sock, connection.events(), connection)
        except EOFError:
            self._lose(connection, "it closed the connection")
        except (PeerError, OSError) as error:
            self._lose(connection, str(error) or type(error).__name__)
        except Exception:  # whatever it is that a peer has found: it costs this link
            logger.exception("an internal error costs the link to %s", connection.host)
            self._counters.link_faults += 1
            self._lose(connection, "an error of this side")

    def _hear(self, connection: Connection) -> None:
        while not connection.is_open:
            payload = connection.take_shake()
            if payload is None:
                return
            self._shake(connection, payload)
        while (message := connection.take()) is not None:
            self._events.append(Message(connection.link, message))

    def _shake(self, connection: Connection, payload: bytes) -> None:
        handshake = connection.handshake
        try:
            answers = handshake.take(payload)
        except PeerError:
            if handshake.refusal:
                connection.queue(handshake.refusal, self._clock())
                connection.write(self._clock())
            raise
        for answer in answers:
            connection.queue(answer, self._clock())
        if handshake.peer is not None:
            connection.opened()
            self._peers[connection.link] = handshake.peer
            self._log_limiter.well(connection.host)
            self._events.append(handshake.peer.connected(connection.link))

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
