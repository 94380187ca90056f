"""Blocks that go through slots of host memory, a ring of them for each link and direction.

    sender:   pack blocks into a free slot, let it be carried -> SlotFilled
    receiver: check, copy them out to its own blocks -> SlotFreed

How a slot's bytes reach the other side is a `Carrier`'s affair: shared memory is the same on both, NIXL writes the
sender's slot to the receiver's. Either way nothing but the receiver ever writes to the receiver's pool, so a revoked
grant is revoked at once, a dead or hostile peer cannot touch a block that was not granted, and it serves any device.
The price is a second copy. What blocks look like in a slot is a `SlotForm`'s: both sides say in their info which coded
form they take, and where that is the same one, slots are coded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ....errors import ConfigError, KVConnectorError
from ...base import Marker, PeerError, PeerPool, Push, Pushed
from ...wire.fields import check_int
from ...wire.messages import RingMapped, RingOffered, SlotFilled, SlotFreed, WireMessage
from ...wire.peer_info import PeerInfo
from ..over_channel import Endpoint, OverChannel
from ..pool import shared_part
from .carriers import Carrier, Incoming, Outgoing
from .forms import ROW_ALIGN, CodedSlots, RawSlots, SlotForm
from .slot_receiver import SlotReceiver
from .slot_sender import NUM_SLOTS, SlotSender
from .slots import open_copier

_POLL_SECONDS = 0.0002
_CLOSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _Link:
    sender: SlotSender
    receiver: SlotReceiver


@dataclass(slots=True)
class _Ending:
    """The way of a lost link, which is closed once these are over, or when it is due. It may be used until
    `is_quiet`."""

    way: Outgoing | Incoming
    markers: list[Marker]
    due: float
    is_quiet: Callable[[], bool]


class StagedTransport(OverChannel):
    """See `PeerTransport`. Each link takes up to `staging_bytes` for each direction that is used, on either side."""

    is_one_sided = False
    poll_seconds = _POLL_SECONDS

    def __init__(self, carrier: Carrier, pool: PeerPool, endpoint: Endpoint, staging_bytes: int) -> None:
        """Takes the carrier over. Raises ConfigError where the address cannot be used or the staging memory is too
        small, and TransferError where slots cannot be coded for want of device memory."""
        self._carrier = carrier
        self.longest_transfer_seconds = carrier.longest_transfer_seconds
        self._slot_bytes = staging_bytes // NUM_SLOTS // 4096 * 4096
        try:
            if self._slot_bytes < max(pool.pieces):
                least = NUM_SLOTS * (max(pool.pieces) + 4096)
                raise ConfigError(
                    f"peer.staging_memory={staging_bytes} is too small: give at least {least}, {NUM_SLOTS} slots of a "
                    "layer's piece of a block"
                )
            self._copier = open_copier(pool)
            self._coded = () if pool.coder is None else (CodedSlots(pool.coder(self._slot_bytes), self._copier),)
            extra = {**carrier.extra, "slot_bytes": self._slot_bytes, "coded": "".join(c.form for c in self._coded)}
            super().__init__(pool, extra, endpoint)
        except KVConnectorError:
            carrier.close()
            raise
        self._links: dict[int, _Link] = {}
        self._ending: list[_Ending] = []
        carrier.start(self._channel.watch)

    def grant(self, link: int, number: int, block_ids: Sequence[int]) -> None:
        """See `PeerTransport.grant`."""
        if link in self._links:
            self._links[link].receiver.grant(number, block_ids)

    def revoke(self, link: int, number: int) -> None:
        """See `PeerTransport.revoke`."""
        if link in self._links:
            self._links[link].receiver.revoke(number)

    def push(self, link: int, push: Push) -> None:
        """See `PeerTransport.push`."""
        ids = push.source_ids
        assert len(ids) and 0 <= ids.min() <= ids.max() < self._pool.num_blocks, f"{ids} of {self._pool.num_blocks}"
        if link not in self._links:
            self._events.append(Pushed(push.number, False))
            return
        self._links[link].sender.add(push)
        self._guarded(link, self._links[link].sender.advance)

    def cancel(self, number: int) -> None:
        """See `PeerTransport.cancel`."""
        for entry in self._links.values():
            entry.sender.cancel(number)

    def quiet_in(self, link: int) -> float:
        """See `PeerTransport.quiet_in`: no peer writes to the pool."""
        return 0.0

    def close(self) -> None:
        """See `PeerTransport.close`. Waits for a while for what is under way: it uses memory that goes."""
        if self._is_closed:
            return
        self._is_closed = True
        self._channel.close()
        for link in list(self._links):
            self._forget(link)
        self._close_ended()
        while self._ending:
            self._clock.sleep(_POLL_SECONDS)
            self._close_ended()
        self._carrier.close()

    def drop(self, link: int, reason: str) -> None:
        """See `PeerTransport.drop`."""
        super().drop(link, reason)
        self._forget(link)  # nothing that follows may look as if it had been told

    def _is_busy(self) -> bool:
        links = self._links.values()
        return bool(self._ending) or any(entry.sender.is_busy or entry.receiver.is_busy for entry in links)

    def _advance(self) -> None:
        for link, entry in list(self._links.items()):
            self._guarded(link, entry.sender.advance)
            self._guarded(link, entry.receiver.advance)
        self._close_ended()

    def _lost(self, link: int) -> None:
        self._forget(link)

    def _hear(self, link: int, message: WireMessage) -> bool:
        entry = self._links[link]
        if isinstance(message, RingOffered):
            entry.receiver.offered(message)
        elif isinstance(message, SlotFilled):
            entry.receiver.filled(message)
        elif isinstance(message, RingMapped):
            entry.sender.accepted(message)
            entry.sender.advance()
        elif isinstance(message, SlotFreed):
            entry.sender.freed(message)
            entry.sender.advance()
        else:
            return False
        return True

    def _meet(self, link: int, info: PeerInfo) -> None:
        pool = shared_part(self._pool, self._info.identity, info.identity)
        # Neither side is made to hold more than its own settings allow.
        slot_bytes = min(check_int(info.extra, "slot_bytes", max(pool.pieces)), self._slot_bytes)
        say, peer = partial(self._channel.send, link), info.extra

        def offer(num_slots: int, slot_bytes: int) -> tuple[Outgoing, str]:
            way, token = self._carrier.offer(peer, num_slots, slot_bytes)
            self._copier.lock(way.ring)
            return way, token

        def accept(offered: RingOffered) -> tuple[Incoming, RingMapped]:
            way, answer = self._carrier.accept(offered)
            self._copier.lock(way.ring)
            return way, answer

        raw = RawSlots(pool, self._copier)
        agreed = self._agreed(pool, info, slot_bytes)
        taken: list[SlotForm] = [raw, *agreed]
        forms = {form.told_as: form for form in taken}
        arrived = partial(self._arrived, pool)
        # `poll` hands the list of events out and begins another.
        sender = SlotSender(
            raw,
            lambda: next((form for form in agreed if form.is_worth_it), raw),
            self.counters,
            slot_bytes,
            offer,
            partial(self._may_carry, link),
            say,
            lambda event: self._events.append(event),
        )
        receiver = SlotReceiver(link, forms, len(pool.regions), slot_bytes, accept, say, arrived)
        self._links[link] = _Link(sender, receiver)

    def _agreed(self, shared: PeerPool, info: PeerInfo, slot_bytes: int) -> list[CodedSlots]:
        """The coded form that both sides take, where whole pieces go over the link and slots begin where rows may."""
        is_whole = shared.regions == self._pool.regions and self._info.identity.pieces == info.identity.pieces
        if not is_whole or slot_bytes % ROW_ALIGN:
            return []
        return [coded for coded in self._coded if coded.form == info.extra.get("coded")]

    def _forget(self, link: int) -> None:
        entry = self._links.pop(link, None)
        if entry is None:
            return
        entry.sender.forget()
        entry.receiver.forget()
        now = self._clock.monotonic()
        due = now + _CLOSE_SECONDS
        if entry.sender.way is not None:
            own = now + self.longest_transfer_seconds  # nobody is harmed by what leaves later: the peer has a fence
            is_over = partial(self._is_past, own)
            self._ending.append(_Ending(entry.sender.way, entry.sender.markers, due, is_over))
        if entry.receiver.way is not None:
            self._ending.append(_Ending(entry.receiver.way, [], due, partial(self._is_quiet, link)))

    def _is_past(self, time: float) -> bool:
        return self._clock.monotonic() >= time

    def _is_quiet(self, link: int) -> bool:
        return not self._leases.quiet_in(link)

    def _may_carry(self, link: int) -> bool:
        return not self.longest_transfer_seconds or self._leases.may_write(link)

    def _close_ended(self) -> None:
        ending, self._ending = self._ending, []
        for entry in ending:
            entry.markers = [marker for marker in entry.markers if not _has_ended(marker)]
            if entry.markers and self._clock.monotonic() < entry.due:
                self._ending.append(entry)
            else:
                self._copier.unlock(entry.way.ring)
                entry.way.close(entry.is_quiet)


def _has_ended(marker: Marker) -> bool:
    """Well or badly."""
    try:
        return marker.query()
    except PeerError:
        return True
