"""What peers that stop reading, and connections that say nothing, may take of a side is bounded."""

from __future__ import annotations

import os
import socket

import pytest

from kv_connector.peer.base import PeerError
from kv_connector.peer.wire.channel import MOST_CALLS
from kv_connector.peer.wire.messages import Want
from tests.peer.peers import Backend, Connected, Lost, Pool, Side, info_of, link_up
from tests.peer.strangers import Raw, Time

pytestmark = pytest.mark.usefixtures("pairs_still_work")

LONG = Want("t", "", 1, 0, 100_000, bytes(32), tuple(range(10**8, 10**8 + 100_000)))
"""Close to the bound."""


def test_a_peer_that_stops_reading_is_dropped() -> None:
    side = Side(Backend("shared_memory").open(Pool()))
    time, raw = Time(side), Raw(side)
    assert raw.shake_hands(info_of(Pool()))
    link = side.of(Connected)[0].link
    for _ in range(12):
        side.transport.send(link, LONG)
    time.until(lambda: bool(side.of(Lost)), side)
    assert "not read" in side.of(Lost)[0].reason
    raw.sock.close()
    side.transport.close()


def test_what_waits_for_a_peer_is_bounded(listener: Side) -> None:
    raw = Raw(listener)
    assert raw.shake_hands(info_of(Pool()))
    link = listener.of(Connected)[-1].link

    def say_much() -> None:
        for _ in range(100):
            listener.transport.send(link, LONG)

    with pytest.raises(PeerError, match="does not read"):
        say_much()
    listener.transport.drop(link, "enough")
    raw.sock.close()


def test_those_who_never_answer_take_a_bounded_number_of_descriptors() -> None:
    """Requests name hosts that accept connections and say nothing: the oldest make room, and others are reached."""
    silent = socket.create_server(("127.0.0.1", 0), backlog=MOST_CALLS + 50)
    side, good = (Side(Backend("shared_memory").open(Pool())) for _ in range(2))
    time = Time(side)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(MOST_CALLS + 20):
        side.transport.connect("127.0.0.1", silent.getsockname()[1])
    assert len(os.listdir("/proc/self/fd")) - before <= MOST_CALLS
    link_up(side, good)
    assert [lost.link for lost in side.of(Lost)] == list(range(1, 22)), "they are given up at once"
    time.until(lambda: len(side.of(Lost)) == MOST_CALLS + 20, side)
    silent.close()
    good.transport.close()
    side.transport.close()


def test_strangers_who_say_nothing_make_room_for_others() -> None:
    """Many hold a connection open and say nothing; a good peer still gets in, and they go in the end."""
    side = Side(Backend("shared_memory").open(Pool()))
    time, idle = Time(side), []
    for _ in range(100):
        idle.append(Raw(side))
        side.poll()
    good = Side(Backend("shared_memory").open(Pool()))
    link_up(good, side)
    time.until(lambda: len(side.of(Lost)) == 100, side)
    assert not good.of(Lost)
    for raw in idle:
        raw.sock.close()
    good.transport.close()
    side.transport.close()
