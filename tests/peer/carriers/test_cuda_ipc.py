"""Pushes into another process's pool that is mapped here: it stays mapped as long as anything may write to it.

The driver is a stand-in that remembers what is mapped: two processes with a GPU run in `test_links.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kv_connector.errors import TransferError
from kv_connector.peer.carriers.cuda_ipc import CudaIpcTransport
from kv_connector.peer.carriers.over_channel import Endpoint
from kv_connector.peer.carriers.staged.slots import DeviceSlots
from tests.engines import ManualEvent, ManualLane
from tests.peer.peers import SECRET, Connected, Lost, Pool, Pushed, Side, ids, info_of, link_up, push_all, until


class Mappings:
    """What stands for a driver; `mapped` are the addresses that it has opened and not closed."""

    def __init__(self, device: int) -> None:
        self.mapped: list[int] = []

    def use(self) -> None:
        """Nothing is current here."""

    def export(self, address: int) -> tuple[str, int]:
        return f"{address:0128x}", 0

    def open(self, handle: str) -> int:
        self.mapped.append(int(handle, 16))
        return self.mapped[-1]

    def size_of(self, address: int) -> int:
        return 1 << 40

    def close(self, address: int) -> None:
        self.mapped.remove(address)


class FailingWriter:
    """A part of the write is on its way when it fails."""

    def write(self, *_: object) -> None:
        raise TransferError("the third batch fails")


@pytest.fixture
def pair() -> Any:
    """Two sides; copies of the first one fail half-way, and end when the test marks them done."""
    lane = ManualLane()
    sides = []
    for seed in range(2):
        pool = Pool(10, seed)
        pool.pool = replace(pool.pool, device=0, writer=lambda _: FailingWriter(), mark=lambda: lane.mark(lane.stream))
        info = info_of(pool, transport="cuda_ipc")
        endpoint = Endpoint(info, "127.0.0.1", 0, SECRET, 5.0)
        transport = CudaIpcTransport(pool.pool, endpoint, driver=Mappings)  # type: ignore[arg-type]
        sides.append(Side(transport))
    yield *sides, lane.marks
    for side in sides:
        side.transport.close()


def test_a_write_that_fails_half_way_ends_before_the_pool_is_unmapped(
    pair: tuple[Side, Side, list[ManualEvent]],
) -> None:
    a, b, marks = pair
    link, back = link_up(a, b)
    mapped = a.transport._driver.mapped  # type: ignore[attr-defined]
    assert len(mapped) == 3
    b.transport.grant(back, 7, [1, 2])
    number = push_all(a, link, [3, 4], [1, 2], grant=7)
    until(lambda: a.of(Lost) and b.of(Lost), a, b)
    assert "the third batch fails" in a.of(Lost)[0].reason
    assert len(mapped) == 3, "what was enqueued may still write there"
    assert not a.of(Pushed)
    marks[-1].done = True
    until(lambda: a.of(Pushed), a, b)
    assert a.of(Pushed) == [Pushed(number, False)]
    assert not mapped
    assert link_up(a, b)
    assert len(a.of(Connected)) == 2


def test_a_write_whose_lease_is_over_by_the_time_it_is_made_waits_for_another(
    pair: tuple[Side, Side, list[ManualEvent]],
) -> None:
    a, b, marks = pair
    link, back = link_up(a, b)
    b.transport.grant(back, 7, [1, 2])
    answers: list[bool] = []

    def write(sources: object, targets: object, regions: object, may_write: Callable[[], bool]) -> bool:
        if not answers:
            a.transport._leases._links[link].until = -math.inf  # type: ignore[attr-defined]
        answers.append(may_write())
        return answers[-1]

    a.transport._remotes[link].writer = SimpleNamespace(write=write)  # type: ignore[attr-defined]
    number = push_all(a, link, [3, 4], [1, 2], grant=7)
    until(lambda: bool(marks), a, b)
    assert answers == [False, True]
    marks[-1].done = True
    until(lambda: bool(a.of(Pushed)), a, b)
    assert a.of(Pushed) == [Pushed(number, True)]
    assert len(marks) == 1


@pytest.mark.parametrize("packs", [True, False])
def test_a_slot_that_is_half_copied_is_not_let_go(packs: bool) -> None:
    """Whoever is told that it failed gives its blocks, and the memory of the slot, to somebody else."""
    left = [3]

    class Arriving:
        def query(self) -> bool:
            left[0] -= 1
            return left[0] == 0

    def fail(*_: object) -> None:
        raise TransferError("the second batch fails")

    pool = replace(Pool(10).pool, device=0, copy=fail, mark=Arriving)
    slots = DeviceSlots(pool)
    ring: Any = SimpleNamespace(address=1 << 20, slot_bytes=1 << 16)
    with pytest.raises(TransferError, match="second batch"):
        (slots.pack if packs else slots.unpack)(pool, ids([1, 2]), range(3), ring, 0)
    assert left == [0]


def test_a_push_ends_also_where_the_device_is_lost(
    pair: tuple[Side, Side, list[ManualEvent]], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = pair
    link, back = link_up(a, b)

    def lost() -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(a.transport, "_pool", replace(a.transport._pool, mark=lost))  # type: ignore[attr-defined]
    b.transport.grant(back, 7, [1])
    number = push_all(a, link, [3], [1], grant=7)
    until(lambda: a.of(Lost), a, b)
    assert a.of(Pushed) == [Pushed(number, False)]
    assert not a.transport._driver.mapped  # type: ignore[attr-defined]
