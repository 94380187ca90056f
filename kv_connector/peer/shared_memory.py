"""The same-host backend: blocks go through a ring of shared memory, one for each link and direction.

    sender:   pack blocks into a free slot -> {"t": "slot", slot, grant, positions, regions}
    receiver: check, copy them out to its own blocks -> {"t": "free", slot}

Why a ring and not a write into the other process's memory (process_vm_writev): nothing but the receiver ever writes to
the receiver's pool, so a revoked grant is revoked at once, a dead or hostile peer cannot touch a block that was not
granted, no permission to trace processes is needed, and it serves any device. The price is a second copy.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import ConfigError
from . import ring
from .base import (
    Arrived,
    Connected,
    Ids,
    Lost,
    Marker,
    Message,
    PeerError,
    PeerEvent,
    PeerPool,
    Push,
    Pushed,
    announce,
    check_int,
    check_text,
)
from .handshake import Card
from .over_channel import OverChannel, check_granted
from .slots import open_copier

_SLOTS = 8
_MOST_SLOT_BYTES = 256 << 20
_DEVICE_POLL_SECONDS = 0.0002


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """A part of a push that fits a slot."""

    number: int
    grant: int
    first: int
    source_ids: Ids
    regions: range
    is_last: bool


@dataclass(slots=True)
class _Sending:
    """This side's ring of a link; `ring` is None until the peer has it."""

    ring: ring.Ring | None = None
    is_offered: bool = False
    free: deque[int] = field(default_factory=deque)
    chunks: deque[_Chunk] = field(default_factory=deque)
    packing: list[tuple[_Chunk, int, Marker]] = field(default_factory=list)


@dataclass(slots=True)
class _Receiving:
    """The peer's ring of a link, and what it may fill."""

    ring: ring.Ring | None = None
    grants: dict[int, Ids] = field(default_factory=dict)
    unpacking: list[tuple[int, Arrived, Marker]] = field(default_factory=list)


