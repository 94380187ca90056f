"""A circuit breaker for a remote store: it opens on faults, and closes when a probe is answered.

    CLOSED --faults--> OPEN --pause is over--> HALF_OPEN --the probe succeeds--> CLOSED
                        ^--------the probe fails, and the pause doubles----'

No request is ever the probe: while the breaker is not closed every request is answered at once, as a miss.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum


class BreakerState(Enum):
    """See the module."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Counts what succeeds and fails; any thread may call. Times are seconds of `clock`."""

    def __init__(
        self,
        clock: Callable[[], float],
        max_failures: int = 3,
        first_pause: float = 0.5,
        longest_pause: float = 8.0,
        is_open: bool = False,
    ) -> None:
        """`max_failures` in a row open it. With `is_open` it starts open, with a probe due at once."""
        self._clock = clock
        self._max_failures = max_failures
        self._first_pause = first_pause
        self._longest_pause = longest_pause
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = first_pause
        self._probe_at = clock()
        self._state = BreakerState.OPEN if is_open else BreakerState.CLOSED
        self.num_opened = 0
        """How often it has opened."""

    @property
    def state(self) -> BreakerState:
        """The current state."""
        return self._state

    @property
    def allows(self) -> bool:
        """Whether a request may go to the store."""
        return self._state is BreakerState.CLOSED

    def succeeded(self) -> None:
        """A request was answered; the failures before it are forgotten."""
        with self._lock:
            self._failures = 0

    def failed(self, at_once: bool = False) -> None:
        """A request was not answered; `at_once`: this alone opens the breaker. Changes nothing where it is not closed:
        requests under way when it opened say nothing new."""
        with self._lock:
            if self._state is not BreakerState.CLOSED:
                return
            self._failures += 1
            if at_once or self._failures >= self._max_failures:
                self.num_opened += 1
                self._pause = self._first_pause
                self._open()

    def seconds_to_probe(self) -> float | None:
        """How long to wait for `begin_probe` to be granted; None where none is needed."""
        with self._lock:
            return max(0.0, self._probe_at - self._clock()) if self._state is BreakerState.OPEN else None

    def begin_probe(self) -> bool:
        """Whether the caller is to probe now, and to call `end_probe`; one caller at a time is told so."""
        with self._lock:
            if self._state is not BreakerState.OPEN or self._clock() < self._probe_at:
                return False
            self._state = BreakerState.HALF_OPEN
            return True

    def end_probe(self, ok: bool) -> None:
        """Report the result of the granted probe."""
        with self._lock:
            assert self._state is BreakerState.HALF_OPEN, f"a probe ended in state {self._state}"
            if ok:
                self._failures = 0
                self._state = BreakerState.CLOSED
            else:
                self._pause = min(2 * self._pause, self._longest_pause)
                self._open()

    def _open(self) -> None:
        self._state = BreakerState.OPEN
        self._probe_at = self._clock() + self._pause
