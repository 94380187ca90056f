"""Unauthenticated connections to the side channel, broken peers and hostile ones cost their own link only."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_connector.errors import ConfigError
from kv_connector.peer.base import VERSION, PeerError
from kv_connector.peer.carriers.nixl_agent import encode_metadata, start_agent
from kv_connector.peer.carriers.staged import ring
from kv_connector.peer.carriers.staged.shared_memory import SharedMemoryTransport
from kv_connector.peer.wire.frames import MAX_HELLO, MAX_MESSAGE, FrameReader, encode
from kv_connector.peer.wire.handshake import Handshake, PeerInfo
from tests.peer.peers import (
    SECONDS,
    SECRET,
    STAGED,
    STAGING,
    Arrived,
    Backend,
    Connected,
    Lost,
    Pool,
    Pushed,
    Side,
    info_of,
    link_up,
    push_all,
    until,
)


class Raw:
    """A socket that says whatever the test wants to a transport, which is polled meanwhile."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.sock = socket.create_connection(("127.0.0.1", side.transport.port), timeout=SECONDS)
        self.sock.settimeout(0.01)
        self.reader = FrameReader()
        self.reader.bound = MAX_MESSAGE

    def say(self, body: dict[str, Any]) -> None:
        self.sock.sendall(encode(body))

    def hear(self) -> dict[str, Any] | None:
        """The next message; None where the connection is closed."""
        end = time.monotonic() + SECONDS
        while (body := self.reader.take()) is None:
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
        return body

    def shake_hands(self, info: PeerInfo, secret: bytes = SECRET) -> dict[str, Any] | None:
        """As a caller does; the last answer."""
        handshake = Handshake(secret, info, is_caller=True)
        messages = handshake.begin()
        answer = None
        while messages:
            for body in messages:
                self.say(body)
            answer = self.hear()
            if answer is None or answer["t"] == "refused":
                return answer
            messages = handshake.take(answer)
        return answer


@pytest.fixture
def backend() -> str:
    """Tests of what a backend adds name others."""
    return "shared_memory"


@pytest.fixture
def pool() -> Pool:
    return Pool(40, seed=5)


@pytest.fixture
def listener(backend: str, pool: Pool) -> Iterator[Side]:
    side = Side(Backend(backend).open(pool, seconds=5.0))
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
    good.transport.close()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", "over the bound"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600), "over the bound"),
        (struct.pack(">I", MAX_HELLO + 1), "over the bound"),
        (struct.pack(">I", 4) + b"\xff\xfe\xfd\xfc", "not JSON"),
        (struct.pack(">I", 2) + b"[]", "not an object"),
        (struct.pack(">I", 8) + b'{"t": 1}', "not an object"),
        (encode({"t": "want", "grant": 1}), "'hello' was expected"),
        (encode({"t": "hello", "version": VERSION + 1, "nonce": "00" * 32}), "version is"),
        (encode({"t": "hello", "version": VERSION, "nonce": "00"}), "nonce"),
        (encode({"t": "hello", "version": VERSION, "nonce": "zz" * 32}), "nonce"),
        (encode({"t": "hello", "version": VERSION}), "nonce"),
        (struct.pack(">I", 200_000) + b"[" * 200_000, "not JSON"),
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


def test_a_wrong_secret_learns_nothing(listener: Side) -> None:
    raw = Raw(listener)
    handshake = Handshake(SECRET, info_of(Pool()), is_caller=True)
    raw.say(handshake.begin()[0])
    challenge = raw.hear()
    assert challenge is not None and sorted(challenge) == ["nonce", "proof", "t", "version"]
    raw.say({"t": "proof", "proof": "00" * 32, "info": info_of(Pool()).encode()})
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


def test_a_proof_cannot_be_used_again(listener: Side) -> None:
    """What one caller said is of no use to who heard it."""
    first = Handshake(SECRET, info_of(Pool()), is_caller=True)
    raw = Raw(listener)
    hello = first.begin()[0]
    raw.say(hello)
    challenge = raw.hear()
    assert challenge is not None
    proof = first.take(challenge)[0]
    again = Raw(listener)
    again.say(hello)
    assert again.hear() is not None
    again.say(proof)
    assert again.hear() is None
    for sock in (raw.sock, again.sock):
        sock.close()


def test_a_listener_does_not_take_its_own_proof_for_the_callers(listener: Side) -> None:
    """A stranger sends back what it was sent: each side proves that it knows the secret under its own name."""
    raw = Raw(listener)
    for body in Handshake(b"", info_of(Pool()), is_caller=True).begin():
        raw.say(body)
    challenge = raw.hear()
    assert challenge is not None
    raw.say({"t": "proof", "proof": challenge["proof"], "info": info_of(Pool()).encode()})
    assert raw.hear() is None, "a stranger has got in"
    assert "secret" in listener.of(Lost)[0].reason
    raw.sock.close()


