"""Who connects to a side as a peer may not: a socket that says what a test wants, and time that passes as it says."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from kv_connector.peer.wire.frames import MAX_FRAME, FrameReader, frame
from kv_connector.peer.wire.handshake import Handshake
from kv_connector.peer.wire.messages import WireMessage, decode, encode
from kv_connector.peer.wire.peer_info import PeerInfo
from kv_connector.peer.wire.session import Session
from tests.peer.peers import SECONDS, SECRET, Side, until


class Time:
    """Of a side's channel: it passes when a test says so, however long this process stands still."""

    def __init__(self, side: Side) -> None:
        self._now = 0.0
        side.transport._channel._clock = lambda: self._now  # type: ignore[attr-defined]

    def until(self, condition: Callable[[], bool], *sides: Side) -> None:
        """See `until`; ten seconds pass before each look."""

        def later() -> bool:
            self._now += 10.0
            return condition()

        until(later, *sides)


class Raw:
    """A socket that says whatever the test wants to a transport, which is polled meanwhile."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.sock = socket.create_connection(("127.0.0.1", side.transport.port), timeout=SECONDS)
        self.sock.settimeout(0.01)
        self.reader = FrameReader()
        self.reader.bound = MAX_FRAME
        self.session: Session | None = None

    def say(self, message: WireMessage) -> None:
        """As a peer does: sealed, once there is a session."""
        self.say_bytes(encode(message))

    def say_bytes(self, payload: bytes) -> None:
        """Sealed, whatever it is."""
        self.sock.sendall(frame(payload if self.session is None else self.session.seal(payload)))

    def hear(self) -> WireMessage | None:
        """The next message; None where the connection is closed."""
        payload = self.hear_bytes()
        if payload is None:
            return None
        return decode(payload if self.session is None else self.session.open(payload))

    def hear_bytes(self) -> bytes | None:
        """The next message as it comes; None where the connection is closed."""
        end = time.monotonic() + SECONDS
        while (payload := self.reader.take()) is None:
            assert time.monotonic() < end
            self.side.poll()
            try:
                data = self.sock.recv(65536)
            except TimeoutError:
                continue
            except ConnectionResetError:
                return None
            if not data:
                return None
            self.reader.feed(data)
        return payload

    def shake_hands(self, info: PeerInfo, secret: bytes = SECRET) -> WireMessage | None:
        """As a caller does; the last answer."""
        handshake = Handshake(secret, info, is_caller=True)
        for payload in handshake.begin():
            self.sock.sendall(frame(payload))
        challenge = self.hear_bytes()
        assert challenge is not None
        for payload in handshake.take(challenge):
            self.sock.sendall(frame(payload))
        self.session = handshake.session
        return self.hear()
