"""Turns: gaps between our copies in which the engine's copies of the same direction run.

A copy engine continues with one stream's copies as long as there are any, while all other streams' copies wait. An LLM
engine makes small copies before each step, of the step's inputs, and after it, of the sampled tokens: beside 2.25 GiB
by DMA one of them was 36 to 42 ms late, as long as the whole copy took (H200, driver 580, 2026-11-26). The copy engine
switches to another stream when ours has to wait for some 10 us; an event of another stream completes too soon for that.
So after every `TURN_BYTES` our stream waits for another stream, which copies a page in the same direction: that takes
neither multiprocessors nor the host. It takes none of the driver's queues of kernels either, through which words are
written and what is shorter than a page is copied to the device. All streams of a process share those, 8 unless
`CUDA_DEVICE_MAX_CONNECTIONS` says otherwise, and one whose kernels wait holds up what comes behind it in its queue: as
many of an engine's streams at once, and a turn that wrote words waited for them (H200, driver 580, 2026-11-28).
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import TransferError
from ...types import Direction
from .allocations import device_tensor, index_of, page_locked_int64
from .copier import driver_copier
from .driver import Copier, check, on_device, quick_libcuda
from .streams import Priority, make_stream

Pace = tuple[Direction, bool]
"""Of a copy: its direction, and whether a step waits for it."""
TURN_BYTES: dict[Pace, int] = {
    (Direction.LOAD, False): 16 << 20,
    (Direction.LOAD, True): 64 << 20,
    (Direction.SAVE, False): 32 << 20,
}
"""Bytes between two turns: 0.3 ms of the link for a background load, as each step waits for its inputs; 1.2 ms for a
load that the step waits for anyway, after its inputs; and 0.6 ms for saves, as nothing on the device waits for sampled
tokens. A turn takes some 6 us of the link. The copies between two turns are one call of the driver, whose first copy
begins when its last was submitted: 2.25 GiB in segments of 1 MiB move at 0.99 of the link in calls of 42 MiB, and at
0.975 in two calls (H200, 2026-11-23)."""
_PRIORITIES = {Direction.LOAD: Priority.LOAD, Direction.SAVE: Priority.SAVE}
_PAGE_BYTES = 4096

Int64s = NDArray[np.int64]
logger = logging.getLogger("kv_connector.transfer")


class Turns(Protocol):
    """Gives turns to one stream's copies. Called from one thread at a time."""

    def give(self, stream: int | None) -> None:
        """Enqueue a turn on this stream, by the driver's handle: later work of the stream runs after it. Raises
        TransferError."""


class NoTurns:
    """For devices without a copy engine, or whose driver refuses what turns need."""

    def give(self, stream: int | None) -> None:
        """Do nothing."""


class DriverTurns:
    """See `Turns`."""

    def __init__(self, device: torch.device, direction: Direction) -> None:
        """`direction`: of the copies. Raises TransferError where the driver refuses a page of memory, or a turn."""
        driver, pointer = quick_libcuda(), ctypes.c_void_p
        self._record: Any = driver.cuEventRecord
        self._wait: Any = driver.cuStreamWaitEvent
        self._record.argtypes = [pointer, pointer]
        self._wait.argtypes = [pointer, pointer, ctypes.c_uint]
        self._beside: Any = make_stream(device, _PRIORITIES[direction])
        words = _PAGE_BYTES // 8
        self._here, self._there = page_locked_int64(words, device), device_tensor((words,), torch.int64, device)
        here, there = self._here.ctypes.data, self._there.data_ptr()
        self._addresses = (there, here) if direction is Direction.LOAD else (here, there)
        self._copy: Any = driver.cuMemcpyHtoDAsync_v2 if direction is Direction.LOAD else driver.cuMemcpyDtoHAsync_v2
        self._copy.argtypes = [pointer, pointer, ctypes.c_size_t, pointer]
        self._events: list[Any] = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        for event in self._events:
            event.record(self._beside)  # which makes it
        self._handles = tuple(event.cuda_event for event in self._events)
        with on_device(index_of(device)):
            self.give(self._beside.cuda_stream)

    def give(self, stream: int | None) -> None:
        """See `Turns.give`."""
        (before, after), beside = self._handles, self._beside.cuda_stream
        check(self._record(before, stream), "cuEventRecord")
        check(self._wait(beside, before, 0), "cuStreamWaitEvent")
        check(self._copy(*self._addresses, _PAGE_BYTES, beside), "cuMemcpyAsync")
        check(self._record(after, beside), "cuEventRecord")
        check(self._wait(stream, after, 0), "cuStreamWaitEvent")


