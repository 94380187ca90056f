"""Peers that are broken or hostile cost their own link only: what they claim of slots is checked."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from kv_connector.peer.carriers.nixl_agent import encode_metadata, start_agent
from kv_connector.peer.carriers.staged import ring
from kv_connector.peer.wire.messages import (
    AskLease,
    Introduction,
    Lease,
    RingMapped,
    RingOffered,
    SlotFilled,
    SlotFreed,
    WireMessage,
    encode,
)
from tests.peer.peers import PIECES, STAGED, Arrived, Connected, Lost, Pool, Pushed, Side, info_of, push_all, until
from tests.peer.strangers import Raw

pytestmark = pytest.mark.usefixtures("pairs_still_work")


@pytest.mark.parametrize("backend", STAGED)
@pytest.mark.parametrize(
    "payload",
    [
        encode(SlotFilled(0, 0, 1, 0, 1, 0)),
        b'{"t":"slot_filled","slot":-1}',
        encode(SlotFreed(0)),
        encode(RingMapped(0, "")),
        encode(RingOffered(9, 8192, "00" * 16)),
        encode(RingOffered(8, 8193, "00" * 16)),
        encode(RingOffered(8, 1 << 53, "00" * 16)),
        encode(RingOffered(0, 8192, "00" * 16)),
        b'{"t":"ring_offered"}',
        encode(SlotFreed(0))[:-1],
        b"",
    ],
)
def test_a_peer_that_does_not_keep_to_the_protocol_is_dropped(listener: Side, backend: str, payload: bytes) -> None:
    raw = Raw(listener)
    assert raw.shake_hands(info_of(Pool(), transport=backend))
    raw.say_bytes(payload)
    assert raw.hear() is None
    raw.sock.close()


@pytest.mark.parametrize("backend", STAGED)
@pytest.mark.parametrize(
    "change",
    [{"first": 1}, {"count": 3}, {"count": 0}, {"start": 3, "stop": 4}, {"stop": 0}, {"slot": 8}, {"count": 1 << 40}],
)
def test_a_peer_that_claims_other_blocks_is_dropped(
    listener: Side, backend: str, pool: Pool, change: dict[str, int]
) -> None:
    before = pool.all_bytes()
    raw = Raw(listener)
    welcome = raw.shake_hands(info_of(Pool(), transport=backend))
    link = listener.of(Connected)[-1].link
    listener.transport.grant(link, 5, [1, 2])
    raw.say(RingOffered(8, 8192, hand_over(welcome, sealed=True) if backend == "shared_memory" else ""))
    assert isinstance(raw.hear(), RingMapped)
    raw.say(replace(SlotFilled(grant=5, first=0, count=2, start=0, stop=1, slot=0), **change))
    assert raw.hear() is None
    assert not listener.of(Arrived)
    assert pool.all_bytes() == before
    raw.sock.close()


@pytest.mark.parametrize("backend", STAGED)
@pytest.mark.parametrize("slot", [0, 7])
def test_a_peer_that_claims_more_blocks_than_fit_into_a_slot_is_dropped(
    listener: Side, backend: str, pool: Pool, slot: int
) -> None:
    """They were granted, but what lies behind the slot is another one, or memory that was never sent."""
    before = pool.all_bytes()
    raw = Raw(listener)
    welcome = raw.shake_hands(info_of(Pool(), transport=backend))
    listener.transport.grant(listener.of(Connected)[-1].link, 5, list(range(10)))
    raw.say(RingOffered(8, 8192, hand_over(welcome, sealed=True) if backend == "shared_memory" else ""))
    assert isinstance(raw.hear(), RingMapped)
    fitting = 8192 // sum(PIECES)
    raw.say(SlotFilled(grant=5, first=0, count=fitting + 1, start=0, stop=len(PIECES), slot=slot))
    assert raw.hear() is None
    assert not listener.of(Arrived)
    assert pool.all_bytes() == before
    raw.sock.close()


def hand_over(welcome: WireMessage | None, sealed: bool) -> str:
    """Give the listener memory; returns the token that names it."""
    assert isinstance(welcome, Introduction)
    fd, token = ring.create(8, 8192) if sealed else os.memfd_create("unsealed", os.MFD_CLOEXEC), "ab" * 16
    os.ftruncate(fd, 8 * 8192)
    ring.hand_over(welcome.info.extra["socket"], token, fd)
    os.close(fd)
    return token


def test_memory_that_nobody_sent_is_not_waited_for(listener: Side) -> None:
    raw = Raw(listener)
    assert raw.shake_hands(info_of(Pool()))
    raw.say(RingOffered(8, 8192, "00" * 16))
    assert raw.hear() is None
    raw.sock.close()


def test_memory_that_could_be_pulled_away_is_not_mapped(listener: Side) -> None:
    raw = Raw(listener)
    welcome = raw.shake_hands(info_of(Pool()))
    raw.say(RingOffered(8, 8192, hand_over(welcome, sealed=False)))
    assert raw.hear() is None
    until(lambda: bool(listener.of(Lost)), listener)
    assert "not sealed" in listener.of(Lost)[-1].reason
    raw.sock.close()


@pytest.mark.parametrize("backend", STAGED[1:])
@pytest.mark.parametrize(
    "answer",
    [
        (0, ""),
        (4096, "!"),
        (4096, "\u00e9"),
        (4096, "Z2FyYmFnZQ=="),
        (4096, None),  # an agent's own metadata, which knows of no memory there
    ],
)
def test_a_peer_that_cannot_be_written_to_is_dropped(
    listener: Side, backend: str, answer: tuple[int, str | None]
) -> None:
    raw = Raw(listener)
    assert raw.shake_hands(info_of(Pool(), transport=backend))
    number = push_all(listener, listener.of(Connected)[-1].link, [1, 2], [1, 2], grant=1)
    assert raw.hear() == RingOffered(8, 8192, "")
    address, metadata = answer
    agent = start_agent()
    raw.say(RingMapped(address, encode_metadata(agent.get_agent_metadata()) if metadata is None else metadata))
    heard = raw.hear()
    if isinstance(heard, AskLease):
        raw.say(Lease(heard.number, 2000))
        heard = raw.hear()
    assert heard is None
    until(lambda: bool(listener.of(Pushed)), listener)
    assert listener.of(Pushed) == [Pushed(number, False)]
    raw.sock.close()
