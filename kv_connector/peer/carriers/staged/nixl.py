"""NIXL through host memory: the sender's slot is written to the receiver's slot of the same number.

For pools that NIXL cannot register: UCX may have been built without this device, or the network may not reach it. Each
link registers slots of its own and tells the peer of nothing else, so what a peer writes goes to its slots or nowhere.
(`staged` is the protocol. NIXL's notifications are not used: a write that is done has arrived, and what is said over
the side channel behind it is in order with everything else.)
"""

from __future__ import annotations

import logging
import socket
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...base import PeerError, PeerPool
from ...clock import CLOCK, Clock
from ...wire.messages import RingMapped, RingOffered
from ..nixl_agent import LONGEST_TRANSFER_SECONDS, add_remote, encode_metadata, foreign
from ..over_channel import Endpoint
from . import ring
from .transport import StagedTransport

logger = logging.getLogger("kv_connector.peer")


class NixlStagedTransport(StagedTransport):
    """See `PeerTransport`."""

    transport = "nixl_staged"

    def __init__(self, agent: Any, pool: PeerPool, endpoint: Endpoint, staging_bytes: int) -> None:
        """Raises ConfigError where the address cannot be used or the staging memory is too small."""
        super().__init__(NixlSlots(agent, endpoint.seconds), pool, endpoint, staging_bytes)


class NixlSlots:
    """See `Carrier`. A slot that has not arrived after `seconds` costs its link."""

    longest_transfer_seconds = LONGEST_TRANSFER_SECONDS

    def __init__(self, agent: Any, seconds: float, clock: Clock = CLOCK) -> None:
        self.extra: Mapping[str, Any] = {}
        self._agent = agent
        self._seconds = seconds
        self._clock = clock
        self._rings = RegisteredRings(agent)
        self._num_ways: Counter[str] = Counter()  # by the peer's agent: the last one that goes takes it along

    def start(self, watch: Callable[[socket.socket, Callable[[], None]], None]) -> None:
        """See `Carrier.start`: there is nothing to watch."""

    def offer(self, peer: Mapping[str, Any], num_slots: int, slot_bytes: int) -> tuple[_Outgoing, str]:
        """See `Carrier.offer`."""
        return _Outgoing(
            self._agent, self._rings, self._num_ways, self._seconds, self._clock, num_slots, slot_bytes
        ), ""

    def accept(self, offered: RingOffered) -> tuple[_Slots, RingMapped]:
        """See `Carrier.accept`."""
        way = _Slots(self._agent, self._rings, offered.slots, offered.slot_bytes)
        return way, RingMapped(way.ring.address, way.metadata())

    def close(self) -> None:
        """See `Carrier.close`: rings go with the agent."""


@dataclass(frozen=True, slots=True)
class _Registered:
    ring: ring.Ring
    handle: Any


class RegisteredRings:
    """Rings that NIXL knows, each given to one link after the other. None is unmapped or deregistered while the agent
    lives: over TCP a write that comes late goes to its address whatever is there (UCX does not look), and where nothing
    is the process ends."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._resting: list[tuple[Callable[[], bool], _Registered]] = []  # with whether it may be used
        rings: list[ring.Ring] = []
        self._rings = rings
        weakref.finalize(agent, rings.clear)

    def take(self, num_slots: int, slot_bytes: int) -> _Registered:
        """A ring that nobody writes to any more, or a new one. Raises PeerError, or OSError without memory."""
        for entry in self._resting:
            is_quiet, found = entry
            if (found.ring.num_slots, found.ring.slot_bytes) == (num_slots, slot_bytes) and is_quiet():
                self._resting.remove(entry)
                return found
        memory = ring.Ring(ring.create(num_slots, slot_bytes), num_slots, slot_bytes)
        with foreign("NIXL cannot register slots for blocks"):
            handle = self._agent.register_memory([(memory.address, memory.slots.nbytes, 0, "")], "DRAM")
        self._rings.append(memory)
        return _Registered(memory, handle)

    def give_back(self, registered: _Registered, is_quiet: Callable[[], bool]) -> None:
        """Its link is lost; what was written over it may land until `is_quiet`."""
        self._resting.append((is_quiet, registered))


class _Slots:
    """A ring that NIXL knows: where a peer's slots arrive."""

    def __init__(self, agent: Any, rings: RegisteredRings, num_slots: int, slot_bytes: int) -> None:
        self._agent = agent
        self._rings = rings
        self._registered = rings.take(num_slots, slot_bytes)
        self.ring = self._registered.ring

    def metadata(self) -> str:
        """What lets a peer write to these slots, and to nothing else of this process."""
        with foreign("NIXL does not tell of slots for blocks"):
            return encode_metadata(self._agent.get_partial_agent_metadata(self._registered.handle, True, ["UCX"]))

    def close(self, is_quiet: Callable[[], bool]) -> None:
        """See `Incoming.close`."""
        self._rings.give_back(self._registered, is_quiet)


