"""Whether what was asked for lately comes back as often as its kind does.

Rates of reuse are means over long times, and what comes at one time has something in common: a batch that runs at
night comes back never, whatever its kind did by day. So all blocks that were asked for lately are taken to share a
factor that their rates are multiplied by (shared frailty: Clayton 1978; Vaupel, Manton and Stallard 1979). It is one in
the mean, Gamma distributed, and what came back of them and what their rates had led to expect tell which it is now.
"""

from __future__ import annotations

LOOKS = 4
"""In the time that is lately."""
_SHAPE = 16.0
"""Of the Gamma distribution: so many returns that were expected tell as much as what was known before. Of 4 to 16 that
were tried none was better or worse than the others everywhere."""
_FADING = 0.5 ** (2 / LOOKS)
"""What is left of what was seen when the next look comes. Half of it fades in half of the time that is lately; where it
took twice as long, a batch that begins each night was let in for too long."""


class Frailty:
    """Of what was asked for lately. One thread calls."""

    def __init__(self) -> None:
        self._events = 0.0
        self._expected = 0.0

    def add(self, events: float, expected: float) -> None:
        """Since the last look so many of them came back, and so many were expected to."""
        self._events = _FADING * self._events + events
        self._expected = _FADING * self._expected + expected

    @property
    def factor(self) -> float:
        """The mean of what it is, given what was seen, and one at most: more than its kind is worth nothing new is."""
        return min(1.0, (_SHAPE + self._events) / (_SHAPE + self._expected))
