"""Virtual time: one queue of events and one source of chance for a whole world.

Nothing in a simulation sleeps, reads a clock of the machine or starts a thread. Whatever takes time (a step, a copy, a
message, a write to disk) is an event due at a virtual time; events of the same time run in an order drawn from the
seed, so that no order between two owners is relied upon. What must stay in order (one stream, one connection) is
chained by its owner: it asks for the next event only when the one before it has run.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable


class Event:
    """One thing that is due. `cancel()` makes it nothing; a cancelled event costs its place in the queue only."""

    __slots__ = ("time", "label", "_fn")

    def __init__(self, time: float, fn: Callable[[], object], label: str) -> None:
        self.time = time
        self.label = label
        self._fn: Callable[[], object] | None = fn

    @property
    def is_pending(self) -> bool:
        return self._fn is not None

    def cancel(self) -> None:
        self._fn = None

    def run(self) -> None:
        """Runs it, once; an event that was cancelled or has run does nothing."""
        fn, self._fn = self._fn, None
        if fn is not None:
            fn()


class VirtualTime:
    """The clock, the queue and the chance of one world. Seconds are virtual; the same seed gives the same run.

    `rng` is for what happens inside of the world. A part that draws often, or not in every configuration, takes a
    source of its own from `stream(name)`, so that what it draws does not shift what everybody else draws.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self._ties = random.Random(f"{seed}/ties")
        self._now = 0.0
        self._count = 0
        self._events: list[tuple[float, float, int, Event]] = []

    def now(self) -> float:
        """Virtual seconds since the start; what `clock=` arguments of the code under test take."""
        return self._now

    def stream(self, name: str) -> random.Random:
        """A source of chance of its own for one part of the world, from the same seed."""
        return random.Random(f"{self.seed}/{name}")

    def call_at(self, time: float, fn: Callable[[], object], label: str = "") -> Event:
        """`fn()` runs at `time`; a time that is past means now, after what runs at present."""
        event = Event(max(time, self._now), fn, label)
        self._count += 1
        heapq.heappush(self._events, (event.time, self._ties.random(), self._count, event))
        return event

    def call_after(self, delay: float, fn: Callable[[], object], label: str = "") -> Event:
        """`fn()` runs `delay` virtual seconds from now."""
        return self.call_at(self._now + delay, fn, label)

    def call_soon(self, fn: Callable[[], object], label: str = "") -> Event:
        """`fn()` runs at the present time, after what runs at present, in no order with others that do."""
        return self.call_at(self._now, fn, label)

    def run_next(self) -> bool:
        """Runs the next event, whenever it is due; False if there is none."""
        while self._events:
            time, _, _, event = heapq.heappop(self._events)
            if event.is_pending:
                self._now = max(self._now, time)
                event.run()
                return True
        return False

    def run_until(self, time: float) -> None:
        """Runs everything due until `time`, then it is `time`."""
        while self._events and self._events[0][0] <= time:
            self.run_next_due(time)
        self._now = max(self._now, time)

    def run_next_due(self, time: float) -> bool:
        """Runs the next event if it is due by `time`; False if none is."""
        while self._events and self._events[0][0] <= time:
            due, _, _, event = heapq.heappop(self._events)
            if event.is_pending:
                self._now = max(self._now, due)
                event.run()
                return True
        return False

    @property
    def num_pending(self) -> int:
        """How many events are due; for the checks at rest."""
        return sum(event.is_pending for _, _, _, event in self._events)

    def pending_labels(self) -> list[str]:
        """What is due, soonest first; for the message of a failure."""
        events = sorted(self._events, key=lambda entry: entry[:3])
        return [f"{time:.6f} {event.label}" for time, _, _, event in events if event.is_pending]
