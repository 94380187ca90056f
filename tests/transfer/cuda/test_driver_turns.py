"""A turn as the driver is asked for it: in which order, with what, and where it cannot give any."""

from __future__ import annotations

import ctypes
import random
import struct
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

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
        self.held: list[Any] = []  # stream, word and events
        self.done: list[str] = []
        self.priorities: list[Priority] = []

        def record(event: int, stream: int) -> int:
            assert all(ref() is not None for ref in self.held)
            self.events[event] = self.streams[stream].record()
            return 0

        def wait(stream: int, event: int, flags: int) -> int:
            self.events[event].wait(self.streams[stream])
            return flags

        def write(stream: int, count: int, address: int, flags: int) -> int:
            for number in range(count):  # CUstreamBatchMemOpParams are of 48 bytes, the value's word is the second
                operation, target, _, how = struct.unpack_from("<I4xQQI", ctypes.string_at(address + 48 * number, 48))
                assert (operation, target, how) == (2, self.held[1]().data_ptr(), 0)
                self.streams[stream].put(lambda: self.done.append("write"))
            return flags

        self.cuEventRecord, self.cuStreamWaitEvent, self.cuStreamBatchMemOp_v2 = record, wait, write

    def hold(self, made: Any) -> Any:
        self.held.append(weakref.ref(made))
        return made

    def make_stream(self, device: torch.device, priority: Priority) -> Any:
        self.priorities.append(priority)
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
        monkeypatch.setattr(turns, "device_tensor", lambda *_: self.hold(torch.zeros(1, dtype=torch.int64)))
        monkeypatch.setattr(torch.cuda, "Event", self.make_event)


@pytest.mark.parametrize("seed", range(4))
def test_a_turn_is_behind_what_the_stream_held_and_in_front_of_what_comes(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(seed)
    driver.take_over(monkeypatch)
    made = DriverTurns(torch.device("cuda", 0), Direction.LOAD)
    driver.device.run_until(driver.streams[8].record())
    driver.done.clear()
    for number in range(3):
        driver.device.compute.put(lambda n=number: driver.done.append(f"copy {n}"))  # type: ignore[misc]
        made.give(7)
    driver.device.compute.put(lambda: driver.done.append("copy 3"))
    driver.device.run_until(driver.device.compute.record())
    turn = ["write"] * 4
    assert driver.done == ["copy 0", *turn, "copy 1", *turn, "copy 2", *turn, "copy 3"]


def test_streams_of_loads_share_no_queue_with_those_of_saves_and_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which have a priority in common: engines use 0 and -1."""
    given = {Direction.LOAD: {Priority.LOAD, Priority.PACK_LOAD}, Direction.SAVE: {Priority.SAVE, Priority.PACK_SAVE}}
    for direction, priorities in given.items():
        driver = Driver(0)
        driver.take_over(monkeypatch)
        DriverTurns(torch.device("cuda", 0), direction)
        priorities.update(driver.priorities)
    assert max(given[Direction.LOAD]) < min(0, -1, *given[Direction.SAVE])


@pytest.mark.parametrize("call", ["cuEventRecord", "cuStreamWaitEvent", "cuStreamBatchMemOp_v2"])
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


def test_a_driver_that_cannot_gives_none_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(turns, "quick_libcuda", lambda: object())
    made = make_turn_taking(torch.device("cuda", 0))
    assert all(isinstance(each._turns, NoTurns) for each in made.values())
    (record,) = caplog.records
    assert "cuStreamBatchMemOp_v2" in record.getMessage()


def test_copies_that_threads_enqueue_at_once_have_turns_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the two directions: an event that another thread records meanwhile is another position."""
    monkeypatch.setattr(turns, "DriverTurns", lambda _, direction: Made(direction=direction))
    made = {pace: each._turns for pace, each in make_turn_taking(torch.device("cuda", 0)).items()}
    assert len({id(each) for each in made.values()}) == len(TURN_BYTES)
    assert all(each.direction is direction for (direction, _), each in made.items())
