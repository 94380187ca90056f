"""Which way blocks go: from pool to pool where that can be done, else through host memory, or as the settings say."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import pytest

from kv_connector.build import open_transport
from kv_connector.config import PeerConfig, PeerRoute
from kv_connector.errors import ConfigError
from kv_connector.peer.base import PeerTransport
from kv_connector.values import parse_size
from tests.copies import copy_now
from tests.peer.peers import IDENTITY, PIECES, Arrived, Lost, Pool, Pushed, Side, link_up, needs_nixl, push_all, until

KINDS = ["shared_memory", pytest.param("nixl", marks=needs_nixl)]


@dataclass(slots=True)
class LateMarker:
    """Is reached when it has been asked about a few times."""

    left: int = 3

    def query(self) -> bool:
        self.left -= 1
        return self.left <= 0


def foreign(pool: Pool) -> Pool:
    """A pool that is said to lie on a device, as an engine's would that no transport can reach: the memory has neither
    handles nor a registration, and its own copier moves it."""
    pool.pool = replace(pool.pool, device=0, copy=copy_now, mark=LateMarker)
    return pool


def open_as(pool: Pool, kind: str, route: str = "auto", staging: str = "64KiB") -> PeerTransport:
    size = parse_size(staging)
    config = PeerConfig(kind, route=PeerRoute(route), secret="known to these tests", staging_memory=size)
    return open_transport(config, IDENTITY, "engine", pool.pool)


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_out_of_reach_goes_through_host_memory(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """One line says so, and every block arrives as it was."""
    pools = foreign(Pool(60, seed=1)), foreign(Pool(60, seed=2))
    with caplog.at_level(logging.WARNING, logger="kv_connector.peer"):
        a, b = (Side(open_as(pool, kind)) for pool in pools)
    assert sum("go through host memory" in record.getMessage() for record in caplog.records) == 2, "one for each engine"
    link, back = link_up(a, b)
    expected, before = [pools[0].block(number) for number in range(59)], pools[1].block(0)
    b.transport.grant(back, 1, list(range(1, 60)))
    number = push_all(a, link, list(range(59)), list(range(1, 60)), grant=1)
    until(lambda: bool(a.of(Pushed)) and sum(e.count * len(e.regions) for e in b.of(Arrived)) == 59 * 3, a, b)
    assert a.of(Pushed) == [Pushed(number, True)]
    assert pools[1].all_bytes() == [before, *expected]
    b.transport.grant(back, 2, [0])
    push_all(a, link, [1], [0], grant=2)
    a.transport.close()
    until(lambda: bool(b.of(Lost)), b)
    b.transport.close()


@pytest.mark.parametrize("kind", KINDS)
def test_who_asks_for_the_direct_route_is_told_where_there_is_none(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"peer.route='direct' cannot be taken: .*'auto' or 'staged'"):
        open_as(foreign(Pool()), kind, "direct")


def test_on_the_cpu_one_machine_has_one_route() -> None:
    with pytest.raises(ConfigError, match=r"peer.route='direct' is for GPUs with peer.kind='shared_memory'"):
        open_as(Pool(), "shared_memory", "direct")


@needs_nixl
def test_engines_that_take_different_routes_refuse_each_other() -> None:
    """Both say why, with both values."""
    direct, staged = Side(open_as(Pool(), "nixl")), Side(open_as(Pool(), "nixl", "staged"))
    direct.transport.connect("127.0.0.1", staged.transport.port)
    until(lambda: bool(direct.of(Lost) and staged.of(Lost)), direct, staged)
    text = "transport is {!r} here and {!r} there: give both the same peer.kind and peer.route"
    assert direct.of(Lost)[0].reason == "it refused: " + text.format("nixl", "nixl_staged")
    assert staged.of(Lost)[0].reason == text.format("nixl_staged", "nixl")
    for side in (direct, staged):
        side.transport.close()


@pytest.mark.parametrize("kind", KINDS)
def test_sides_with_other_staging_memory_use_the_smaller(kind: str) -> None:
    pools = Pool(40, seed=1), Pool(40, seed=2)
    a, b = Side(open_as(pools[0], kind, "staged")), Side(open_as(pools[1], kind, "staged", "4MiB"))
    link, back = link_up(a, b)
    ids = list(range(40))
    there, here = pools[0].all_bytes(), pools[1].all_bytes()[:20]
    b.transport.grant(back, 1, ids)
    push_all(a, link, ids, ids, grant=1)
    until(lambda: sum(e.count * len(e.regions) for e in b.of(Arrived)) == 40 * 3, a, b)
    assert pools[1].all_bytes() == there
    a.transport.grant(link, 1, ids[20:])
    push_all(b, back, ids[:20], ids[20:], grant=1)
    until(lambda: sum(e.count * len(e.regions) for e in a.of(Arrived)) == 20 * 3, a, b)
    assert pools[0].all_bytes()[20:] == there[:20] != here
    assert max(event.count for event in [*a.of(Arrived), *b.of(Arrived)]) == 8192 // sum(PIECES)
    for side in (a, b):
        side.transport.close()
