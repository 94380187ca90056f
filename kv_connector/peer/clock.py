"""The time that transports to peers, and their jobs, go by; tests and the simulator pass one of their own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time, with the names of Python's module `time`."""

    def monotonic(self) -> float:
        """Seconds that never go back."""

    def sleep(self, seconds: float, /) -> None:
        """Return when so many seconds have passed."""


_SYSTEM_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    """The system's clock; time in which the machine was suspended counts, too, where the system has such a clock."""

    def monotonic(self) -> float:
        """See `Clock`."""
        return time.clock_gettime(_SYSTEM_CLOCK)

    def sleep(self, seconds: float, /) -> None:
        """See `Clock`."""
        time.sleep(seconds)


CLOCK = SystemClock()
"""The clock of peers' transports and jobs."""
