"""Unauthenticated connections to the side channel, broken peers and hostile ones cost their own link only."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_connector.errors import ConfigError
from kv_connector.peer.base import VERSION, PeerError
from kv_connector.peer.carriers.nixl_agent import encode_metadata, start_agent
from kv_connector.peer.carriers.over_channel import Endpoint
from kv_connector.peer.carriers.staged import ring
from kv_connector.peer.carriers.staged.shared_memory import SharedMemoryTransport
from kv_connector.peer.wire.channel import MOST_CALLS
from kv_connector.peer.wire.frames import MAX_FRAME, MAX_HELLO, FrameReader, frame
from kv_connector.peer.wire.handshake import Handshake
from kv_connector.peer.wire.messages import (
    AskLease,
    Challenge,
    Denied,
    Hello,
    Introduction,
    Lease,
    RingMapped,
    RingOffered,
    SlotFilled,
    SlotFreed,
    Stop,
    Want,
    WireMessage,
    decode,
    encode,
)
from kv_connector.peer.wire.peer_info import PeerInfo
from kv_connector.peer.wire.session import Session
from tests.peer.peers import (
    PIECES,
    SECONDS,
    SECRET,
    STAGED,
    STAGING,
    Arrived,
    Backend,
    Connected,
    Lost,
    Message,
    Pool,
    Pushed,
    Side,
    info_of,
    link_up,
    push_all,
    until,
)

LONG = Want("t", "", 1, 0, 100_000, bytes(32), tuple(range(10**8, 10**8 + 100_000)))
"""Close to the bound."""


class Time:
    """Of a side's channel: it passes when a test says so, however long this process stands still."""

    def __init__(self, side: Side) -> None:
        self._now = 0.0
        side.transport._channel._clock = lambda: self._now  # type: ignore[attr-defined]

    def until(self, condition: Callable[[], bool], *sides: Side) -> None:
        """See `until`; ten seconds pass before each look."""

        def later() -> bool:
            self._now += 10.0
            return condition()

        until(later, *sides)


