"""Whether blocks that were asked for lately come back as often as their class does.

Rates of reuse are means over long times, but blocks of one time have something in common: a nightly batch never comes
back, whatever its class does by day. So all blocks that were asked for lately are taken to share a factor on their
rates (shared frailty: Clayton 1978; Vaupel, Manton and Stallard 1979). It is Gamma distributed with mean 1, and is
estimated from how many of them came back and how many were expected to.
"""

from __future__ import annotations

LOOKS = 4
"""Updates in the time that counts as lately, one part of `ReuseModel`."""
_SHAPE = 16.0
"""Of the Gamma distribution: this many expected returns weigh as much as the prior. Of 4 to 16 that were tried none was
better or worse than the others everywhere."""
_FADING = 0.5 ** (2 / LOOKS)
"""Factor on the sums at each update. They halve in half of the time that counts as lately; with twice that, a batch
that begins each night was admitted for too long."""


class Frailty:
    """The factor of blocks that were asked for lately. Called from one thread, the scheduler's."""

    def __init__(self) -> None:
        self._events = 0.0
        self._expected = 0.0

    def add(self, events: float, expected: float) -> None:
        """Since the last update `events` of them came back, and `expected` were expected to."""
        self._events = _FADING * self._events + events
        self._expected = _FADING * self._expected + expected

    @property
    def factor(self) -> float:
        """Its posterior mean, at most 1: a new block is never worth more than its class."""
        return min(1.0, (_SHAPE + self._events) / (_SHAPE + self._expected))
