"""A lane is one direction's CUDA stream with its events; on the CPU it is a lane where everything is already done.

Streams are named where they are known: asking torch for the current one takes some 10 us, eight times a chunk.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


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

    def running(self, after_current: bool = True) -> Any:
        """Context in which the lane's stream is current, after what the stream that is current now holds if wanted."""

    def mark(self, stream: Any = None) -> Event:
        """An event at the position of `stream`, the current one by default."""

    def recycle(self, events: list[Event]) -> None:
        """Take events back for reuse; their waits have been enqueued."""


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

    @contextmanager
    def running(self, after_current: bool = True) -> Iterator[None]:
        """See `Lane.running`."""
        yield

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

    @contextmanager
    def running(self, after_current: bool = True) -> Iterator[None]:
        """See `Lane.running`."""
        if after_current:
            start = self.mark()
            start.wait(self.stream)
            # The stream keeps the recorded position, so the event may be recorded anew at once.
            self._free.append(start)
        with torch.cuda.stream(self.stream):
            yield

    def mark(self, stream: Any = None) -> Event:
        """See `Lane.mark`."""
        event: Any = self._free.pop() if self._free else None
        if event is None:
            event = torch.cuda.Event(enable_timing=self._timing)  # type: ignore[no-untyped-call]
        event.record(stream)
        marked: Event = event
        return marked

    def recycle(self, events: list[Event]) -> None:
        """See `Lane.recycle`."""
        self._free.extend(events)
