"""Whether known blocks come back as often as their class does.

Rates of reuse are means over long times, but blocks of one time have something in common: a nightly batch never comes
back, whatever its class does by day, and chats whose users have left do not, whatever they did. So blocks that were
asked for lately are taken to share a factor on their rates, and those that were asked for before that share another
one (shared frailty: Clayton 1978; Vaupel, Manton and Stallard 1979). A factor is Gamma distributed with mean 1, and is
estimated from how many of its blocks came back and how many were expected to.
"""

from __future__ import annotations

LOOKS = 4
"""Updates in the time that counts as lately, one part of `ReuseModel`."""
_FADING = 0.5 ** (2 / LOOKS)
"""Factor on the sums at each update. They halve in half of the time that counts as lately; with twice that, a batch
that begins each night was admitted for too long."""


class Frailty:
    """The factor of some blocks. Called from one thread, the scheduler's."""

    def __init__(self) -> None:
        self._events = 0.0
        self._expected = 0.0

    def add(self, events: float, expected: float) -> None:
        """Since the last update `events` of them came back, and `expected` were expected to."""
        self._events = _FADING * self._events + events
        self._expected = _FADING * self._expected + expected

    def factor(self, prior: float) -> float:
        """Its posterior mean, at most 1, where so many expected returns weigh as much as the prior."""
        return min(1.0, (prior + self._events) / (prior + self._expected))
