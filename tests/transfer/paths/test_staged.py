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


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("seed", range(4))
def test_a_buffer_holds_one_chunk_at_a_time(direction: Direction, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring that goes round four times and more in one copy."""
    driver = Driver(seed)
    monkeypatch.setattr(staged, "make_lane", driver.make_lane)
    monkeypatch.setattr(staged, "make_stream", driver.make_stream)
    monkeypatch.setattr(packing, "gather_pieces", driver.late(copy_pieces.gather_pieces))
    monkeypatch.setattr(packing, "scatter_pieces", driver.late(copy_pieces.scatter_pieces))
    layout = filled(fp8_with_scales, torch.device("cpu"))
    pool = make_pool(layout)
    pool.tensor.copy_(torch.randint(0, 256, pool.tensor.shape, dtype=torch.uint8))
    path = StagedPath(raw_form(layout), pool, min_staging_memory(raw_form(layout)), driver.copy)  # type: ignore[arg-type]
    blocks = list(range(NUM_DEVICE))
    device_ids, host_ids = ids(*blocks), ids(*((block * 5 + 2) % NUM_HOST for block in blocks))
    regions = range(len(layout.regions))
    views, host = expected_after(layout, pool, direction, regions, device_ids, host_ids)
    path.copy(BlockCopy(direction, regions, device_ids, host_ids, driver.device.compute))
    driver.device.run_until(driver.device.compute.record())
    assert torch.equal(pool.tensor, host)
    assert all(torch.equal(region.view, view) for region, view in zip(layout.regions, views, strict=True))
    pool.close()