class Raw:
    """A socket that says whatever the test wants to a transport, which is polled meanwhile."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.sock = socket.create_connection(("127.0.0.1", side.transport.port), timeout=SECONDS)
        self.sock.settimeout(0.01)
        self.reader = FrameReader()
        self.reader.bound = MAX_FRAME
        self.session: Session | None = None

    def say(self, message: WireMessage) -> None:
        """As a peer does: sealed, once there is a session."""
        self.say_bytes(encode(message))

    def say_bytes(self, payload: bytes) -> None:
        """Sealed, whatever it is."""
        self.sock.sendall(frame(payload if self.session is None else self.session.seal(payload)))

    def hear(self) -> WireMessage | None:
        """The next message; None where the connection is closed."""
        payload = self.hear_bytes()
        if payload is None:
            return None
        return decode(payload if self.session is None else self.session.open(payload))

    def hear_bytes(self) -> bytes | None:
        """The next message as it comes; None where the connection is closed."""
        end = time.monotonic() + SECONDS
        while (payload := self.reader.take()) is None:
            assert time.monotonic() < end
            self.side.poll()
            try:
                data = self.sock.recv(65536)
            except TimeoutError:
                continue
            except ConnectionResetError:
                return None
            if not data:
                return None
            self.reader.feed(data)
        return payload

    def shake_hands(self, info: PeerInfo, secret: bytes = SECRET) -> WireMessage | None:
        """As a caller does; the last answer."""
        handshake = Handshake(secret, info, is_caller=True)
        for payload in handshake.begin():
            self.sock.sendall(frame(payload))
        challenge = self.hear_bytes()
        assert challenge is not None
        for payload in handshake.take(challenge):
            self.sock.sendall(frame(payload))
        self.session = handshake.session
        return self.hear()


@pytest.fixture
def backend() -> str:
    """Tests of what a backend adds name others."""
    return "shared_memory"


@pytest.fixture
def pool() -> Pool:
    return Pool(40, seed=5)


@pytest.fixture
def listener(backend: str, pool: Pool) -> Iterator[Side]:
    side = Side(Backend(backend).open(pool))
    yield side
    side.transport.close()


@pytest.fixture(autouse=True)
def pairs_still_work(listener: Side, backend: str) -> Iterator[None]:
    """Whatever a test did to the listener: a good peer is served as ever."""
    good = Side(Backend(backend).open(Pool(seed=6)))
    link, back = link_up(good, listener)
    yield
    listener.transport.grant(back, 77, [0])
    push_all(good, link, [3], [0], grant=77)
    until(lambda: bool([event for event in listener.of(Arrived) if event.grant == 77]), good, listener)
    assert not good.of(Lost)
    assert listener.transport.counters.link_faults == 0, "it has met an error that nobody thought of"
    good.transport.close()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", "over the bound"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600), "over the bound"),
        (struct.pack(">I", MAX_HELLO + 1), "over the bound"),
        (frame(b"\xff\xfe\xfd\xfc"), "not JSON"),
        (frame(b"[]"), "not an object"),
        (frame(b'{"t": 1}'), "not an object"),
        (frame(b'{"t":"hello\\ud800"}'), "not an object"),
        (frame(encode(Stop(1))), "a hello was expected"),
        (frame(encode(Denied("reasons\nof a stranger"))), "a hello was expected"),
        (frame(encode(Hello(VERSION + 1, bytes(32)))), "version is"),
        (frame(b'{"t":"hello","version":%d,"nonce":"00"}' % VERSION), "nonce"),
        (frame(b'{"t":"hello","version":%d,"nonce":"%s"}' % (VERSION, b"zz" * 32)), "nonce"),
        (frame(b'{"t":"hello","version":%d}' % VERSION), "nonce"),
        (frame(b'{"t":"hello","version":%d,"nonce":"%s","x":0}' % (VERSION, b"00" * 32)), "fields"),
        (frame(b'{"t":"hello","version":"WORDS OF A STRANGER","nonce":"00"}'), "version is not an integer"),
        (frame(b'{"t":"hello","version":{"WORDS OF":["A STRANGER"]},"nonce":"00"}'), "version is not an integer"),
        (frame(b'{"t":"hello","version":%d,"nonce":"WORDS OF A STRANGER"}' % VERSION), "nonce"),
        (frame(b'{"t":"hello","version":%d,"nonce":"%s","WORDS OF":0}' % (VERSION, b"00" * 32)), "fields"),
        (frame(b'{"t":"WORDS OF A STRANGER"}'), "not an object"),
        (frame(b"[" * 200_000), "not JSON"),
        (frame(b'{"t":"proof","proof":"\\ud800"}'), "not an object"),
    ],
)
def test_garbage_is_refused_and_told_nothing(
    listener: Side, data: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="kv_connector.peer"):
        for _ in range(3):
            raw = Raw(listener)
            raw.sock.sendall(data)
            assert raw.hear() is None
            raw.sock.close()
    assert all(reason in event.reason for event in listener.of(Lost)) and len(listener.of(Lost)) == 3
    assert len(caplog.records) == 1, "one line for an episode"
    assert "WORDS" not in caplog.text + listener.of(Lost)[0].reason


def test_a_wrong_secret_learns_nothing(listener: Side) -> None:
    raw = Raw(listener)
    raw.say(Hello(VERSION, bytes(32)))
    challenge = raw.hear()
    assert isinstance(challenge, Challenge)
    raw.session = Session(b"something else altogether", bytes(32), challenge.nonce, is_caller=True)
    raw.say(Introduction(info_of(Pool())))
    assert raw.hear() is None
    until(lambda: bool(listener.of(Lost)), listener)
    assert "secret" in listener.of(Lost)[0].reason
    raw.sock.close()


def test_a_caller_does_not_answer_a_listener_without_the_secret() -> None:
    caller = Handshake(SECRET, info_of(Pool()), is_caller=True)
    listener = Handshake(b"something else altogether", info_of(Pool()), is_caller=False)
    (challenge,) = listener.take(caller.begin()[0])
    with pytest.raises(PeerError, match="secret"):
        caller.take(challenge)


def test_either_side_refuses_what_is_not_its_turn_to_hear() -> None:
    caller, other = (Handshake(SECRET, info_of(Pool()), is_caller=True) for _ in range(2))
    (hello,) = other.begin()
    with pytest.raises(PeerError, match="where a challenge was expected"):
        caller.take(hello)
    listener = Handshake(SECRET, info_of(Pool()), is_caller=False)
    (challenge,) = listener.take(hello)
    with pytest.raises(PeerError, match="where a hello was expected"):
        Handshake(SECRET, info_of(Pool()), is_caller=False).take(challenge)
    said = decode(challenge)
    assert isinstance(said, Challenge)
    opening = decode(hello)
    assert isinstance(opening, Hello)
    session = Session(SECRET, opening.nonce, said.nonce, is_caller=True)
    with pytest.raises(PeerError, match="where an introduction was expected"):
        listener.take(session.seal(hello))
    assert caller.peer is None and listener.peer is None


def test_a_proof_cannot_be_used_again(listener: Side) -> None:
    """What one caller said is of no use to who heard it."""
    first = Handshake(SECRET, info_of(Pool()), is_caller=True)
    raw = Raw(listener)
    (hello,) = first.begin()
    raw.sock.sendall(frame(hello))
    challenge = raw.hear_bytes()
    assert challenge is not None
    (introduction,) = first.take(challenge)
    again = Raw(listener)
    again.sock.sendall(frame(hello))
    assert again.hear_bytes() is not None
    again.sock.sendall(frame(introduction))
    assert again.hear_bytes() is None
    for sock in (raw.sock, again.sock):
        sock.close()


def test_a_listener_does_not_take_what_it_said_for_the_callers(listener: Side) -> None:
    """Somebody between the two sends back what the listener has sealed."""
    raw = Raw(listener)
    assert isinstance(raw.shake_hands(info_of(Pool())), Introduction)
    link = listener.of(Connected)[-1].link
    raw.say(Stop(1))  # so that both directions have said as much
    until(lambda: bool(listener.of(Message)), listener)
    for number in range(2):
        listener.transport.send(link, Stop(number))
    sealed = [raw.hear_bytes() for _ in range(2)]
    assert sealed[1] is not None
    raw.sock.sendall(frame(sealed[1]))
    assert raw.hear_bytes() is None, "it has talked with itself"
    assert len(listener.of(Message)) == 1
    raw.sock.close()


def test_a_listener_does_not_take_its_own_proof_for_the_callers(listener: Side) -> None:
    raw = Raw(listener)
    raw.say(Hello(VERSION, bytes(32)))
    challenge = raw.hear()
    assert isinstance(challenge, Challenge)
    raw.say(challenge)
    assert raw.hear() is None, "a stranger has got in"
    assert "secret" in listener.of(Lost)[0].reason
    raw.sock.close()


@pytest.mark.parametrize("changes", ["a byte", "lost", "twice", "swapped", "added", "cut short"])
def test_what_was_changed_on_its_way_costs_the_link(listener: Side, changes: str) -> None:
    """Nothing of it is heard, nor anything behind it."""
    raw = Raw(listener)
    assert isinstance(raw.shake_hands(info_of(Pool())), Introduction)
    assert raw.session is not None
    said = [raw.session.seal(encode(Stop(number))) for number in range(3)]
    heard = 1
    if changes == "a byte":
        said[1] = said[1][:8] + bytes([said[1][8] ^ 1]) + said[1][9:]
    elif changes == "lost":
        del said[1]
    elif changes == "twice":
        said.insert(1, said[0])
    elif changes == "swapped":
        said[1:] = said[:0:-1]
    elif changes == "added":
        said.insert(1, encode(Stop(9)) + bytes(16))
    else:
        said[1] = said[1][:10]
    for payload in said:
        raw.sock.sendall(frame(payload))
    assert raw.hear() is None
    assert [event.message for event in listener.of(Message)] == [Stop(number) for number in range(heard)]
    assert "changed, lost or added" in listener.of(Lost)[-1].reason
    raw.sock.close()


def test_an_introduction_that_was_changed_on_its_way_is_refused(listener: Side) -> None:
    """A relay that makes a pool larger than it is would have blocks written behind it."""
    handshake = Handshake(SECRET, info_of(Pool()), is_caller=True)
    raw = Raw(listener)
    raw.sock.sendall(frame(handshake.begin()[0]))
    challenge = raw.hear_bytes()
    assert challenge is not None
    (introduction,) = handshake.take(challenge)
    changed = introduction.replace(b'"num_blocks":40', b'"num_blocks":99')
    assert changed != introduction
    raw.sock.sendall(frame(changed))
    assert raw.hear_bytes() is None
    assert len(listener.of(Connected)) == 1, "only the good peer"
    raw.sock.close()


def test_a_known_peer_of_another_model_is_told_why(listener: Side) -> None:
    raw = Raw(listener)
    assert raw.shake_hands(info_of(Pool(), model="another")) == Denied("model is 'another' here and 'model' there")
    raw.sock.close()


def test_a_caller_refuses_a_listener_of_another_model() -> None:
    """Whether or not the listener, which knows the secret, has compared anything."""
    caller = Handshake(SECRET, info_of(Pool()), is_caller=True)
    hello = decode(caller.begin()[0])
    assert isinstance(hello, Hello)
    session = Session(SECRET, hello.nonce, bytes(32), is_caller=False)
    caller.take(encode(Challenge(VERSION, bytes(32), session.proof)))
    with pytest.raises(PeerError, match="model is 'model' here and 'another' there"):
        caller.take(session.seal(encode(Introduction(info_of(Pool(), model="another")))))
    assert caller.peer is None
    assert not caller.refusal, "the listener is told nothing"


@pytest.mark.parametrize("answers", ["a denial", "no number", "half a character", "noise"])
def test_what_a_stranger_answers_is_shown_to_nobody(answers: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever sends requests names hosts, and an engine calls there."""
    side = Side(Backend("shared_memory").open(Pool()))
    said = {
        "a denial": frame(encode(Denied("all is well\n2026-11-22 weights verified\x1b[2J"))),
        "no number": frame(b'{"t":"challenge","version":"weights verified","nonce":"%s"}' % (b"00" * 32)),
        "half a character": frame(b'{"t":"challenge","version":2,"nonce":"%s","proof":"\\udfff"}' % (b"00" * 32)),
        "noise": bytes(range(256)) * 10,
    }[answers]
    with socket.create_server(("127.0.0.1", 0)) as stranger, caplog.at_level(logging.WARNING):
        side.transport.connect("127.0.0.1", stranger.getsockname()[1])
        side.poll()
        sock, _ = stranger.accept()
        sock.sendall(said)
        wait = Time(side).until if answers == "noise" else until  # of that a message could still become
        wait(lambda: bool(side.of(Lost)), side)
        sock.close()
    assert "weights" not in caplog.text + side.of(Lost)[0].reason
    assert all(record.getMessage().isprintable() and len(record.getMessage()) < 400 for record in caplog.records)
    side.transport.close()