def test_a_caller_does_not_take_its_own_proof_for_the_listeners() -> None:
    """Nor does a caller, whoever it has called: here somebody who calls it in turn, with the same nonce."""
    caller = Handshake(SECRET, info_of(Pool()), is_caller=True)
    honest = Handshake(SECRET, info_of(Pool()), is_caller=False)
    (challenge,) = honest.take(caller.begin()[0])
    (proof,) = Handshake.take(caller, challenge)
    again = Handshake(SECRET, info_of(Pool()), is_caller=True)
    again._nonce = caller._nonce
    with pytest.raises(PeerError, match="secret"):
        again.take(challenge | {"proof": proof["proof"]})


def test_a_known_peer_of_another_model_is_told_why(listener: Side) -> None:
    raw = Raw(listener)
    answer = raw.shake_hands(info_of(Pool(), model="another"))
    assert answer == {"t": "refused", "reason": "model is 'another' here and 'model' there"}
    raw.sock.close()


@pytest.mark.parametrize("backend", STAGED)
@pytest.mark.parametrize(
    "body",
    [
        {"t": "slot", "slot": 0, "grant": 0, "first": 0, "count": 1, "from": 0, "to": 1},
        {"t": "slot", "slot": -1},
        {"t": "free", "slot": 0},
        {"t": "mapped"},
        {"t": "ring", "slots": 9, "slot_bytes": 8192, "token": "00" * 16},
        {"t": "ring", "slots": 8, "slot_bytes": 8193, "token": "00" * 16},
        {"t": "ring", "slots": 8, "slot_bytes": 1 << 60, "token": "00" * 16},
        {"t": "ring"},
    ],
)
def test_a_peer_that_does_not_keep_to_the_protocol_is_dropped(
    listener: Side, backend: str, body: dict[str, Any]
) -> None:
    raw = Raw(listener)
    assert raw.shake_hands(info_of(Pool(), transport=backend))
    raw.say(body)
    assert raw.hear() is None
    raw.sock.close()


@pytest.mark.parametrize("backend", STAGED)
@pytest.mark.parametrize(
    "change",
    [{"first": 1}, {"count": 3}, {"first": -1}, {"from": 3, "to": 4}, {"to": 0}, {"slot": 8}, {"count": 1 << 40}],
)
def test_a_peer_that_claims_other_blocks_is_dropped(
    listener: Side, backend: str, pool: Pool, change: dict[str, int]
) -> None:
    before = pool.all_bytes()
    raw = Raw(listener)
    welcome = raw.shake_hands(info_of(Pool(), transport=backend))
    assert welcome is not None
    link = listener.of(Connected)[-1].link
    listener.transport.grant(link, 5, [1, 2])
    offer = {"t": "ring", "slots": 8, "slot_bytes": 8192}
    if backend == "shared_memory":
        offer["token"] = hand_over(welcome, sealed=True)
    raw.say(offer)
    answer = raw.hear()
    assert answer is not None and answer["t"] == "mapped"
    raw.say({"t": "slot", "slot": 0, "grant": 5, "first": 0, "count": 2, "from": 0, "to": 1} | change)
    assert raw.hear() is None
    assert not listener.of(Arrived)
    assert pool.all_bytes() == before
    raw.sock.close()


def hand_over(welcome: dict[str, Any], sealed: bool) -> str:
    """Give the listener memory; returns the token that names it."""
    fd, token = ring.create(8, 8192) if sealed else os.memfd_create("unsealed", os.MFD_CLOEXEC), "ab" * 16
    os.ftruncate(fd, 8 * 8192)
    ring.hand_over(welcome["info"]["extra"]["socket"], token, fd)
    os.close(fd)
    return token


def test_memory_that_nobody_sent_is_not_waited_for(listener: Side) -> None:
    raw = Raw(listener)
    assert raw.shake_hands(info_of(Pool()))
    raw.say({"t": "ring", "slots": 8, "slot_bytes": 8192, "token": "00" * 16})
    assert raw.hear() is None
    raw.sock.close()


def test_memory_that_could_be_pulled_away_is_not_mapped(listener: Side) -> None:
    raw = Raw(listener)
    welcome = raw.shake_hands(info_of(Pool()))
    assert welcome is not None
    raw.say({"t": "ring", "slots": 8, "slot_bytes": 8192, "token": hand_over(welcome, sealed=False)})
    assert raw.hear() is None
    until(lambda: bool(listener.of(Lost)), listener)
    assert "not sealed" in listener.of(Lost)[-1].reason
    raw.sock.close()


