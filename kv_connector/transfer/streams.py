"""A lane is one direction's CUDA stream with its events; on the CPU it is a lane where everything is already done.

Streams are named where they are known: asking torch for the current one takes some 10 us, eight times a chunk. Two
threads may use a lane: what is current belongs to each of them, and events go around among both.
"""

from __future__ import annotations

import ctypes
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from ..errors import TransferError

_CAPTURE_MODE_RELAXED = 2


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


class Lane(Protocol):
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
        """What the current stream holds now, to be given to `follow` once; None on the CPU."""

    def follow(self, position: Event | None) -> None:
        """What the lane's stream does from now on comes behind what `position` has returned."""

    def mark(self, stream: Any = None) -> Event:
        """An event at the position of `stream`, the current one by default."""

    def recycle(self, events: list[Event]) -> None:
        """Take events back for reuse; their waits have been enqueued: streams keep the position that they had then."""


def allow_beside_captures() -> None:
    """What this thread does must not spoil a CUDA graph that another one captures at the time.

    Engines capture theirs in the mode that forbids many calls to every thread that has not opted out (see
    `cudaThreadExchangeStreamCaptureMode` in CUDA's manual). Raises TransferError.
    """
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
    code = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    if code != 0:
        raise TransferError(f"cuThreadExchangeStreamCaptureMode failed with CUDA error {code}")


def make_lane(device: torch.device, priority: int, timing: bool) -> Lane:
    """A lane for copies on `device`. A lower `priority` number runs first; `timing` makes events that can be timed."""
    return CudaLane(device, priority, timing) if device.type == "cuda" else HostLane()


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

    def follow(self, position: Event | None) -> None:
        """See `Lane.follow`."""

    def mark(self, stream: None = None) -> Event:
        """See `Lane.mark`."""
        return HostEvent()

    def recycle(self, events: list[Event]) -> None:
        """Nothing is reused."""


class CudaLane:
    """A CUDA stream and a pool of events."""

    is_synchronous = False

    def __init__(self, device: torch.device, priority: int, timing: bool) -> None:
        self.stream: Any = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
        self.handle: int = self.stream.cuda_stream
        self._device = device
        self._timing = timing
        self._free: list[Event] = []

    def current(self) -> Any:
        """See `Lane.current`."""
        return torch.cuda.current_stream(self._device)

    def on_device(self) -> AbstractContextManager[Any]:
        """See `Lane.on_device`."""
        guard: AbstractContextManager[Any] = torch.cuda.device(self._device)
        return guard

    def position(self) -> Event | None:
        """See `Lane.position`."""
        return self.mark()

    def follow(self, position: Event | None) -> None:
        """See `Lane.follow`."""
        if position is not None:
            position.wait(self.stream)
            self._free.append(position)

    def mark(self, stream: Any = None) -> Event:
        """See `Lane.mark`."""
        event: Any
        try:
            event = self._free.pop()  # asking first whether there is one would let another thread take it
        except IndexError:
            event = torch.cuda.Event(enable_timing=self._timing)  # type: ignore[no-untyped-call]
        event.record(stream if stream is not None else torch.cuda.current_stream(self._device))
        marked: Event = event
        return marked

    def recycle(self, events: list[Event]) -> None:
        """See `Lane.recycle`."""
        self._free.extend(events)