class _Outgoing(_Slots):
    """See `Outgoing`."""

    def __init__(
        self,
        agent: Any,
        rings: RegisteredRings,
        num_ways: Counter[str],
        seconds: float,
        clock: Clock,
        num_slots: int,
        slot_bytes: int,
    ) -> None:
        super().__init__(agent, rings, num_slots, slot_bytes)
        self._clock = clock
        self._num_ways = num_ways
        self._seconds = seconds
        self._peer = ""
        self._address = 0
        self._transfers: list[_Transfer] = []

    def accepted(self, mapped: RingMapped) -> None:
        """See `Outgoing.accepted`."""
        if not mapped.address:
            raise PeerError("its slots are at no address")
        self._address = mapped.address
        name = add_remote(self._agent, mapped.metadata)
        self._num_ways[name] += 1
        self._peer = name

    def carry(self, slot: int, num_bytes: int) -> _Transfer:
        """See `Outgoing.carry`."""
        offset = slot * self.ring.slot_bytes
        with foreign("NIXL cannot write to it"):
            here, there = (
                self._agent.get_xfer_descs([(address + offset, num_bytes, 0)], "DRAM")
                for address in (self.ring.address, self._address)
            )
            handle = self._agent.initialize_xfer("WRITE", here, there, self._peer)
            transfer = _Transfer(self._agent, handle, self._seconds, self._clock)
            self._agent.transfer(handle)
        self._transfers = [*(entry for entry in self._transfers if entry.is_under_way), transfer]
        return transfer

    def close(self, is_quiet: Callable[[], bool]) -> None:
        """See `Outgoing.close`."""
        for transfer in self._transfers:
            transfer.release()
        if self._peer:
            self._num_ways[self._peer] -= 1
            if not self._num_ways[self._peer]:
                del self._num_ways[self._peer]
                try:
                    self._agent.remove_remote_agent(self._peer)
                except Exception as error:  # noqa: BLE001 - it is gone either way
                    logger.debug("NIXL had forgotten %s: %s", self._peer, error)
        super().close(is_quiet)


class _Transfer:
    """A write under way; a `Marker`."""

    def __init__(self, agent: Any, handle: Any, seconds: float, clock: Clock) -> None:
        self.is_under_way = True
        self._agent = agent
        self._handle = handle
        self._seconds = seconds
        self._clock = clock
        self._due = clock.monotonic() + seconds
        self._fault = ""

    def query(self) -> bool:
        """Whether every byte is there. Raises PeerError where it has failed, now or before."""
        if self.is_under_way:
            try:
                state = self._agent.check_xfer_state(self._handle)
            except Exception as error:  # noqa: BLE001 - the peer is gone, or the transport failed
                state = type(error).__name__
            if state == "PROC":
                if self._clock.monotonic() >= self._due:
                    raise PeerError(f"what NIXL writes to it has not arrived within {self._seconds:g} s")
                return False
            self._fault = "" if state == "DONE" else state
            self.release()
        if self._fault:
            raise PeerError(f"NIXL failed: {self._fault}")
        return True

    def release(self) -> None:
        """It is over, or given up."""
        if self.is_under_way:
            self.is_under_way = False
            try:
                self._agent.release_xfer_handle(self._handle)
            except Exception as error:  # noqa: BLE001 - NIXL's own: it was not to be stopped
                logger.debug("NIXL did not release a transfer: %s", error)
