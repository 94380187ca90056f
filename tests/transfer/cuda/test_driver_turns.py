"""A turn as the driver is asked for it: in which order, with what, and where it cannot give any."""

from __future__ import annotations

import random
import weakref
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kv_connector.transfer.cuda import turns
from kv_connector.transfer.cuda.streams import Priority
from kv_connector.transfer.cuda.turns import TURN_BYTES, DriverTurns, NoTurns, make_turn_taking
from kv_connector.types import Direction
from tests.simulation.clock import VirtualTime
from tests.simulation.device import Device, SimulatedEvent


class Made(SimpleNamespace):
    """Something of torch's, that weak references may name."""


class Driver:
    """The calls that a turn is made of, on streams of a simulated device; `done` is what has run there, in order. What
    the driver does not hold for its callers, they have to."""

    def __init__(self, seed: int) -> None:
        self.device = Device(VirtualTime(seed), random.Random(seed), "gpu", {"compute": 1e-3, "beside": 1e-3})
        self.streams = {7: self.device.compute, 8: self.device.stream("beside")}
        self.events: dict[int, SimulatedEvent] = {}
        self.held: list[Any] = []  # stream, pages and events
        self.done: list[str] = []

        def record(event: int, stream: int) -> int:
            assert all(ref() is not None for ref in self.held)
            self.events[event] = self.streams[stream].record()
            return 0

        def wait(stream: int, event: int, flags: int) -> int:
            self.events[event].wait(self.streams[stream])
            return flags

        def copy(way: Direction, target: int, source: int, size: int, stream: int) -> int:
            here, there = (made.ctypes.data if isinstance(made, np.ndarray) else made.data_ptr() for made in self.pages)
            assert (target, source) == ((there, here) if way is Direction.LOAD else (here, there))
            assert size == min(made.nbytes for made in self.pages) == 4096  # less may go through a queue of kernels
            self.streams[stream].put(lambda: self.done.append(way.name))
            return 0

        self.cuEventRecord, self.cuStreamWaitEvent = record, wait
        self.cuMemcpyHtoDAsync_v2 = partial(copy, Direction.LOAD)
        self.cuMemcpyDtoHAsync_v2 = partial(copy, Direction.SAVE)

    @property
    def pages(self) -> list[Any]:
        """On the host and on the device."""
        return [made for ref in self.held if (made := ref()) is not None and not isinstance(made, Made)]

    def hold(self, made: Any) -> Any:
        self.held.append(weakref.ref(made))
        return made

    def make_stream(self, device: torch.device, priority: Priority) -> Any:
        return self.hold(Made(cuda_stream=8))

    def make_event(self) -> Any:
        handle = len(self.events) + 1
        self.events[handle] = SimulatedEvent(self.device)
        return self.hold(Made(cuda_event=handle, record=lambda _: None))

    def take_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From CUDA's."""
        monkeypatch.setattr(turns, "quick_libcuda", lambda: self)
        monkeypatch.setattr(turns, "on_device", lambda _: nullcontext())
        monkeypatch.setattr(turns, "make_stream", self.make_stream)
        monkeypatch.setattr(turns, "page_locked_int64", lambda count, _: self.hold(np.zeros(count, np.int64)))
        monkeypatch.setattr(turns, "device_tensor", lambda shape, dtype, _: self.hold(torch.zeros(shape, dtype=dtype)))
        monkeypatch.setattr(torch.cuda, "Event", self.make_event)


@pytest.mark.parametrize("way", Direction)
@pytest.mark.parametrize("seed", range(4))
def test_a_turn_is_behind_what_the_stream_held_and_in_front_of_what_comes(
    seed: int, way: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is a copy in the direction of the stream's own, which others of that direction come in between of."""
    driver = Driver(seed)
    driver.take_over(monkeypatch)
    made = DriverTurns(torch.device("cuda", 0), way)
    driver.device.run_until(driver.streams[8].record())
    driver.done.clear()
    for number in range(3):
        driver.device.compute.put(lambda n=number: driver.done.append(f"copy {n}"))  # type: ignore[misc]
        made.give(7)
    driver.device.compute.put(lambda: driver.done.append("copy 3"))
    driver.device.run_until(driver.device.compute.record())
    assert driver.done == ["copy 0", way.name, "copy 1", way.name, "copy 2", way.name, "copy 3"]


@pytest.mark.parametrize("call", ["cuEventRecord", "cuStreamWaitEvent", "cuMemcpyHtoDAsync_v2"])
def test_a_driver_that_refuses_a_turn_gives_none(
    call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not supported, as on a part of a GPU or below a hypervisor, is found out before the first copy."""
    driver = Driver(0)
    setattr(driver, call, lambda *_: 801)
    driver.take_over(monkeypatch)
    made = make_turn_taking(torch.device("cuda", 0))
    assert all(isinstance(each._turns, NoTurns) for each in made.values())
    assert len(caplog.records) == 1


def test_copies_that_threads_enqueue_at_once_have_turns_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the two directions: an event that another thread records meanwhile is another position."""
    monkeypatch.setattr(turns, "DriverTurns", lambda _, direction: Made(direction=direction))
    made = {pace: each._turns for pace, each in make_turn_taking(torch.device("cuda", 0)).items()}
    assert len({id(each) for each in made.values()}) == len(TURN_BYTES)
    assert all(each.direction is direction for (direction, _), each in made.items())
