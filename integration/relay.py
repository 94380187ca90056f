"""Somebody between two engines who does not know their secret, and passes on what they say, with changes.

Only the two frames that begin a handshake are not sealed. Of all others, whoever is given one that is not the next
that the other side has sealed has to close the link by itself: the relay does not tell it that the other has closed,
and who has not closed in the end has accepted what was changed.
"""

from __future__ import annotations

import json
import random
import select
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from kv_connector.peer.base import PeerError
from kv_connector.peer.wire.frames import MAX_FRAME, FrameReader, frame
from kv_connector.peer.wire.messages import Want, decode, encode
from kv_connector.peer.wire.session import NONCE_BYTES, SEAL_BYTES

_PATIENCE = 4.0
"""Seconds in which a side has to close, once its transfer has ended."""
_FIRST_SEALED = 1
_BEHIND_HANDSHAKE = 2
Said = dict[bool, list[bytes]]
"""Payloads in their order: the consumer's, and what it is told."""


@dataclass(frozen=True, slots=True)
class Heard:
    """The message that is to be passed on, and what else the relay knows by now."""

    rng: random.Random
    is_consumers: bool
    number: int
    payload: bytes
    said: Said
    earlier: Said = field(default_factory=dict)
    """Over another link."""

    @property
    def want(self) -> Want | None:
        """What it asks for."""
        with suppress(PeerError):
            message = decode(self.payload[:-SEAL_BYTES])
            return message if isinstance(message, Want) else None
        return None


Policy = Callable[[Heard], list[bytes]]
"""What a relay makes of a message."""


def _elsewhere(want: Want) -> bytes:
    """Other blocks of the consumer's are to be filled."""
    return encode(replace(want, blocks=tuple(block + 40 for block in want.blocks)))


def _rewrite_want(heard: Heard) -> list[bytes]:
    want, seal = heard.want, heard.payload[-SEAL_BYTES:]
    return [heard.payload if want is None else _elsewhere(want) + seal]


def _own_want(heard: Heard) -> list[bytes]:
    """One more in front of the consumer's, made by the relay."""
    want = heard.want
    return [heard.payload] if want is None else [_elsewhere(want) + bytes(SEAL_BYTES), heard.payload]


def _flip(heard: Heard) -> list[bytes]:
    rng, payload = heard.rng, heard.payload
    if rng.random() < 0.7:
        return [payload]
    place = rng.randrange(len(payload))
    return [payload[:place] + bytes([payload[place] ^ 1 << rng.randrange(8)]) + payload[place + 1 :]]


def _lose(heard: Heard) -> list[bytes]:
    return [] if heard.number >= _BEHIND_HANDSHAKE and heard.rng.random() < 0.5 else [heard.payload]


def _repeat(heard: Heard) -> list[bytes]:
    return [heard.payload] * (2 if heard.number >= _BEHIND_HANDSHAKE else 1)


def _swap(heard: Heard) -> list[bytes]:
    """Two by two."""
    place = heard.number - _BEHIND_HANDSHAKE
    if place < 0:
        return [heard.payload]
    return [heard.payload, heard.said[heard.is_consumers][-2]] if place % 2 else []


def _replay(heard: Heard) -> list[bytes]:
    """What was said over an earlier link in the same place."""
    earlier = heard.earlier.get(heard.is_consumers, [])
    is_known = _BEHIND_HANDSHAKE <= heard.number < len(earlier)
    return [earlier[heard.number] if is_known else heard.payload]


def _reflect(heard: Heard) -> list[bytes]:
    """What the other has said itself in the same place."""
    others = heard.said[not heard.is_consumers]
    is_known = _BEHIND_HANDSHAKE <= heard.number < len(others)
    return [others[heard.number] if is_known else heard.payload]


def _larger_pool(heard: Heard) -> list[bytes]:
    return [heard.payload.replace(b'"num_blocks":', b'"num_blocks":9')]


def _own_nonce(heard: Heard) -> list[bytes]:
    if heard.number:
        return [heard.payload]
    return [json.dumps(json.loads(heard.payload) | {"nonce": bytes(NONCE_BYTES).hex()}).encode()]


POLICIES: tuple[Policy, ...] = (
    _rewrite_want, _flip, _lose, _repeat, _larger_pool, _own_want, _own_nonce, _swap, _replay, _reflect
)  # fmt: skip


class Between(ABC):
    """Listens for one consumer, calls the producer behind `port`, and passes on what each says to the other."""

    def __init__(self, port: int) -> None:
        """It listens at once: whoever derives from it calls this last."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._there = port
        self._ends: list[socket.socket] = []
        """The consumer's and the producer's, once both are there."""
        threading.Thread(target=self._run, daemon=True).start()

    @abstractmethod
    def _pump(self, source: socket.socket, target: socket.socket, is_consumers: bool) -> None:
        """Pass on what comes from one of them until it ends; each way on a thread of its own."""

    def _run(self) -> None:
        with suppress(OSError):
            consumer, _ = self._listener.accept()
            producer = socket.create_connection(("127.0.0.1", self._there))
            self._ends += [consumer, producer]
            for source, target, is_consumers in ((consumer, producer, True), (producer, consumer, False)):
                threading.Thread(target=self._pump, args=(source, target, is_consumers), daemon=True).start()


class Relay(Between):
    """Changes what they say. `num_changed` messages were, and of `num_accepted` sides somebody took what was; both are
    told once it is closed."""

    def __init__(self, port: int, policy: Policy, rng: random.Random, earlier: Said) -> None:
        self.num_changed = 0
        self.num_accepted = 0
        self.said: Said = {True: [], False: []}
        self._policy = policy
        self._rng = rng
        self._earlier = earlier
        self._deceived: list[socket.socket] = []
        super().__init__(port)

    def close(self) -> None:
        """Ends the link, once it is known who has accepted what."""
        for target in list(self._deceived):
            poll = select.poll()
            poll.register(target, select.POLLRDHUP)
            self.num_accepted += not poll.poll(_PATIENCE * 1000)
        for sock in (self._listener, *self._ends):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _pump(self, source: socket.socket, target: socket.socket, is_consumers: bool) -> None:
        reader, said, num_passed, is_intact = FrameReader(), self.said[is_consumers], 0, True
        reader.bound = MAX_FRAME
        with suppress(OSError):
            while data := source.recv(65536):
                reader.feed(data)
                while (payload := reader.take()) is not None:
                    said.append(payload)
                    heard = Heard(self._rng, is_consumers, len(said) - 1, payload, self.said, self._earlier)
                    changed = self._policy(heard)
                    self.num_changed += changed != [payload]
                    if is_intact and not _are_next(changed, num_passed, said):
                        is_intact = False
                        self._deceived.append(target)
                    num_passed += len(changed)
                    target.sendall(b"".join(map(frame, changed)))
        if is_intact:
            with suppress(OSError):
                target.shutdown(socket.SHUT_WR)


def _are_next(payloads: Sequence[bytes], num_passed: int, said: Sequence[bytes]) -> bool:
    """Whether these follow so many others as they were said."""
    places = enumerate(payloads, num_passed)
    return all(place < _FIRST_SEALED or said[place : place + 1] == [payload] for place, payload in places)
