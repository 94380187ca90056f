"""What brings slots of host memory from one side of a link to the other (`staged.StagedTransport` fills them)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ...base import Marker
from .ring import Ring


class Outgoing(Protocol):
    """This side's slots of a link, on the way to the peer. All calls raise PeerError where the link cannot go on."""

    ring: Ring

    def accepted(self, body: Mapping[str, Any]) -> None:
        """The peer is ready to be carried to; `body` is what its `Carrier.accept` has answered, unchecked."""

    def carry(self, slot: int, num_bytes: int) -> Marker | None:
        """Bring a slot's first bytes to the peer; the marker says when they are there, None at once."""

    def close(self) -> None:
        """Nothing is carried any more. Raises nothing."""


class Incoming(Protocol):
    """Where a peer's slots arrive."""

    ring: Ring

    def close(self) -> None:
        """Nothing is read from it any more. Raises nothing."""


class Carrier(Protocol):
    """Brings slots to peers. `extra` is what the info tells them, and `peer` in each call is what theirs has told."""

    extra: Mapping[str, Any]

    def offer(self, peer: Mapping[str, Any], num_slots: int, slot_bytes: int) -> tuple[Outgoing, dict[str, Any]]:
        """New slots for a link, and what the peer has to be told. Raises PeerError, or OSError without memory."""

    def accept(self, body: Mapping[str, Any], num_slots: int, slot_bytes: int) -> tuple[Incoming, dict[str, Any]]:
        """The other end of what a peer offers with `body`, and the answer. Raises PeerError or OSError."""

    def close(self) -> None:
        """Free what is left; every way is closed."""
