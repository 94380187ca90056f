"""The order that the staged path makes between its streams: kernels and copies run late here, and in any order that it
leaves open.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kv_connector.triton_kernels import copy_pieces

from kv_connector.errors import TransferError
from kv_connector.transfer.cuda.turns import TURN_BYTES, TurnTaking
from kv_connector.transfer.memory.host_form import raw_form
from kv_connector.transfer.paths import packing, staged
from kv_connector.transfer.paths.base import BlockCopy
from kv_connector.transfer.paths.staged import StagedPath, min_staging_memory
from kv_connector.types import Direction
from tests.copies import NUM_DEVICE, NUM_HOST, expected_after, filled, fp8_with_scales, ids, make_pool
from tests.simulation.clock import VirtualTime
from tests.simulation.device import Device, SimulatedLane, Stream


class Driver:
    """Streams of a simulated device, in place of CUDA's; `handle` names one to the copier."""

    def __init__(self, seed: int) -> None:
        seconds = dict.fromkeys(("compute", "copies", "kernels"), 1e-3)
        self.device = Device(VirtualTime(seed), random.Random(seed), "gpu", seconds)
        self.by_handle: list[Stream] = []

    def make_lane(self, *_: object, **__: object) -> SimulatedLane:
        lane = SimulatedLane(self.device, self.device.stream("copies"))
        lane.handle = len(self.by_handle)
        self.by_handle.append(lane.stream)
        return lane

    def make_stream(self, *_: object) -> Stream:
        return self.device.stream("kernels")

    def late(self, kernel: Callable[..., None]) -> Callable[..., None]:
        """The kernel, run when its stream comes to it."""

        def launch(*args: Any, stream: Stream, **named: Any) -> None:
            stream.put(lambda: kernel(*args, **named))

        return launch

    def copy(self, targets: int, sources: int, sizes: int, count: int, pinned: bool, handle: int) -> None:
        columns = ((ctypes.c_int64 * count).from_address(address)[:] for address in (targets, sources, sizes))
        for target, source, size in zip(*columns, strict=True):
            self.by_handle[handle].put(lambda t=target, s=source, n=size: ctypes.memmove(t, s, n))  # type: ignore[misc]


class LateTurns:
    """The copies' stream waits for another one, as on a GPU; the turn of number `fails_on` is refused."""

    def __init__(self, driver: Driver, fails_on: int) -> None:
        self.driver = driver
        self.fails_on = fails_on
        self.beside = driver.device.stream("kernels")
        self.count = 0

    def give(self, handle: int) -> None:
        self.count += 1
        if self.count == self.fails_on:
            raise TransferError("fault injected")
        ours = self.driver.by_handle[handle]
        ours.record().wait(self.beside)
        self.beside.put(lambda: None)
        self.beside.record().wait(ours)


class Copies:
    """Of all device blocks, through a ring that goes round four times and more in one copy, with a turn behind each
    24 bytes, less than a piece."""

    def __init__(self, direction: Direction, seed: int, fails_on: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver = driver = Driver(seed)
        self.turns = turns = LateTurns(driver, fails_on)
        monkeypatch.setattr(staged, "make_lane", driver.make_lane)
        monkeypatch.setattr(staged, "make_stream", driver.make_stream)
        monkeypatch.setattr(staged, "make_turn_taking", lambda _: {pace: TurnTaking(turns, 24) for pace in TURN_BYTES})  # type: ignore[arg-type]
        monkeypatch.setattr(packing, "gather_pieces", driver.late(copy_pieces.gather_pieces))
        monkeypatch.setattr(packing, "scatter_pieces", driver.late(copy_pieces.scatter_pieces))
        self.layout = filled(fp8_with_scales, torch.device("cpu"))
        self.pool = make_pool(self.layout)
        self.pool.tensor.copy_(torch.randint(0, 256, self.pool.tensor.shape, dtype=torch.uint8))
        form = raw_form(self.layout)
        self.path = StagedPath(form, self.pool, min_staging_memory(form), driver.copy)  # type: ignore[arg-type]
        blocks = range(NUM_DEVICE)
        pairs = ids(*blocks), ids(*((block * 5 + 2) % NUM_HOST for block in blocks))
        self.copy = BlockCopy(direction, range(len(self.layout.regions)), *pairs, driver.device.compute)
        self.wanted = expected_after(self.layout, self.pool, direction, self.copy.regions, *pairs)

    def check(self) -> None:
        """What the stream of the copy does from now on finds every byte in its place."""
        self.driver.device.run_until(self.driver.device.compute.record())
        views, host = self.wanted
        assert torch.equal(self.pool.tensor, host)
        assert all(torch.equal(region.view, view) for region, view in zip(self.layout.regions, views, strict=True))
        self.pool.close()


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("seed", range(4))
def test_a_buffer_holds_one_chunk_at_a_time(direction: Direction, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(direction, seed, 0, monkeypatch)
    copies.path.copy(copies.copy)
    assert copies.turns.count == NUM_DEVICE * 144 // 24
    copies.check()


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(("fails_on", "is_waited"), [(1, False), (7, True), (30, False)])
def test_a_turn_that_is_refused_fails_the_copy_which_may_be_tried_again(
    direction: Direction, fails_on: int, is_waited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever copies these blocks next does so behind all that was enqueued."""
    copies = Copies(direction, fails_on, fails_on, monkeypatch)
    with pytest.raises(TransferError):
        copies.path.copy(copies.copy)
    if is_waited:
        copies.driver.device.run_until(copies.driver.device.compute.record())
        assert copies.driver.device.is_idle
    copies.path.copy(copies.copy)
    copies.check()