def test_what_a_peer_says_behind_an_introduction_that_is_refused_is_nobodys(listener: Side) -> None:
    """Both come at once; slots of one byte are none that one can work with."""
    info = info_of(Pool())
    handshake = Handshake(SECRET, replace(info, extra={**info.extra, "slot_bytes": 1}), is_caller=True)
    raw = Raw(listener)
    raw.sock.sendall(frame(handshake.begin()[0]))
    challenge = raw.hear_bytes()
    assert challenge is not None
    (introduction,) = handshake.take(challenge)
    assert handshake.session is not None
    want = handshake.session.seal(encode(Want("t", "", 1, 0, 1, bytes(32), (0,))))
    raw.sock.sendall(frame(introduction) + frame(want))
    until(lambda: bool(listener.of(Lost)), listener)
    assert "slot_bytes" in listener.of(Lost)[0].reason
    assert not listener.of(Message) and len(listener.of(Connected)) == 1
    raw.sock.close()


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


def endpoint_of(bind: str = "127.0.0.1", port: int = 0) -> Endpoint:
    return Endpoint(info_of(Pool()), bind, port, SECRET, 1.0)


def test_a_port_in_use_is_named(listener: Side) -> None:
    with pytest.raises(ConfigError, match=rf"port {listener.transport.port}: cannot listen there"):
        SharedMemoryTransport(Pool().pool, endpoint_of(port=listener.transport.port), STAGING)


