"""A lane is one direction's CUDA stream with its events; on the CPU it is a lane where everything is already done.

Streams are named where they are known: asking torch for the current one takes some 10 us, eight times a chunk. Several
threads may use a lane: what is current belongs to each of them, and events of `mark` go around among them all. Those
that a thread waits for on the host (`Lane.position`, `Lane.end`) do not: it would wait for what somebody else has
recorded meanwhile. It waits for these asleep, without the GIL; for other events CUDA keeps a core busy, for as
long as copies run.
"""

from __future__ import annotations

import ctypes
import logging
import time
import weakref
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import Any, Protocol

import torch

from ...errors import TransferError
from .allocations import index_of
from .driver import check, on_device


class Priority(IntEnum):
    """Of every stream that copies use: a lower number goes first where multiprocessors are short. The model's is 0.

    A packing kernel is short, and the link waits for it; loads go before saves. GPUs since 2018 have priorities down to
    -5; the driver takes the nearest.
    """

    PACK_LOAD = -3
    LOAD = -2
    PACK_SAVE = -1
    SAVE = 0
    PEER = 0
    MEASURE = 0


_NON_BLOCKING = 1
logger = logging.getLogger("kv_connector.transfer")


class Event(Protocol):
    """A point in a stream's work, with the names of torch.cuda.Event."""

    def query(self) -> bool:
        """Whether the work in front of it has completed; never blocks."""

    def wait(self, stream: Any = None) -> None:
        """Make `stream`, the current one by default, wait for it; the host goes on."""

    def synchronize(self) -> None:
        """Block the host until the work in front of it has completed."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from here to `end_event`; both complete."""


class Events(Protocol):
    """Events for positions in streams, which go around."""

    def mark(self, stream: Any = None) -> Event:
        """An event at the position of `stream`, the current one by default."""

    def recycle(self, events: list[Event]) -> None:
        """Take events of `mark` back for reuse; their waits have been enqueued: streams keep the position that they had
        then. No thread may wait for one on the host, now or later."""


class Lane(Events, Protocol):
    """Where one direction's copies run."""

    is_synchronous: bool
    """Whether work is done as soon as it is enqueued."""
    stream: Any
    """The lane's own torch stream; None on the CPU."""
    handle: int
    """The driver's handle of `stream`; 0 on the CPU."""

    def current(self) -> Any:
        """The stream that is current on the lane's device; None on the CPU."""

    def on_device(self) -> AbstractContextManager[Any]:
        """Context in which the lane's device is the current one: the driver's calls want the context of their stream.
        The current stream stays what it is on each device."""

    def position(self) -> Event | None:
        """Behind what the current stream holds now: an event that is never recorded again, so that threads may wait for
        it on the host, at any time. None on the CPU."""

    def end(self) -> Event:
        """As `position`, behind what the lane's stream holds now."""

    def wait_idle(self) -> None:
        """Block the host until the lane's stream has done all that it holds; spoils no capture. Raises TransferError
        where the device is lost."""


def make_lane(device: torch.device, priority: Priority, timing: bool) -> Lane:
    """A lane for copies on `device`; `timing` makes events that can be timed."""
    return CudaLane(device, priority, timing) if device.type == "cuda" else HostLane()


def make_stream(device: torch.device, priority: Priority) -> Any:
    """A stream that nobody else has, as torch knows them; None on the CPU. Raises TransferError.

    By the driver: torch hands out the same 32 of a priority in turn, to everybody in the process, so that ours would
    come to be the engine's, and be recorded into the CUDA graphs that it captures. It goes with the last who holds it;
    what it holds then still runs.
    """
    if device.type == "cpu":
        return None
    owner = _DriverStream(index_of(device), priority)
    stream: Any = torch.cuda.ExternalStream(  # type: ignore[no-untyped-call]
        owner.handle.value, device=torch.device("cuda", owner.device)
    )
    stream.owner = owner
    return stream


def make_events(device: torch.device) -> Events:
    """Events for streams of `device`, that cannot be timed."""
    return CudaEvents(device, timing=False) if device.type == "cuda" else HostLane()