@pytest.mark.parametrize("backend", STAGED[1:])
@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"address": 0, "metadata": ""},
        {"address": "4096", "metadata": ""},
        {"address": 4096, "metadata": "!"},
        {"address": 4096, "metadata": "Z2FyYmFnZQ=="},
        {"address": 4096, "metadata": ["x"]},
        {"address": 4096},  # with an agent's own metadata, which knows of no memory there
    ],
)
def test_a_peer_that_cannot_be_written_to_is_dropped(listener: Side, backend: str, answer: dict[str, Any]) -> None:
    raw = Raw(listener)
    assert raw.shake_hands(info_of(Pool(), transport=backend))
    number = push_all(listener, listener.of(Connected)[-1].link, [1, 2], [1, 2], grant=1)
    assert raw.hear() == {"t": "ring", "slots": 8, "slot_bytes": 8192}
    agent = start_agent()
    raw.say({"t": "mapped", "metadata": encode_metadata(agent.get_agent_metadata()), **answer})
    assert raw.hear() is None
    until(lambda: bool(listener.of(Pushed)), listener)
    assert listener.of(Pushed) == [Pushed(number, False)]
    raw.sock.close()


def test_a_peer_that_stops_reading_is_dropped() -> None:
    side = Side(Backend("shared_memory").open(Pool(), seconds=0.5))
    raw = Raw(side)
    assert raw.shake_hands(info_of(Pool()))
    link = side.of(Connected)[0].link
    for _ in range(12):
        side.transport.send(link, {"t": "x", "text": "y" * (MAX_MESSAGE - 100)})
    until(lambda: bool(side.of(Lost)), side)
    assert "not read" in side.of(Lost)[0].reason
    raw.sock.close()
    side.transport.close()


def test_what_waits_for_a_peer_is_bounded(listener: Side) -> None:
    raw = Raw(listener)
    assert raw.shake_hands(info_of(Pool()))
    link = listener.of(Connected)[-1].link

    def say_much() -> None:
        for _ in range(100):
            listener.transport.send(link, {"t": "x", "text": "y" * (MAX_MESSAGE - 100)})

    with pytest.raises(PeerError, match="does not read"):
        say_much()
    listener.transport.drop(link, "enough")
    raw.sock.close()


def test_strangers_who_say_nothing_make_room_for_others() -> None:
    """Many hold a connection open and say nothing; a good peer still gets in, and they go in the end."""
    side = Side(Backend("shared_memory").open(Pool(), seconds=1.0))
    idle = []
    for _ in range(100):
        idle.append(Raw(side))
        side.poll()
    good = Side(Backend("shared_memory").open(Pool()))
    link_up(good, side)
    until(lambda: len(side.of(Lost)) == 100, side)
    assert not good.of(Lost)
    for raw in idle:
        raw.sock.close()
    good.transport.close()
    side.transport.close()


def test_a_port_in_use_is_named(listener: Side) -> None:
    with pytest.raises(ConfigError, match=rf"port {listener.transport.port}: cannot listen there"):
        SharedMemoryTransport(Pool().pool, info_of(Pool()), "127.0.0.1", listener.transport.port, SECRET, 1.0, STAGING)


def test_an_address_that_cannot_be_is_named() -> None:
    """A part of a name has at most 63 characters, and the system does not even look such a one up."""
    with pytest.raises(ConfigError, match=r"peer.bind='x+\.local', port 0: cannot listen there"):
        SharedMemoryTransport(Pool().pool, info_of(Pool()), f"{'x' * 64}.local", 0, SECRET, 1.0, STAGING)


def test_too_little_staging_memory_is_named() -> None:
    with pytest.raises(ConfigError, match=r"peer.staging_memory=4096 is too small: give at least \d+"):
        SharedMemoryTransport(Pool().pool, info_of(Pool()), "127.0.0.1", 0, SECRET, 1.0, 4096)


@settings(max_examples=200, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200), max_size=4))
def test_a_frame_reader_takes_anything(listener: Side, data: bytes, cuts: list[int]) -> None:
    """However bytes are cut, the reader gives the same messages, or refuses them."""

    def read(parts: list[bytes]) -> list[Any]:
        reader, found = FrameReader(), []
        for part in parts:
            reader.feed(part)
            try:
                while (body := reader.take()) is not None:
                    found.append(body)
            except PeerError:
                return [*found, "refused"]
        return found

    frames = encode({"t": "a", "n": 1}) + encode({"t": "b"}) + data
    places = [0, *sorted(cuts), len(frames)]
    parts = [frames[a:b] for a, b in itertools.pairwise(places)]
    assert read(parts)[:2] == [{"t": "a", "n": 1}, {"t": "b"}]
    assert read(parts) == read([frames])
