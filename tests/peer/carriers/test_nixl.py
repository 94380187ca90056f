"""A write that NIXL has given up may land in parts yet: whoever waits for it hears that the link is lost, no more."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from kv_connector.peer.carriers.leases import LEASE_SECONDS
from kv_connector.peer.carriers.nixl_agent import LONGEST_TRANSFER_SECONDS, add_remote, encode_metadata, start_agent
from tests.peer.peers import Arrived, Backend, Lost, Pool, Pushed, Side, link_up, needs_nixl, push_all, until

pytestmark = needs_nixl
_BYTES = 64 << 20


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    a, b = (Side(Backend("nixl").open(Pool(seed=seed), engine_id=name)) for seed, name in enumerate("ab"))
    yield a, b
    for side in (a, b):
        side.transport.close()


def test_a_write_that_has_failed_costs_its_link(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a link that goes on, a word that the producer has stopped would be taken for the truth."""
    a, b = sides
    link, back = link_up(a, b)
    b.transport.grant(back, 1, [3])
    monkeypatch.setattr(a.transport._agent, "check_xfer_state", lambda handle: "ERR")  # type: ignore[attr-defined]
    number = push_all(a, link, [1], [3], grant=1)
    until(lambda: bool(a.of(Pushed) and a.of(Lost) and b.of(Lost)), a, b)
    assert a.of(Pushed) == [Pushed(number, False)]
    assert a.of(Lost) == [Lost(link, "what NIXL writes to it failed")]


class Later:
    """A clock that is put forward."""

    ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    def sleep(self, seconds: float, /) -> None:
        time.sleep(seconds)


def test_a_write_that_took_longer_to_make_than_its_lease_lasts_waits_for_another(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The producer stood still between the look at its lease and the post."""
    a, b = sides
    link, back = link_up(a, b)
    b.transport.grant(back, 1, [3])
    agent, leases, clock = a.transport._agent, a.transport._leases, Later()  # type: ignore[attr-defined]
    monkeypatch.setattr(leases, "_clock", clock.monotonic)
    make, transfer, ends = agent.make_prepped_xfer, agent.transfer, []

    def stand_still(*write: object) -> object:
        ends.append(clock.monotonic() + LEASE_SECONDS)  # of every lease so far
        clock.ahead += LEASE_SECONDS if len(ends) == 1 else 0.0
        return make(*write)

    def post(handle: object) -> object:
        assert clock.monotonic() < ends[-1], "without a lease"
        return transfer(handle)

    monkeypatch.setattr(agent, "make_prepped_xfer", stand_still)
    monkeypatch.setattr(agent, "transfer", post)
    number = push_all(a, link, [1], [3], grant=1)
    until(lambda: bool(a.of(Pushed) and b.of(Arrived)), a, b)
    assert a.of(Pushed) == [Pushed(number, True)]
    assert len(ends) == 2


def test_a_write_that_does_not_end_is_given_up(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its target is paused, for as long as it likes."""
    a, b = sides
    link, back = link_up(a, b)
    b.transport.grant(back, 1, [3])
    a.transport._clock = clock = Later()  # type: ignore[attr-defined]
    monkeypatch.setattr(a.transport._agent, "check_xfer_state", lambda handle: "PROC")  # type: ignore[attr-defined]
    number = push_all(a, link, [1], [3], grant=1)
    until(lambda: bool(a.transport._writing), a, b)  # type: ignore[attr-defined]
    clock.ahead = LONGEST_TRANSFER_SECONDS - 10.0
    a.poll()
    assert not a.of(Pushed)
    clock.ahead = LONGEST_TRANSFER_SECONDS
    until(lambda: bool(a.of(Pushed) and a.of(Lost) and b.of(Lost)), a, b)
    assert a.of(Pushed) == [Pushed(number, False)]
    assert a.of(Lost) == [Lost(link, "what NIXL writes to it has not arrived within 30 s")]


def test_nobody_is_told_of_a_write_that_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was given up goes on out of blocks that hold something else by then: nothing may say that it has come."""
    monkeypatch.setenv("UCX_TLS", "tcp")  # within one process others may be done at once
    source, target = (np.full(_BYTES, value, dtype=np.uint8) for value in (1, 0))
    a, b = start_agent(), start_agent()
    for agent, array in ((a, source), (b, target)):
        agent.register_memory([(array.ctypes.data, _BYTES, 0, "")], "DRAM")
    name = add_remote(a, encode_metadata(b.get_agent_metadata()))
    here, there = (a.get_xfer_descs([(array.ctypes.data, _BYTES, 0)], "DRAM") for array in (source, target))
    handle = a.initialize_xfer("WRITE", here, there, name, b"done")
    assert a.transfer(handle) == "PROC", "it takes a while"
    end = time.monotonic() + 60.0
    while not target.all():
        assert time.monotonic() < end
        assert not b.get_new_notifs()
    assert not b.get_new_notifs()
    while a.check_xfer_state(handle) == "PROC":
        assert time.monotonic() < end
    while not (notes := b.get_new_notifs()):
        assert time.monotonic() < end
    assert notes == {a.name: [b"done"]}
    a.release_xfer_handle(handle)
