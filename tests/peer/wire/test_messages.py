"""What a message may be: one `decode` for whatever is sent, which gives a message within its limits, or refuses."""

from __future__ import annotations

import dataclasses
import json
import typing

import pytest

from integration.attacks_on_peers import Fuzzer
from kv_connector.peer.base import PeerError
from kv_connector.peer.wire import messages
from kv_connector.peer.wire.messages import Filled, Nothing, Want, decode, encode
from kv_connector.peer.wire.peer_info import PeerInfo
from tests.peer.peers import PIECES, Pool, info_of

KINDS = typing.get_args(messages.WireMessage)


def some(kind: type) -> messages.WireMessage:
    """A message of a kind."""
    values: dict[str, object] = {}
    for part in dataclasses.fields(kind):
        hint = typing.get_type_hints(kind)[part.name]
        values[part.name] = {int: 3, str: "text \u00e9", bytes: b"\x07" * 32, PeerInfo: info_of(Pool())}.get(
            hint, (4, 5)
        )
    if kind is Want:
        values |= {"first": 1, "stop": 3}
    return kind(**values)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_comes_out_as_it_went_in(kind: type) -> None:
    assert decode(encode(some(kind))) == some(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "value",
    [None, True, -1, 1.0, 1 << 65, "\ud800", "x" * ((1 << 20) + 1), [], ["0"], [1 << 40], {"a": 1}, float("nan")],
)
def test_no_field_of_any_kind_takes_just_anything(kind: type, value: object) -> None:
    """Each field by itself, with all others right."""
    body = json.loads(encode(some(kind)))
    for name in body:
        with pytest.raises(PeerError):
            decode(json.dumps(body | {name: value}).encode())


@pytest.mark.parametrize("kind", KINDS)
def test_no_field_is_missing_or_added(kind: type) -> None:
    body = json.loads(encode(some(kind)))
    for changed in ({key: body[key] for key in body if key != name} for name in body):
        with pytest.raises(PeerError):
            decode(json.dumps(changed).encode())
    with pytest.raises(PeerError, match="fields"):
        decode(json.dumps(body | {"more": 1}).encode())


@pytest.mark.parametrize("text", [b"", b"\xff", b"[]", b"null", b'"stop"', b"{}", b'{"t":["stop"]}', b'{"t":"x"}'])
def test_what_is_no_message_is_refused(text: bytes) -> None:
    with pytest.raises(PeerError):
        decode(text)


def test_whatever_is_wrong_with_a_message_it_is_refused_in_one_way() -> None:
    """And what is taken is a message that can be said again."""
    fuzzer, taken, longest = Fuzzer(7, info_of(Pool())), 0, 0
    for _ in range(20_000):
        try:
            message = decode(fuzzer.wrong(fuzzer.some()))
        except PeerError as error:
            longest = max(longest, len(str(error)))
            continue
        taken += 1
        assert decode(encode(message)) == message
    assert 500 < taken < 15_000
    assert longest < 400


@pytest.mark.parametrize(("first", "stop", "count"), [(0, 2, 3), (0, 2, 1), (2, 2, 0), (3, 2, 1)])
def test_who_wants_other_blocks_than_it_names_is_refused(first: int, stop: int, count: int) -> None:
    with pytest.raises(PeerError, match="names"):
        Want("t", "", 1, first, stop, bytes(32), tuple(range(count)))


@pytest.mark.parametrize(("start", "stop", "count"), [(0, 4, 1), (2, 2, 1), (2, 1, 1), (0, 1, 0)])
def test_who_fills_what_no_pool_has_is_refused(start: int, stop: int, count: int) -> None:
    with pytest.raises(PeerError, match="filled"):
        Filled(1, 0, count, start, stop).arrived(1, len(PIECES))


def test_a_message_over_the_bound_is_not_sent() -> None:
    with pytest.raises(PeerError, match="over the bound"):
        encode(Want("t", "", 1, 0, 300_000, bytes(32), tuple(range(300_000))))


def test_a_hash_is_of_its_length() -> None:
    for name in (b"", bytes(31), bytes(33)):
        with pytest.raises(PeerError, match="hexadecimal"):
            decode(encode(Nothing("t", "", name)))