class SharedMemoryTransport(OverChannel):
    """See `PeerTransport`. Each link takes up to `staging_bytes` for each direction that is used."""

    is_one_sided = False
    quiet_seconds = 0.0

    def __init__(
        self, pool: PeerPool, card: Card, bind: str, port: int, secret: bytes, seconds: float, staging_bytes: int
    ) -> None:
        """Raises ConfigError where the address cannot be used or the staging memory is too small."""
        self._slot_bytes = staging_bytes // _SLOTS // 4096 * 4096
        if self._slot_bytes < max(pool.pieces):
            least = _SLOTS * (max(pool.pieces) + 4096)
            raise ConfigError(
                f"peer.staging_memory={staging_bytes} is too small: give at least {least}, {_SLOTS} slots of a layer's "
                "piece of a block"
            )
        self._copier = open_copier(pool)
        self._descriptors = ring.Descriptors()
        try:
            super().__init__(pool, card, {"socket": self._descriptors.name}, bind, port, secret, seconds)
        except ConfigError:
            self._descriptors.close()
            raise
        self._sending: dict[int, _Sending] = {}
        self._receiving: dict[int, _Receiving] = {}
        self._dying: list[tuple[ring.Ring, Marker]] = []  # rings of lost links that a device still reads or writes
        self._cut_short: set[int] = set()  # cancelled pushes of which something is being packed

    def grant(self, link: int, number: int, block_ids: Sequence[int]) -> None:
        """See `PeerTransport.grant`."""
        if link in self._receiving:
            self._receiving[link].grants[number] = np.array(block_ids, dtype=np.int64)

    def revoke(self, link: int, number: int) -> None:
        """See `PeerTransport.revoke`. On a device it waits for the copies of a slot or two."""
        if link in self._receiving:
            receiving = self._receiving[link]
            receiving.grants.pop(number, None)
            for _, arrived, marker in receiving.unpacking:
                while arrived.grant == number and not marker.query():
                    time.sleep(_DEVICE_POLL_SECONDS)

    def push(self, link: int, push: Push) -> None:
        """See `PeerTransport.push`."""
        ids = push.source_ids
        assert len(ids) and 0 <= ids.min() <= ids.max() < self._pool.num_blocks, f"{ids} of {self._pool.num_blocks}"
        sending = self._sending.get(link)
        if sending is None:
            self._events.append(Pushed(push.number, False))
            return
        sending.chunks += self._cut(push)
        self._pump(link, sending)

    def cancel(self, number: int) -> None:
        """See `PeerTransport.cancel`."""
        for sending in self._sending.values():
            left = [chunk for chunk in sending.chunks if chunk.number == number]
            if not left:
                continue
            sending.chunks = deque(chunk for chunk in sending.chunks if chunk.number != number)
            if any(chunk.number == number for chunk, _, _ in sending.packing):
                self._cut_short.add(number)
            else:
                self._events.append(Pushed(number, False))

    def poll(self, timeout: float) -> list[PeerEvent]:
        """See `PeerTransport.poll`."""
        if any(s.packing for s in self._sending.values()) or any(r.unpacking for r in self._receiving.values()):
            timeout = min(timeout, _DEVICE_POLL_SECONDS)
        for event in self._channel.poll(0.0 if self._events else timeout):
            self._take(event)
        for link, sending in list(self._sending.items()):
            self._finish_packing(link, sending)
        for link, receiving in list(self._receiving.items()):
            self._finish_unpacking(link, receiving)
        self._dying = [entry for entry in self._dying if not entry[1].query()]
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """See `PeerTransport.close`."""
        if not self._is_closed:
            self._is_closed = True
            self._descriptors.close()
            self._channel.close()
            self._sending.clear()
            self._receiving.clear()

    # Sending.

    def _cut(self, push: Push) -> list[_Chunk]:
        """Parts of whole blocks, or of some regions of one block each where that is too large."""
        chunks = []
        for regions in self._cut_regions(push.regions):
            per_slot = max(1, self._slot_bytes // self._pool.bytes_of(regions))
            for start in range(0, len(push.source_ids), per_slot):
                ids = push.source_ids[start : start + per_slot]
                chunks.append(_Chunk(push.number, push.grant, push.first + start, ids, regions, False))
        last = chunks[-1]
        chunks[-1] = _Chunk(last.number, last.grant, last.first, last.source_ids, last.regions, True)
        return chunks

    def _cut_regions(self, regions: range) -> list[range]:
        parts, start, size = [], regions.start, 0
        for index in regions:
            piece = self._pool.regions[index].piece_bytes
            if size + piece > self._slot_bytes:
                parts.append(range(start, index))
                start, size = index, 0
            size += piece
        return [*parts, range(start, regions.stop)]

    def _pump(self, link: int, sending: _Sending) -> None:
        if not sending.is_offered:
            self._offer_ring(link, sending)
        while sending.ring is not None and sending.chunks and sending.free:
            chunk, slot = sending.chunks.popleft(), sending.free.popleft()
            try:
                marker = self._copier.pack(chunk.source_ids, chunk.regions, sending.ring, slot)
            except PeerError as error:
                sending.chunks.appendleft(chunk)
                self._channel.drop(link, str(error))
                return
            if marker is not None:
                sending.packing.append((chunk, slot, marker))
            else:
                self._packed(link, chunk, slot)

    def _packed(self, link: int, chunk: _Chunk, slot: int) -> None:
        count_, regions = len(chunk.source_ids), chunk.regions
        told = announce(chunk.grant, chunk.first, count_, regions)
        self._say(link, {"t": "slot", "slot": slot, **told})
        self.counters.sent_bytes += count_ * self._pool.bytes_of(regions)
        if chunk.is_last:
            self._events.append(Pushed(chunk.number, True))

    def _finish_packing(self, link: int, sending: _Sending) -> None:
        while sending.packing and sending.packing[0][2].query():
            chunk, slot, _ = sending.packing.pop(0)
            self._packed(link, chunk, slot)
            number = chunk.number
            if number in self._cut_short and not any(other.number == number for other, _, _ in sending.packing):
                self._cut_short.discard(number)
                self._events.append(Pushed(number, False))

    def _offer_ring(self, link: int, sending: _Sending) -> None:
        card = self._channel.card_of(link)
        token = secrets.token_hex(ring.TOKEN_BYTES)
        sending.is_offered = True
        try:
            fd = ring.create(_SLOTS, self._slot_bytes)
            try:
                ring.hand_over(check_text(card.extra if card else {}, "socket"), token, fd)
            except OSError as error:
                os.close(fd)
                raise PeerError(f"it is not on this machine ({error}): use peer.kind nixl") from error
            sending.ring = ring.Ring(fd, _SLOTS, self._slot_bytes)
            self._say(link, {"t": "ring", "token": token, "slots": _SLOTS, "slot_bytes": self._slot_bytes})
        except (OSError, PeerError) as error:
            self._channel.drop(link, str(error))

    # Receiving.

    def _take(self, event: PeerEvent) -> None:
        if isinstance(event, Connected):
            self._sending[event.link] = _Sending()
            self._receiving[event.link] = _Receiving()
        elif isinstance(event, Lost):
            self._forget(event.link)
        elif isinstance(event, Message) and event.body["t"] in ("slot", "free", "ring", "mapped"):
            try:
                self._hear(event.link, event.body)
            except PeerError as error:
                self._channel.drop(event.link, str(error))
            return
        self._events.append(event)

    def _forget(self, link: int) -> None:
        sending, receiving = self._sending.pop(link, None), self._receiving.pop(link, None)
        if sending is None or receiving is None:
            return
        numbers = {chunk.number for chunk in sending.chunks} | {chunk.number for chunk, _, _ in sending.packing}
        self._cut_short -= numbers
        self._events += [Pushed(number, False) for number in sorted(numbers)]
        for memory, markers in (
            (sending.ring, [marker for _, _, marker in sending.packing]),
            (receiving.ring, [marker for _, _, marker in receiving.unpacking]),
        ):
            self._dying += [(memory, marker) for marker in markers if memory is not None]

    def _hear(self, link: int, body: dict[str, Any]) -> None:
        sending, receiving = self._sending.get(link), self._receiving.get(link)
        if sending is None or receiving is None:
            return  # lost a moment ago
        if body["t"] == "ring":
            slots = check_int(body, "slots", 1, 1024)
            slot_bytes = check_int(body, "slot_bytes", 4096, _MOST_SLOT_BYTES)
            self._map_ring(link, receiving, check_text(body, "token"), slots, slot_bytes)
        elif body["t"] == "mapped":
            if sending.ring is None or sending.free:
                raise PeerError("it mapped a ring that was not offered")
            sending.free.extend(range(sending.ring.num_slots))
            self._pump(link, sending)
        elif body["t"] == "free":
            slot = check_int(body, "slot", 0, _SLOTS - 1)
            if sending.ring is None or slot in sending.free:
                raise PeerError(f"it frees slot {slot}, which is free")
            sending.free.append(slot)
            self._pump(link, sending)
        else:
            self._empty_slot(link, receiving, body)

    def _map_ring(self, link: int, receiving: _Receiving, token: str, slots: int, slot_bytes: int) -> None:
        """The descriptor was sent before the message that names it, so it waits in the socket's queue by now."""
        fd = self._descriptors.take(token)
        if fd is None or receiving.ring is not None:
            if fd is not None:
                os.close(fd)
            raise PeerError("shared memory was told of and never sent, or told of twice")
        receiving.ring = ring.Ring(fd, slots, slot_bytes)
        self._say(link, {"t": "mapped"})

    def _empty_slot(self, link: int, receiving: _Receiving, body: dict[str, Any]) -> None:
        if receiving.ring is None:
            raise PeerError("it filled a slot of a ring that it never sent")
        slot = check_int(body, "slot", 0, receiving.ring.num_slots - 1)
        arrived = Arrived.decode(link, body, len(self._pool.regions))
        size = self._pool.bytes_of(arrived.regions)
        if arrived.count * size > receiving.ring.slot_bytes:
            raise PeerError(
                f"{arrived.count} blocks of {size} bytes are more than a slot of {receiving.ring.slot_bytes}"
            )
        granted = receiving.grants.get(arrived.grant)
        if granted is None:  # revoked while this was on its way
            self._say(link, {"t": "free", "slot": slot})
            return
        check_granted(arrived, len(granted))
        block_ids = granted[arrived.first : arrived.first + arrived.count]
        marker = self._copier.unpack(block_ids, arrived.regions, receiving.ring, slot)
        if marker is not None:
            receiving.unpacking.append((slot, arrived, marker))
        else:
            self._emptied(slot, arrived)

    def _emptied(self, slot: int, arrived: Arrived) -> None:
        self._say(arrived.link, {"t": "free", "slot": slot})
        self._arrived(arrived)

    def _finish_unpacking(self, link: int, receiving: _Receiving) -> None:
        while receiving.unpacking and receiving.unpacking[0][2].query():
            slot, arrived, _ = receiving.unpacking.pop(0)
            self._emptied(slot, arrived)

    def _say(self, link: int, body: Mapping[str, Any]) -> None:
        try:
            self._channel.send(link, body)
        except PeerError as error:
            self._channel.drop(link, str(error))
