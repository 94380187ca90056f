"""How long loads took and what the compute stream waited for them, from events (only with `trace_loads`)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ...types import LoadTiming
from ..cuda.streams import Event, Lane


@dataclass(slots=True, eq=False)
class LoadTrace:
    """One load: `start` and one event a layer group on the load stream, and what surrounds each group's first wait."""

    start: Event
    groups: list[Event]
    waits: dict[int, tuple[Event, Event]] = field(default_factory=dict)
    has_ended: bool = False


class LoadTraces:
    """The traces of loads under way and of loads not yet asked for, in order of submission."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._traces: deque[LoadTrace] = deque()

    def begin(self, trace: LoadTrace) -> None:
        """A load was submitted; layers wait for it from now on."""
        self._traces.append(trace)
        if self._lane.is_synchronous:
            # Nothing overlaps there: what a group took is what it cost.
            trace.waits = dict(enumerate(zip([trace.start, *trace.groups], trace.groups, strict=False)))

    def wait(self, group: int, stream: Any) -> None:
        """Make `stream` wait for a group of the last load, with an event before and after the first time.

        It is named because another device may be the current one: its current stream is not that of the model.
        """
        trace = self._traces[-1]
        if group in trace.waits:
            trace.groups[group].wait(stream)
            return
        before = self._lane.mark(stream)
        trace.groups[group].wait(stream)
        trace.waits[group] = before, self._lane.mark(stream)

    def drop(self, groups: list[Event]) -> None:
        """The load with this very list of group events has failed."""
        for trace in [trace for trace in self._traces if trace.groups is groups]:
            self._traces.remove(trace)

    def end(self, groups: list[Event]) -> bool:
        """The load with this very list of group events has completed; False where it is not traced."""
        for trace in self._traces:
            if trace.groups is groups:
                trace.has_ended = True
                return True
        return False

    def take(self) -> tuple[LoadTiming, ...]:
        """Timings of loads that have completed, and so have the waits for them; each once, in order."""
        taken = []
        while self._traces and self._is_complete(self._traces[0]):
            trace = self._traces.popleft()
            stalls = [trace.waits.get(group) for group in range(len(trace.groups))]
            taken.append(
                LoadTiming(
                    load_ms=trace.start.elapsed_time(trace.groups[-1]),
                    load_stall_ms=tuple(0.0 if pair is None else pair[0].elapsed_time(pair[1]) for pair in stalls),
                )
            )
            self._recycle(trace)
        return tuple(taken)

    def _is_complete(self, trace: LoadTrace) -> bool:
        return trace.has_ended and all(after.query() for _, after in trace.waits.values())

    def _recycle(self, trace: LoadTrace) -> None:
        waits = [event for pair in trace.waits.values() for event in pair]
        self._lane.recycle([trace.start, *waits] if not self._lane.is_synchronous else [])
