"""Unauthenticated connections to the side channel learn nothing, and cost their own link only."""

from __future__ import annotations

import logging
import socket
import struct
from dataclasses import replace

import pytest

from kv_connector.peer.base import VERSION, PeerError
from kv_connector.peer.wire.frames import MAX_HELLO, frame
from kv_connector.peer.wire.handshake import Handshake
from kv_connector.peer.wire.messages import Challenge, Denied, Hello, Introduction, Stop, Want, decode, encode
from kv_connector.peer.wire.session import Session
from tests.peer.peers import SECRET, Backend, Connected, Lost, Message, Pool, Side, info_of, until
from tests.peer.strangers import Raw, Time

pytestmark = pytest.mark.usefixtures("pairs_still_work")


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
