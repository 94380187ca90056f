"""The same-host backend: slots are memory that both processes have mapped (`staged` is the protocol).

Why not a write into the other process's memory (process_vm_writev): only the receiver writes to its pool, and no
permission to trace processes is needed.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping
from typing import Any

from ...base import PeerError, PeerPool
from ...wire.fields import check_text
from ...wire.messages import RingMapped, RingOffered
from ..over_channel import Endpoint
from . import ring
from .transport import StagedTransport


class SharedMemoryTransport(StagedTransport):
    """See `PeerTransport`; for engines of one machine."""

    transport = "shared_memory"

    def __init__(self, pool: PeerPool, endpoint: Endpoint, staging_bytes: int) -> None:
        """Raises ConfigError where the address cannot be used or the staging memory is too small."""
        super().__init__(SharedMemory(), pool, endpoint, staging_bytes)


class _Mapped:
    """One side of a ring that both have mapped: what is in a slot here is in it there."""

    def __init__(self, memory: ring.Ring) -> None:
        self.ring = memory

    def accepted(self, mapped: RingMapped) -> None:
        """See `Outgoing`."""

    def carry(self, slot: int, num_bytes: int) -> None:
        """See `Outgoing`."""

    def close(self, is_quiet: Callable[[], bool]) -> None:
        """See `Outgoing` and `Incoming`: the mapping goes with its last view, and each side has its own."""


class SharedMemory:
    """See `Carrier`. The sender makes the ring, and its descriptor goes over a Unix socket."""

    longest_transfer_seconds = 0.0

    def __init__(self) -> None:
        self._descriptors = ring.Descriptors()
        self.extra: Mapping[str, Any] = {"socket": self._descriptors.name}

    def start(self, watch: Callable[[socket.socket, Callable[[], None]], None]) -> None:
        """See `Carrier.start`."""
        watch(self._descriptors.socket, self._descriptors.receive)

    def offer(self, peer: Mapping[str, Any], num_slots: int, slot_bytes: int) -> tuple[_Mapped, str]:
        """See `Carrier.offer`."""
        token = secrets.token_hex(ring.TOKEN_BYTES)
        memory = ring.Ring(ring.create(num_slots, slot_bytes), num_slots, slot_bytes)
        try:
            ring.hand_over(check_text(peer, "socket"), token, memory.fd)
        except OSError as error:
            raise PeerError(f"it is not on this machine ({error}): use peer.kind nixl") from error
        return _Mapped(memory), token

    def accept(self, offered: RingOffered) -> tuple[_Mapped, RingMapped]:
        """See `Carrier.accept`. The descriptor was sent before the message that names it: it waits in the socket's
        queue by now."""
        fd = self._descriptors.take(offered.token)
        if fd is None:
            raise PeerError("shared memory was told of and never sent: both engines must run as the same user")
        return _Mapped(ring.Ring(fd, offered.slots, offered.slot_bytes)), RingMapped(0, "")

    def close(self) -> None:
        """See `Carrier.close`."""
        self._descriptors.close()
