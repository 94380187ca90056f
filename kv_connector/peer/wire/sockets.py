"""One non-blocking connection: messages in and out, with a bound on what waits to be sent and a limit on every wait."""

from __future__ import annotations

import selectors
import socket
from contextlib import suppress
from typing import Any

from ..base import PeerError
from .frames import MAX_FRAME, FrameReader, frame
from .handshake import Handshake
from .messages import WireMessage, decode, encode

MAX_UNSENT = 16 << 20
_READ_BYTES = 256 << 10
_KEEPALIVE_SECONDS = 5


class Connection:
    """A socket and what is known of the peer behind it. The side channel's thread owns it."""

    def __init__(
        self, link: int, sock: socket.socket, host: str, handshake: Handshake, now: float, seconds: float
    ) -> None:
        """`deadline`: by when the handshake has to be over."""
        self.link = link
        self.sock = sock
        self.host = host
        self.handshake = handshake
        self.is_open = False  # the handshake is over
        self.deadline: float | None = now + seconds
        self._is_connecting = False
        self._seconds = seconds
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._stalled_since: float | None = None
        sock.setblocking(False)

    def begin_connect(self, address: Any) -> None:
        """Start to reach the peer; raises OSError where that fails at once."""
        self._is_connecting = True
        with suppress(BlockingIOError):
            self.sock.connect(address)

    def tune(self, seconds: float) -> None:
        """Small messages go at once, and a machine that is gone is noticed."""
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_SECONDS)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_SECONDS)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2e3 * seconds))

    def opened(self) -> None:
        """The handshake is over."""
        self.is_open, self.deadline = True, None
        self._reader.bound = MAX_FRAME

    def say(self, message: WireMessage, now: float) -> None:
        """A message to be sent, once the handshake is over. Raises PeerError, and sends nothing, over the bounds."""
        assert self.handshake.session is not None
        if len(self._unsent) > MAX_UNSENT:
            raise PeerError(f"it does not read: {len(self._unsent)} bytes wait to be sent")
        self.queue(self.handshake.session.seal(encode(message)), now)

    def queue(self, payload: bytes, now: float) -> None:
        """What is to be sent as it is; the handshake's."""
        if not self._unsent:
            self._stalled_since = now
        self._unsent += frame(payload)

    def events(self) -> int:
        """What to wait for."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent or self._is_connecting else 0)

    def write(self, now: float) -> None:
        """Send what the socket takes; raises OSError where it is broken."""
        if self._is_connecting:
            error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, "cannot be reached")
            self._is_connecting = False
        while self._unsent:
            try:
                sent = self.sock.send(memoryview(self._unsent)[: 1 << 20])
            except BlockingIOError:
                return
            del self._unsent[:sent]
            self._stalled_since = now if self._unsent else None

    def read(self) -> None:
        """Take in what is there. Raises EOFError where the peer closed, or OSError."""
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise EOFError
        self._reader.feed(data)

    def take_shake(self) -> bytes | None:
        """The next that has arrived, as it is: the handshake's. Raises PeerError where it is too long."""
        return self._reader.take()

    def take(self) -> WireMessage | None:
        """The next message that has arrived, once the handshake is over. Raises PeerError for what is none."""
        assert self.handshake.session is not None
        payload = self._reader.take()
        return None if payload is None else decode(self.handshake.session.open(payload))

    def overdue(self, now: float) -> str | None:
        """Why the connection should be given up now, if it should."""
        if self.deadline is not None and now >= self.deadline:
            return f"no handshake within {self._seconds:g} s"
        if self._stalled_since is not None and not self._is_connecting and now - self._stalled_since >= self._seconds:
            return f"it has not read for {self._seconds:g} s"
        return None
