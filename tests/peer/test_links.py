"""What every backend between peers must do: links, messages, pushes, grants, cancels and losses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kv_connector.peer.base import PeerError
from kv_connector.peer.wire.messages import MAX_MESSAGE, Refused, Stop, Want, encode
from tests.peer.peer_process import FarSide, open_on
from tests.peer.peers import (
    BACKENDS,
    PIECES,
    Arrived,
    Backend,
    Connected,
    Lost,
    Message,
    Pool,
    Push,
    Pushed,
    Side,
    ids,
    link_up,
    needs_nixl,
    push_all,
    until,
)


class Two:
    """A producer and a consumer with a link between them.

    Of those `apart` the consumer is in another process, on the last device; of those `hidden` each sees its own only.
    """

    def __init__(self, name: str) -> None:
        self._name, _, self._is_apart = name.partition(" ")
        self._backend = None if self._is_apart else Backend(name)
        self.a, self.source = self._open("a", 40, 1)
        self.b, self.target = self._open("b", 30, 2)
        self.link, self.back = link_up(self.a, self.b)

    def _open(self, engine_id: str, num_blocks: int, seed: int) -> tuple[Any, Any]:
        """A side and its pool."""
        if self._backend is not None:
            pool = Pool(num_blocks, seed)
            return Side(self._backend.open(pool, engine_id=engine_id)), pool
        if engine_id == "a":
            return open_on(self._name, num_blocks, seed, engine_id, device=0)
        last = max(0, torch.cuda.device_count() - 1)
        if self._is_apart == "hidden":
            far = FarSide(self._name, num_blocks, seed, engine_id, device=0, visible=str(last))
        else:
            far = FarSide(self._name, num_blocks, seed, engine_id, device=last)
        return far, far

    def replace_b(self) -> None:
        """Another engine in the place of b, which is gone."""
        self.b, self.target = self._open("b2", 30, 2)
        self.link, self.back = link_up(self.a, self.b)

    def until(self, condition: object) -> None:
        until(condition, self.a, self.b)  # type: ignore[arg-type]

    def close(self) -> None:
        self.a.transport.close()
        self.b.transport.close()


APART = [
    "shared_memory apart",
    pytest.param("cuda apart", marks=pytest.mark.gpu),
    pytest.param("cuda hidden", marks=[pytest.mark.gpu, pytest.mark.multi_gpu]),
    pytest.param("cuda+nixl apart", marks=[pytest.mark.gpu, needs_nixl]),
    pytest.param("cuda+shared_memory+staged apart", marks=pytest.mark.gpu),
    pytest.param("cuda+nixl+staged apart", marks=[pytest.mark.gpu, needs_nixl]),
]


@pytest.fixture(params=[*BACKENDS, *APART])
def two(request: pytest.FixtureRequest) -> Iterator[Two]:
    pair = Two(request.param)
    yield pair
    pair.close()


def test_both_sides_know_each_other(two: Two) -> None:
    (there,) = two.a.of(Connected)
    (here,) = two.b.of(Connected)
    assert (there.engine_id, there.num_blocks) == ("b", 30)
    assert (here.engine_id, here.num_blocks) == ("a", 40)


def test_blocks_arrive_where_they_were_granted_and_nowhere_else(two: Two) -> None:
    source, target = two.source, two.target
    before = target.all_bytes()
    two.b.transport.grant(two.back, 7, [20, 3, 11, 4])
    number = push_all(two.a, two.link, [5, 6, 30], [3, 11, 4], grant=7, first=1)
    two.until(lambda: two.a.of(Pushed) and sum(e.count * len(e.regions) for e in two.b.of(Arrived)) == 3 * len(PIECES))
    assert two.a.of(Pushed) == [Pushed(number, True)]
    assert all(event.grant == 7 and event.link == two.back for event in two.b.of(Arrived))
    expected = dict(zip([3, 11, 4], map(source.block, [5, 6, 30]), strict=True))
    assert target.all_bytes() == [expected.get(i, block) for i, block in enumerate(before)]


def test_regions_can_come_in_parts_and_in_both_directions(two: Two) -> None:
    source, target = two.source, two.target
    two.b.transport.grant(two.back, 1, [0, 1])
    two.a.transport.grant(two.link, 2, [9])
    for number, regions in enumerate((range(1), range(1, 3))):
        two.a.transport.push(two.link, Push(number, 1, 0, ids([8, 7]), ids([0, 1]), regions))
    two.b.transport.push(two.back, Push(1, 2, 0, ids([29]), ids([9]), range(3)))
    sent_back = target.block(29)
    two.until(lambda: len(two.a.of(Pushed)) == 2 and two.b.of(Pushed) and two.a.of(Arrived))
    two.until(lambda: sum(e.count * len(e.regions) for e in two.b.of(Arrived)) == 6)
    assert [target.block(0), target.block(1)] == [source.block(8), source.block(7)]
    assert source.block(9) == sent_back


def test_more_than_fits_on_the_way_at_once(two: Two) -> None:
    """A push of a whole pool, many times what a backend may hold between the two."""
    source, target = two.source, two.target
    expected = [source.block(i) for i in range(30)]
    for turn in range(20):
        two.b.transport.grant(two.back, turn, list(range(30)))
        push_all(two.a, two.link, list(range(30)), list(range(30)), grant=turn)
    two.until(lambda: sum(e.count * len(e.regions) for e in two.b.of(Arrived)) == 20 * 30 * len(PIECES))
    assert target.all_bytes() == expected
    assert [event.ok for event in two.a.of(Pushed)] == [True] * 20
    assert two.b.transport.counters.received_bytes == 20 * 30 * sum(PIECES)


def test_messages_come_in_order_and_up_to_the_bound(two: Two) -> None:
    said: list[Any] = [Stop(number) for number in range(200)]
    said.append(Want("t", "", 1, 0, 100_000, bytes(32), tuple(range(10**8, 10**8 + 100_000))))
    assert len(encode(said[-1])) > 0.9 * MAX_MESSAGE
    said.append(Refused(7, 'anything: "\\\n\x00\u00e9\U0001f600'))
    for message in said:
        two.a.transport.send(two.link, message)
    two.until(lambda: len(two.b.of(Message)) == len(said))
    assert [event.message for event in two.b.of(Message)] == said
    with pytest.raises(PeerError, match="over the bound"):
        two.a.transport.send(two.link, Want("t", "", 1, 0, 200_000, bytes(32), (10**8,) * 200_000))
    two.a.transport.send(two.link, Stop(1000))
    two.until(lambda: two.b.of(Message)[-1].message == Stop(1000))


def test_a_revoked_grant_is_not_filled(two: Two) -> None:
    if two.b.transport.is_one_sided:
        pytest.skip("the pusher's own copies: it has to be told to stop")
    before = two.target.all_bytes()
    two.b.transport.grant(two.back, 3, [1, 2])
    two.b.transport.revoke(two.back, 3)
    push_all(two.a, two.link, [1, 2], [1, 2], grant=3)
    two.until(lambda: two.a.of(Pushed))
    two.a.transport.send(two.link, Stop(1))
    two.until(lambda: two.b.of(Message))
    assert two.target.all_bytes() == before
    assert not two.b.of(Arrived)
    assert not two.b.of(Lost), "it was revoked while it was on its way: nobody's fault"


def test_more_than_was_granted_is_refused(two: Two) -> None:
    if two.b.transport.is_one_sided:
        pytest.skip("the pusher's own copies: it is the pusher who checks")
    before = two.target.all_bytes()
    two.b.transport.grant(two.back, 3, [1, 2])
    push_all(two.a, two.link, [1, 2, 3], [1, 2, 3], grant=3)
    two.until(lambda: two.b.of(Lost))
    assert "granted" in two.b.of(Lost)[0].reason
    assert two.target.all_bytes() == before


def test_every_push_ends_once_where_the_link_is_lost(two: Two) -> None:
    two.b.transport.grant(two.back, 0, list(range(30)))
    numbers = [push_all(two.a, two.link, list(range(30)), list(range(30)), grant=0) for _ in range(20)]
    two.b.transport.drop(two.back, "enough")
    two.until(lambda: two.a.of(Lost) and two.b.of(Lost) and len(two.a.of(Pushed)) == 20)
    assert sorted(event.number for event in two.a.of(Pushed)) == numbers
    assert two.b.of(Lost)[0].reason == "enough"
    numbers.append(push_all(two.a, two.link, [1], [1], grant=0))
    two.until(lambda: len(two.a.of(Pushed)) == 21)
    assert not two.a.of(Pushed)[-1].ok
    two.a.transport.send(two.link, Stop(1))  # nothing happens


def test_a_cancelled_push_ends(two: Two) -> None:
    two.b.transport.grant(two.back, 0, list(range(30)))
    numbers = [push_all(two.a, two.link, list(range(30)), list(range(30)), grant=0) for _ in range(10)]
    for number in numbers:
        two.a.transport.cancel(number)
    two.until(lambda: len(two.a.of(Pushed)) == 10)
    assert sorted(event.number for event in two.a.of(Pushed)) == numbers
    two.b.transport.grant(two.back, 1, [4])
    push_all(two.a, two.link, [9], [4], grant=1)
    two.until(lambda: any(e.grant == 1 and e.regions.stop == 3 for e in two.b.of(Arrived)))
    assert two.target.block(4) == two.source.block(9), "the link still works"


def test_a_peer_that_went_comes_back_at_another_link(two: Two) -> None:
    two.b.transport.close()
    until(lambda: two.a.of(Lost), two.a)
    two.replace_b()
    assert two.a.of(Connected)[-1].engine_id == "b2"
    two.b.transport.grant(two.back, 0, [2])
    push_all(two.a, two.link, [1], [2], grant=0)
    two.until(lambda: two.b.of(Arrived))


def test_two_engines_may_have_a_link_from_either_side(two: Two) -> None:
    """Each computes for the other, and each has connected; one link goes, and the other one is as it was."""
    source, target = two.source, two.target
    known = len(two.b.of(Connected)), len(two.a.of(Connected))
    other = two.b.transport.connect("127.0.0.1", two.a.transport.port)
    two.until(lambda: (len(two.b.of(Connected)), len(two.a.of(Connected))) == (known[0] + 1, known[1] + 1))
    back = two.a.of(Connected)[-1].link
    expected = source.block(3), target.block(4), source.block(5)
    two.b.transport.grant(two.back, 1, [6])
    two.a.transport.grant(back, 2, [7])
    push_all(two.a, two.link, [3], [6], grant=1)
    two.b.transport.push(other, Push(1, 2, 0, ids([4]), ids([7]), range(len(PIECES))))
    two.until(lambda: two.a.of(Pushed) and two.b.of(Pushed))
    two.until(lambda: all(sum(len(e.regions) for e in side.of(Arrived)) == len(PIECES) for side in (two.a, two.b)))
    assert (target.block(6), source.block(7)) == expected[:2]
    assert (two.b.of(Arrived)[0].link, two.a.of(Arrived)[0].link) == (two.back, back)
    two.b.transport.drop(other, "enough")
    two.until(lambda: two.a.of(Lost) and two.b.of(Lost))
    two.b.transport.grant(two.back, 3, [8])
    push_all(two.a, two.link, [5], [8], grant=3)
    two.until(lambda: sum(len(e.regions) for e in two.b.of(Arrived)) == 2 * len(PIECES))
    assert target.block(8) == expected[2]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"block_size": 32}, ["block_size is 16 here and 32 there"]),
        ({"model": "another", "cache_dtype": "fp8"}, ["'model'", "'another'", "'float32'", "'fp8'"]),
        ({"tp_size": 2, "rank": 1}, ["tp_size is", "rank is"]),
        ({"pieces": (512, 512, 1024)}, ["(512, 512, 768)", "(512, 512, 1024)"]),
        ({"layout": "HND"}, ["'NHD'", "'HND'"]),
    ],
)
def test_another_model_is_refused_with_both_values(name: str, changes: dict[str, object], texts: list[str]) -> None:
    backend = Backend(name)
    a, b = Side(backend.open(Pool())), Side(backend.open(Pool(), **changes))
    link = a.transport.connect("127.0.0.1", b.transport.port)
    until(lambda: a.of(Lost), a, b)
    assert a.of(Lost)[0].link == link
    for text in texts:
        assert text in a.of(Lost)[0].reason
    assert not a.of(Connected) + b.of(Connected)
    a.transport.close()
    b.transport.close()


@pytest.mark.parametrize("name", BACKENDS)
def test_who_does_not_know_the_secret_is_refused_and_others_are_not(name: str) -> None:
    backend = Backend(name)
    a, b = Side(backend.open(Pool())), Side(backend.open(Pool()))
    stranger = Side(backend.open(Pool(), secret=b"something else altogether"))
    stranger.transport.connect("127.0.0.1", b.transport.port)
    until(lambda: stranger.of(Lost), stranger, b)
    assert "secret" in stranger.of(Lost)[0].reason
    link_up(a, b)
    assert len(b.of(Connected)) == 1
    for side in (a, b, stranger):
        side.transport.close()


@pytest.mark.parametrize("name", BACKENDS)
def test_nobody_there(name: str) -> None:
    backend = Backend(name)
    a, b = Side(backend.open(Pool())), Side(backend.open(Pool()))
    port = b.transport.port
    b.transport.close()
    a.transport.connect("127.0.0.1", port)
    until(lambda: a.of(Lost), a)
    a.transport.close()