def turn_taking_copiers(turn_taking: Mapping[Pace, TurnTaking], copier: Copier | None) -> dict[Pace, Copier]:
    """Of each pace, by the driver or, in tests, by `copier`."""
    copier = copier if copier is not None else driver_copier()
    return {pace: TurnTakingCopier(copier, each) for pace, each in turn_taking.items()}


def make_turn_taking(device: torch.device) -> dict[Pace, TurnTaking]:
    """For copies to or from `device`."""
    made: list[Turns] = [NoTurns() for _ in TURN_BYTES]
    if device.type == "cuda":
        try:
            made = [DriverTurns(device, direction) for direction, _ in TURN_BYTES]
        except TransferError as error:
            logger.warning("small copies of the engine wait until long ones of ours have ended: %s", error)
    return {
        pace: TurnTaking(turns, turn_bytes) for (pace, turn_bytes), turns in zip(TURN_BYTES.items(), made, strict=True)
    }


class TurnTaking:
    """A turn behind every `turn_bytes` of the copies of a stream. One thread at a time calls."""

    def __init__(self, turns: Turns, turn_bytes: int) -> None:
        self.turn_bytes = turn_bytes
        self._turns = turns
        self._since = 0  # bytes, since the last one

    def passes(self, num_bytes: int) -> bool:
        """Whether so many bytes may be copied without a turn; then they count as copied."""
        if self._since + num_bytes >= self.turn_bytes:
            return False
        self._since += num_bytes
        return True

    def stretches(self, sizes: Int64s, stream: int | None) -> Iterator[tuple[int, int]]:
        """Consecutive ranges of copies of these sizes, at least one; each is to be enqueued before the next is asked
        for."""
        ends = self._since + np.cumsum(sizes)
        last = int(ends[-1])
        self._since = last % self.turn_bytes
        turns = range(self.turn_bytes, last + 1, self.turn_bytes)
        first = 0
        for stop in dict.fromkeys(int(ends.searchsorted(turn)) + 1 for turn in turns):
            yield first, stop
            self._turns.give(stream)
            first = stop
        if first < len(sizes):
            yield first, len(sizes)


class TurnTakingCopier:
    """A copier that takes turns, and cuts what is longer than the way from one to the next."""

    def __init__(self, copier: Copier, turn_taking: TurnTaking) -> None:
        self._copier = copier
        self._turn_taking = turn_taking

    def __call__(self, targets: int, sources: int, sizes: int, count: int, pinned: bool, stream: int | None) -> None:
        """See `driver.Copier`."""
        lengths = _array(sizes, count)
        if self._turn_taking.passes(int(lengths.sum())):  # as most calls do: they take a thread's time, the model's too
            self._copier(targets, sources, sizes, count, pinned, stream)
            return
        if lengths.max() > self._turn_taking.turn_bytes:
            to, by, lengths = cut(
                _array(targets, count), _array(sources, count), lengths, most=self._turn_taking.turn_bytes
            )
            targets, sources, sizes = to.ctypes.data, by.ctypes.data, lengths.ctypes.data
        for first, stop in self._turn_taking.stretches(lengths, stream):
            skipped = 8 * first
            self._copier(targets + skipped, sources + skipped, sizes + skipped, stop - first, pinned, stream)


def _array(address: int, count: int) -> Int64s:
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address))


def cut(targets: Int64s, sources: Int64s, sizes: Int64s, *, most: int) -> tuple[Int64s, Int64s, Int64s]:
    """The same copies, of at most `most` bytes each."""
    counts = -(-sizes // most)
    firsts = np.cumsum(counts) - counts
    skipped = most * (np.arange(counts.sum()) - np.repeat(firsts, counts))
    lengths = np.minimum(np.repeat(sizes, counts) - skipped, most)
    return np.repeat(targets, counts) + skipped, np.repeat(sources, counts) + skipped, lengths
