"""How often blocks of each class and age are asked for, learned by several memories, the better ones believed more.

Blocks come in parts (see `ReuseModel`), and of each class and age two sums are kept: `events`, blocks that were asked
for there, and `exposure`, how many blocks spent how much time there. A best rate is the best of many, so that what few
parts happened to show is overrated: a long memory is best where a load stays what it is. Where one gives way to another
for good a long memory goes by the old one for long, and a short one is best. Which it is, the next parts tell: a memory
is scored by how likely what came was by its own rates, the scores fade, and a worth is the mean of what the memories
say, each weighed by how well it foretold the latest parts (dynamic model averaging, Raftery, Karny and Ettler 2010). To
believe the best one alone cost up to 2.7 points where days and nights differ: it was another one every few parts, and
blocks went by the order of one that were kept by that of the next.

A memory has seen nobody wait for longer than it goes back: of what comes back after longer than that it has seen those
who came, and not who has waited as long in vain. So it says nothing of such waits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]

_FADING: Table = np.array([0.998, 0.99, 0.95, 0.8]).reshape(-1, 1, 1)
"""What is left of each memory's sums when the next part is added: of the last 500, 100, 20 and 5."""
_FORGETTING = 0.97
"""What is left of a score when the next part is added: of the last 33, eight times what the tier holds."""
_OBSERVATIONS = 20.0
"""That all the events of a score count for: blocks of a prompt come together, so that they are not as many as they are.
Of 2 to 100, where days and nights differ, a load becomes another one or popularity drifts, 20 is nowhere far behind."""
_LEAST_BELIEF = 0.01  # of a memory that is asked
_PRIOR_EVENTS = 1.0
"""A class is taken to be like the others of its age until it has seen more than so many: the others weigh as much as
one observation (a unit information prior, Kass and Wasserman 1995), as classes are there to differ."""


class Rates:
    """Of `num_classes` classes and as many ages as there are `half_widths`, which are half of how long a block is of
    each age. One thread calls."""

    def __init__(self, num_classes: int, half_widths: Table) -> None:
        shape = len(_FADING), num_classes, len(half_widths)
        self.mean = np.zeros(shape[1:])
        """Of each class and age, what the memories believe; 0.0 until something is learned."""
        self._half_widths = half_widths
        self._events = np.zeros(shape)
        self._exposure = np.zeros(shape)
        self._rates = np.ones(shape)
        self._scores = np.zeros(len(_FADING))
        self._num_scored = 0.0  # events
        self._reaches = np.zeros(shape[:1])  # how far back each memory goes
        self._begins: Table = np.cumsum(2 * half_widths) - 2 * half_widths  # of each age

    def add(self, events: Table, exposure: Table, passed: int) -> None:
        """A part has passed, which took so long: (classes, ages) each."""
        seen = np.maximum(exposure, events * self._half_widths)
        # Of Poisson's logarithm, without what is the same for all memories.
        likely = (events * np.log(self._rates) - self._rates * seen).sum(axis=(1, 2))
        self._scores = _FORGETTING * self._scores + likely
        self._num_scored = _FORGETTING * self._num_scored + events.sum()
        self._events = _FADING * self._events + events
        self._exposure = _FADING * self._exposure + exposure
        self._reaches = _FADING.ravel() * self._reaches + passed
        smoothed, seen_by_all = _smoothed(self._events, self._exposure, self._half_widths)
        rates = np.divide(smoothed, seen_by_all, out=np.zeros_like(smoothed), where=seen_by_all > 0)
        # What a memory has never seen is not impossible: one event in all of its exposure.
        self._rates = np.maximum(rates, 1 / np.maximum(1.0, self._exposure.sum(axis=(1, 2), keepdims=True)))
        self.mean = np.tensordot(self._beliefs(), self._rates, axes=1)

    def best(self, num_ages: int) -> Table:
        """Of each class and age, (classes, ages), the best rate from there to any later age, of the first `num_ages`
        ages alone: nothing is of a later one yet, and 0.0 stands there."""
        beliefs = self._beliefs()
        best = np.zeros((self._events.shape[1], num_ages))
        for memory in np.flatnonzero(beliefs >= _LEAST_BELIEF):
            best += beliefs[memory] * self._best_of(int(memory), num_ages)
        return np.pad(best, ((0, 0), (0, len(self._half_widths) - num_ages)))

    def _beliefs(self) -> Table:
        """How much each memory is believed, one in all."""
        likelihoods = np.exp(_OBSERVATIONS * (self._scores - self._scores.max()) / max(1.0, self._num_scored))
        beliefs: Table = likelihoods / likelihoods.sum()
        return beliefs

    def _best_of(self, memory: int, num_ages: int) -> Table:
        """By one memory."""
        begins = self._begins[:num_ages]
        events, exposure = self._events[memory, :, :num_ages], self._exposure[memory, :, :num_ages]
        is_known = begins - begins[:, None] <= self._reaches[memory]
        return _best_rates(*_smoothed(events, exposure, self._half_widths[:num_ages]), is_known)


def _smoothed(events: Table, exposure: Table, half_widths: Table) -> tuple[Table, Table]:
    """Where a class has seen little, its events are those of all classes at that age. Classes and ages are the last two
    axes."""
    # What was asked for at some age was half as long of that age as one can be, whether or not it was met there.
    exposure = np.maximum(exposure, events * half_widths)
    all_events, all_exposure = events.sum(axis=-2, keepdims=True), exposure.sum(axis=-2, keepdims=True)
    # What has faded to next to nothing is waited for without end: a prior of infinity, and a rate of 0.
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        prior = np.where(all_events > 0, _PRIOR_EVENTS * all_exposure / all_events, 0.0)
        rate = np.where(all_events > 0, (events + _PRIOR_EVENTS) / (exposure + prior), 0.0)
    seen = np.maximum(exposure, 1e-6 * all_exposure)  # a class without any exposure has the rate of all
    return rate * seen, seen


def _best_rates(events: Table, exposure: Table, is_known: NDArray[np.bool_]) -> Table:
    """Of each class and age the best rate of events from there to any later age that is known there, (ages, ages)."""
    zeros = np.zeros((len(events), 1))
    sums, spans = np.hstack((zeros, events.cumsum(axis=1))), np.hstack((zeros, exposure.cumsum(axis=1)))
    # By class, age, and age up to which; up to an earlier one nothing is spent.
    gained, spent = sums[:, None, 1:] - sums[:, :-1, None], spans[:, None, 1:] - spans[:, :-1, None]
    rates: Table = np.divide(gained, spent, out=np.zeros_like(spent), where=(spent > 0) & is_known)
    best: Table = rates.max(axis=2)
    return best