class HostEvent:
    """The moment of its making."""

    __slots__ = ("_seconds",)

    def __init__(self) -> None:
        self._seconds = time.perf_counter()

    def query(self) -> bool:
        """Always complete."""
        return True

    def wait(self, stream: None = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Milliseconds from here to `end_event`."""
        return (end_event._seconds - self._seconds) * 1e3


class HostLane:
    """Copies on the calling thread."""

    is_synchronous = True
    stream = None
    handle = 0

    def current(self) -> None:
        """See `Lane.current`."""

    def on_device(self) -> AbstractContextManager[Any]:
        """See `Lane.on_device`."""
        return nullcontext()

    def position(self) -> Event | None:
        """See `Lane.position`."""
        return None

    def end(self) -> Event:
        """See `Lane.end`."""
        return HostEvent()

    def wait_idle(self) -> None:
        """Nothing to wait for."""

    def mark(self, stream: None = None) -> Event:
        """See `Lane.mark`."""
        return HostEvent()

    def recycle(self, events: list[Event]) -> None:
        """Nothing is reused."""


class CudaEvents:
    """See `Events`."""

    def __init__(self, device: torch.device, timing: bool) -> None:
        self._device = device
        self._index = index_of(device)
        self._timing = timing
        self._free: list[Event] = []

    def mark(self, stream: Any = None) -> Event:
        """See `Events.mark`."""
        event: Any
        try:
            event = self._free.pop()  # asking first whether there is one would let another thread take it
        except IndexError:
            event = torch.cuda.Event(enable_timing=self._timing)  # type: ignore[no-untyped-call]
        event.record(stream if stream is not None else self.current())
        marked: Event = event
        return marked

    def recycle(self, events: list[Event]) -> None:
        """See `Events.recycle`."""
        self._free.extend(events)

    def current(self) -> Any:
        """See `Lane.current`. By the device's index: torch takes longer to find that than the stream."""
        return torch.cuda.current_stream(self._index)


class CudaLane(CudaEvents):
    """A CUDA stream of its own and a pool of events."""

    is_synchronous = False

    def __init__(self, device: torch.device, priority: Priority, timing: bool) -> None:
        super().__init__(device, timing)
        self.stream: Any = make_stream(device, priority)
        self.handle: int = self.stream.cuda_stream

    def on_device(self) -> AbstractContextManager[Any]:
        """See `Lane.on_device`."""
        guard: AbstractContextManager[Any] = torch.cuda.device(self._device)
        return guard

    def position(self) -> Event | None:
        """See `Lane.position`."""
        return self._mark_once(self.current())

    def end(self) -> Event:
        """See `Lane.end`."""
        return self._mark_once(self.stream)

    def wait_idle(self) -> None:
        """See `Lane.wait_idle`."""
        with on_device(self._index) as driver:
            check(driver.cuStreamSynchronize(ctypes.c_void_p(self.handle)), "cuStreamSynchronize")

    def _mark_once(self, stream: Any) -> Event:
        event: Any = torch.cuda.Event(enable_timing=self._timing, blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        marked: Event = event
        return marked


class _DriverStream:
    """Is destroyed when nobody holds it any more, as the torch stream of its handle does.

    A finalizer of that one itself would never run: torch 2.9 to 2.12 free a stream with weak references to it in place,
    and a later collection reads them (pytorch/pytorch#183403).
    """

    def __init__(self, device: int, priority: Priority) -> None:
        self.device = device
        self.handle = ctypes.c_void_p()
        with on_device(device) as driver:
            code = driver.cuStreamCreateWithPriority(
                ctypes.byref(self.handle), ctypes.c_uint(_NON_BLOCKING), ctypes.c_int(priority)
            )
            check(code, "cuStreamCreateWithPriority")
        weakref.finalize(self, _destroy, device, self.handle).atexit = False


def _destroy(device: int, handle: ctypes.c_void_p) -> None:
    try:
        with on_device(device) as driver:
            check(driver.cuStreamDestroy_v2(handle), "cuStreamDestroy")
    except TransferError as error:  # a finalizer's top: the device is lost, and its streams with it
        logger.warning("a CUDA stream cannot be destroyed: %s", error)
