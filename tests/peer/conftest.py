"""A side that listens, and what it must still do whatever a test has done to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.peer.peers import Arrived, Backend, Lost, Pool, Side, link_up, push_all, until


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


@pytest.fixture
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
