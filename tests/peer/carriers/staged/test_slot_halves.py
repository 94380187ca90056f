"""What a peer says out of turn of slots costs it the link, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kv_connector.peer.base import PeerCounters, PeerError, Push
from kv_connector.peer.carriers.staged.slot_receiver import SlotReceiver
from kv_connector.peer.carriers.staged.slot_sender import NUM_SLOTS, SlotSender
from kv_connector.peer.wire.messages import RingMapped, RingOffered, SlotFilled, SlotFreed, WireMessage
from tests.peer.peers import ids

MAPPED = RingMapped(0, "")


def make_receiver() -> tuple[SlotReceiver, list[Any]]:
    """And the rings that it has mapped: of one slot, of blocks with one region."""
    mapped: list[Any] = []

    def accept(offered: RingOffered) -> tuple[Any, RingMapped]:
        mapped.append(SimpleNamespace(ring=SimpleNamespace(num_slots=offered.slots, slot_bytes=offered.slot_bytes)))
        return mapped[-1], MAPPED

    form = SimpleNamespace(bytes_of=lambda regions: 1, unpack=lambda *given: None)
    forms: Any = {SlotFilled: form}
    return SlotReceiver(1, forms, 1, 8, accept, lambda message: None, lambda arrived: None), mapped


def test_a_second_ring_is_not_mapped() -> None:
    """What the first one holds would be lost to us, and never freed."""
    receiver, mapped = make_receiver()
    receiver.offered(RingOffered(1, 8, ""))
    with pytest.raises(PeerError, match="a second ring"):
        receiver.offered(RingOffered(1, 8, ""))
    assert mapped == [receiver.way]


def test_a_slot_of_no_ring_is_not_emptied() -> None:
    receiver, _ = make_receiver()
    receiver.grant(5, [0])
    with pytest.raises(PeerError, match="a ring that it never sent"):
        receiver.filled(SlotFilled(5, 0, 1, 0, 1, 0))


class Pool:
    """A form that fits all, at once."""

    told_as = SlotFilled

    def bytes_of(self, regions: range) -> int:
        return 1

    def pack(self, *given: Any) -> Any:
        return SimpleNamespace(marker=None, fits=lambda: True)


def make_sender() -> tuple[SlotSender, list[WireMessage]]:
    """With a push of one block that is to be sent, and what it has said."""
    said: list[WireMessage] = []
    raw: Any = Pool()
    nothing: Callable[..., None] = lambda *given: None  # noqa: E731
    way = SimpleNamespace(ring=None, accepted=nothing, carry=nothing)
    offer: Any = lambda *given: (way, "")  # noqa: E731
    sender = SlotSender(raw, lambda: raw, PeerCounters(), 8, offer, lambda: True, said.append, nothing)
    sender.add(Push(1, 9, 0, ids([5]), ids([0]), range(1)))
    sender.advance()
    return sender, said


def test_a_ring_is_mapped_once() -> None:
    """Else its slots would be free twice, and be filled while they are read."""
    sender, said = make_sender()
    sender.accepted(MAPPED)
    with pytest.raises(PeerError, match="mapped a ring that was not offered"):
        sender.accepted(MAPPED)
    for number in range(2, 2 + NUM_SLOTS):
        sender.add(Push(number, 9, 0, ids([5]), ids([0]), range(1)))
    sender.advance()
    slots = [message.slot for message in said if isinstance(message, SlotFilled)]
    assert sorted(slots) == list(range(NUM_SLOTS))


def test_a_slot_is_freed_once_and_only_by_who_was_told_of_it() -> None:
    sender, said = make_sender()
    sender.accepted(MAPPED)
    with pytest.raises(PeerError, match="frees slot 0, which it was not told of"):
        sender.freed(SlotFreed(0))
    sender.advance()
    assert said[-1] == SlotFilled(9, 0, 1, 0, 1, 0)
    sender.freed(SlotFreed(0))
    with pytest.raises(PeerError, match="frees slot 0, which it was not told of"):
        sender.freed(SlotFreed(0))
