"""Who waits for whom on the side channel: names that hang and strangers that crowd hold up nobody else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kv_connector.peer.base import Connected, Lost, Message, PeerCounters, PeerEvent
from kv_connector.peer.wire.channel import SideChannel
from kv_connector.peer.wire.frames import FrameReader, frame
from kv_connector.peer.wire.handshake import Handshake
from kv_connector.peer.wire.messages import Stop
from kv_connector.peer.wire.resolver import _MOST_LOOKUPS
from tests.peer.peers import SECRET, Pool, info_of, until


class Channel:
    """A side channel and what it has told; time passes as the test says. Names are found once `answer` is set."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[PeerEvent] = []
        self.answer = threading.Event()
        self.channel = SideChannel(
            "127.0.0.1", 0, SECRET, info_of(Pool()), 10.0, PeerCounters(), lambda: self.now, self.look_up
        )

    def look_up(self, host: str, port: int, **options: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread(), "the peer thread looks a name up"
        self.answer.wait()
        if host == "unknown":
            raise socket.gaierror(socket.EAI_NONAME, "nobody knows it")
        return socket.getaddrinfo("127.0.0.1" if host == "known" else host, port, **options)

    def poll(self, timeout: float = 0.0) -> None:
        self.events += self.channel.poll(timeout)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def open_channel() -> Iterator[Callable[[], Channel]]:
    with ExitStack() as stack:

        def make() -> Channel:
            channel = Channel()
            stack.callback(channel.channel.close)
            stack.callback(channel.answer.set)
            return channel

        yield make


def test_a_name_that_is_not_found_holds_up_nobody(open_channel: Callable[[], Channel]) -> None:
    """Requests name hosts, and a look-up may take as long as a resolver likes."""
    one, other = open_channel(), open_channel()
    hanging = one.channel.connect("hangs.example", 1)
    link = one.channel.connect("127.0.0.1", other.channel.port)
    until(lambda: bool(one.of(Connected) and other.of(Connected)), one, other)  # type: ignore[arg-type]
    one.channel.send(link, Stop(1))
    until(lambda: bool(other.of(Message)), one, other)  # type: ignore[arg-type]
    assert not one.of(Lost)
    one.now += 10.0
    one.poll()
    assert [(event.link, "name was not found" in event.reason) for event in one.of(Lost)] == [(hanging, True)]
    one.answer.set()
    one.channel.send(link, Stop(2))
    until(lambda: len(other.of(Message)) == 2, one, other)  # type: ignore[arg-type]
    assert len(one.of(Lost)) == 1, "what comes too late is told once"


def test_a_name_that_is_found_is_called(open_channel: Callable[[], Channel]) -> None:
    one, other = open_channel(), open_channel()
    one.answer.set()
    link = one.channel.connect("known", other.channel.port)
    until(lambda: bool(one.of(Connected) and other.of(Connected)), one, other)  # type: ignore[arg-type]
    assert one.of(Connected)[0].link == link


def test_a_link_that_is_dropped_before_its_name_is_found_is_lost_once(open_channel: Callable[[], Channel]) -> None:
    one, other = open_channel(), open_channel()
    link = one.channel.connect("known", other.channel.port)
    one.channel.drop(link, "enough")
    one.answer.set()
    later = one.channel.connect("known", other.channel.port)
    until(lambda: bool(one.of(Connected) and other.of(Connected)), one, other)  # type: ignore[arg-type]
    assert one.of(Lost) == [Lost(link, "enough")]
    assert [event.link for event in one.of(Connected)] == [later]


@pytest.mark.parametrize("host", ["", "x" * 70, "a..b", "\ud800", "\u0000", "256.1.1.1", "::g", "nowhere.invalid"])
def test_whatever_a_request_names_is_a_link_that_is_lost(open_channel: Callable[[], Channel], host: str) -> None:
    one = open_channel()
    one.answer.set()
    one.channel.connect(host, 1)
    until(lambda: bool(one.of(Lost)), one)  # type: ignore[arg-type]
    assert not one.of(Connected)


def test_names_that_hang_take_a_bounded_number_of_threads(open_channel: Callable[[], Channel]) -> None:
    one, before = open_channel(), threading.active_count()
    for number in range(_MOST_LOOKUPS + 20):
        one.channel.connect(f"host{number}.example", 1)
    assert threading.active_count() - before <= _MOST_LOOKUPS
    one.poll()
    assert len(one.of(Lost)) == 20


def test_any_number_of_names_is_looked_up_one_behind_the_other(open_channel: Callable[[], Channel]) -> None:
    """Found or not, a name that is looked up makes room for the next."""
    one, other = open_channel(), open_channel()
    one.answer.set()
    for number in range(2 * _MOST_LOOKUPS + 2):
        one.channel.connect("known" if number % 2 else "unknown", other.channel.port)
        until(lambda count=number + 1: len(one.of(Connected) + one.of(Lost)) == count, one, other)  # type: ignore[misc,arg-type]
    assert len(one.of(Connected)) == len(one.of(Lost)) == _MOST_LOOKUPS + 1


def test_strangers_throw_out_no_handshake_that_this_side_has_begun(open_channel: Callable[[], Channel]) -> None:
    """The one that we called is slow to answer, and many others come and say nothing."""
    one = open_channel()
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as strangers:
        link = one.channel.connect(*listener.getsockname())
        sock = strangers.enter_context(listener.accept()[0])
        for _ in range(100):
            strangers.enter_context(socket.create_connection(("127.0.0.1", one.channel.port)))
            one.poll(0.1)
        assert len(one.of(Lost)) >= 30, "the oldest of them make room"
        assert link not in [event.link for event in one.of(Lost)]
        handshake, reader = Handshake(SECRET, info_of(Pool()), is_caller=False), FrameReader()
        while handshake.peer is None:
            one.poll()
            reader.feed(sock.recv(65536))
            while (payload := reader.take()) is not None:
                for answer in handshake.take(payload):
                    sock.sendall(frame(answer))
            one.poll(0.1)
        until(lambda: bool(one.of(Connected)), one)  # type: ignore[arg-type]
        assert one.of(Connected)[0].link == link
        one.now += 10.0
        one.poll()
        assert len(one.of(Lost)) == 100, "in time every stranger goes"


def test_an_error_of_this_side_costs_the_link_that_met_it(
    open_channel: Callable[[], Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is that a peer says one day, the others are served on."""
    one, other = open_channel(), open_channel()
    links = [other.channel.connect("127.0.0.1", one.channel.port) for _ in range(2)]
    until(lambda: len(one.of(Connected)) == 2 == len(other.of(Connected)), one, other)  # type: ignore[arg-type]

    class Unforeseen(Exception):
        """Nothing that anybody catches."""

    def break_down(payload: bytes) -> None:
        raise Unforeseen

    met = one.channel._links[one.of(Connected)[0].link]
    monkeypatch.setattr(met.handshake.session, "open", break_down)
    for link in links:
        other.channel.send(link, Stop(link))
    until(lambda: bool(one.of(Message) and other.of(Lost)), one, other)  # type: ignore[arg-type]
    assert len(one.of(Message)) == len(one.of(Lost)) == 1
    assert one.channel._counters.link_faults == 1
