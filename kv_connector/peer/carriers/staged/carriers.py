"""What brings slots of host memory from one side of a link to the other (`staged.StagedTransport` fills them)."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ...base import Marker
from ...wire.messages import RingMapped, RingOffered
from .ring import Ring


class Outgoing(Protocol):
    """This side's slots of a link, on the way to the peer. All calls raise PeerError where the link cannot go on."""

    ring: Ring

    def accepted(self, mapped: RingMapped) -> None:
        """The peer is ready to be carried to, as its `Carrier.accept` has answered."""

    def carry(self, slot: int, num_bytes: int) -> Marker | None:
        """Bring a slot's first bytes to the peer; the marker says when they are there, None at once."""

    def close(self, is_quiet: Callable[[], bool]) -> None:
        """Nothing is carried any more; what was may be read until `is_quiet`. Raises nothing."""


class Incoming(Protocol):
    """Where a peer's slots arrive."""

    ring: Ring

    def close(self, is_quiet: Callable[[], bool]) -> None:
        """Nothing is read from it any more; the peer may write to it until `is_quiet`. Raises nothing."""


class Carrier(Protocol):
    """Brings slots to peers. `extra` is what the info tells them, and `peer` in each call is what theirs has told."""

    extra: Mapping[str, Any]
    longest_transfer_seconds: float
    """What is carried is there within so many seconds or never, and only who has a lease may carry; 0 where both sides
    have mapped the same memory."""

    def start(self, watch: Callable[[socket.socket, Callable[[], None]], None]) -> None:
        """`watch` lets a function be called whenever there is something to read at a socket of the carrier's."""

    def offer(self, peer: Mapping[str, Any], num_slots: int, slot_bytes: int) -> tuple[Outgoing, str]:
        """New slots for a link, and the token that tells the peer which; empty where none is needed. Raises PeerError,
        or OSError without memory."""

    def accept(self, offered: RingOffered) -> tuple[Incoming, RingMapped]:
        """The other end of what a peer offers, and the answer; its sizes are within bounds. Raises PeerError or
        OSError."""

    def close(self) -> None:
        """Free what is left; every way is closed."""
