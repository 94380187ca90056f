"""Frames that only the peer can have made, in the order in which it made them."""

from __future__ import annotations

import pytest

from kv_connector.peer.base import PeerError
from kv_connector.peer.wire.frames import frame
from kv_connector.peer.wire.messages import Introduction, Stop, encode
from kv_connector.peer.wire.session import Session
from tests.peer.peers import Lost, Message, Pool, Side, info_of
from tests.peer.strangers import Raw

NONCES = b"c" * 32, b"l" * 32


def pair(secret: bytes = b"a secret", nonces: tuple[bytes, bytes] = NONCES) -> tuple[Session, Session]:
    """The caller's end and the listener's."""
    return Session(secret, *nonces, is_caller=True), Session(secret, *nonces, is_caller=False)


def test_both_sides_open_what_the_other_has_sealed() -> None:
    caller, listener = pair()
    for number in range(3):
        message = b"message %d" % number
        assert listener.open(caller.seal(message)) == caller.open(listener.seal(message)) == message
    assert caller.proof == listener.proof


def test_no_side_opens_what_it_has_sealed_itself() -> None:
    """Sent back by whoever carries it."""
    for side in pair():
        with pytest.raises(PeerError):
            side.open(side.seal(b"message"))


@pytest.mark.parametrize("place", [0, 3, 7, 22])
def test_no_bit_can_be_changed(place: int) -> None:
    caller, listener = pair()
    sealed = bytearray(caller.seal(b"message"))
    sealed[place] ^= 1
    with pytest.raises(PeerError):
        listener.open(bytes(sealed))


@pytest.mark.parametrize("order", [[1], [0, 0], [0, 2], [1, 0]])
def test_nothing_can_be_lost_repeated_or_swapped(order: list[int]) -> None:
    caller, listener = pair()
    sealed = [caller.seal(b"message") for _ in range(3)]

    def hear() -> None:
        for number in order:
            listener.open(sealed[number])

    with pytest.raises(PeerError):
        hear()


@pytest.mark.parametrize("length", [0, 1, 15])
def test_what_is_shorter_than_a_seal_is_refused(length: int) -> None:
    with pytest.raises(PeerError):
        pair()[1].open(bytes(length))


def test_every_session_has_keys_of_its_own() -> None:
    """Another secret, another nonce of either side, or the two nonces swapped: nothing that was said fits."""
    message = pair()[0].seal(b"message")
    others = [pair(b"another secret"), pair(nonces=(b"x" * 32, NONCES[1])), pair(nonces=(NONCES[0], b"x" * 32))]
    for _, listener in (*others, pair(nonces=NONCES[::-1])):
        assert listener.proof != pair()[0].proof
        with pytest.raises(PeerError):
            listener.open(message)


@pytest.mark.usefixtures("pairs_still_work")
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