def test_an_address_that_cannot_be_is_named() -> None:
    """A part of a name has at most 63 characters, and the system does not even look such a one up."""
    with pytest.raises(ConfigError, match=r"peer.bind='x+\.local', port 0: cannot listen there"):
        SharedMemoryTransport(Pool().pool, endpoint_of(f"{'x' * 64}.local"), STAGING)


def test_too_little_staging_memory_is_named() -> None:
    with pytest.raises(ConfigError, match=r"peer.staging_memory=4096 is too small: give at least \d+"):
        SharedMemoryTransport(Pool().pool, endpoint_of(), 4096)


@settings(max_examples=200, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200), max_size=4))
def test_a_frame_reader_takes_anything(listener: Side, data: bytes, cuts: list[int]) -> None:
    """However bytes are cut, the reader gives the same messages, or refuses them."""

    def read(parts: list[bytes]) -> list[Any]:
        reader, found = FrameReader(), []
        for part in parts:
            reader.feed(part)
            try:
                while (payload := reader.take()) is not None:
                    found.append(payload)
            except PeerError:
                return [*found, "refused"]
        return found

    frames = frame(b"a") + frame(b"") + data
    places = [0, *sorted(cuts), len(frames)]
    parts = [frames[a:b] for a, b in itertools.pairwise(places)]
    assert read(parts)[:2] == [b"a", b""]
    assert read(parts) == read([frames])
