"""How often blocks of each class and age are asked for, learned by several estimators (memories), weighted by accuracy.

Time is divided into intervals, called parts (see `ReuseModel`), and for each class and age two sums are kept: `events`,
blocks that were asked for there, and `exposure`, how many blocks spent how much time there. The highest of many rates
overrates chance events of few parts, so a long memory is best for a steady workload. After a lasting change of the
workload a long memory goes by the old one for long, and a short one is best. So each memory is scored by the likelihood
of each part under its rates, scores decay, and a worth is the mean over the memories, weighted by these scores (dynamic
model averaging, Raftery, Karny and Ettler 2010). Using the best memory alone cost up to 2.7 points of hit rate where
days and nights differ: it was another one every few parts, and blocks kept by one order were evicted by the next.

A memory cannot judge ages longer than it reaches back: it has seen blocks return after such a time, but not those that
did not return. So it gives no rate for such ages.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]

_FADING: Table = np.array([0.998, 0.99, 0.95, 0.8]).reshape(-1, 1, 1)
"""Factor on each memory's sums as the next part is added: they reach back about 500, 100, 20 and 5 parts."""
_FORGETTING = 0.97
"""Factor on a score as the next part is added: it reaches back about 33 parts, in which eight times the tier's blocks
are asked for."""
_OBSERVATIONS = 20.0
"""Independent observations that all events of a score count as: blocks of a prompt come together. Of 2 to 100, tried on
traces of days and nights, of a changing load and of drifting popularity, 20 is nowhere far behind the best."""
_LEAST_BELIEF = 0.01
"""The least weight of a memory whose best rates are computed, as each takes 0.2 ms of the scheduler's thread: what is
left out is a hundredth of a worth for each memory. From 0 to 0.1 hits differ by less than 0.1 points on average (the
first 15 % of the synthetic traces of `integration/bench/policies.py`, 2026-11-28)."""
_PRIOR_EVENTS = 1.0
"""Until a class has seen more events than this, its rate is close to that of all classes at its age, which weigh as
much as one observation (a unit information prior, Kass and Wasserman 1995), since classes are meant to differ."""


class Rates:
    """Rates of `num_classes` classes and `len(half_widths)` ages; `half_widths`, float64 of shape (ages,), has half of
    the time that a block spends in each age, in blocks asked for. Called from one thread, the scheduler's."""

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
        """Take in a part: `events` and `exposure` of shape (classes, ages), and its length `passed`, in blocks asked
        for."""
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
        """The highest rate from each class and age to any later age, of shape (classes, ages); only the first
        `num_ages` ages have been reached by any block, the others are 0.0."""
        beliefs = self._beliefs()
        best = np.zeros((self._events.shape[1], num_ages))
        for memory in np.flatnonzero(beliefs >= _LEAST_BELIEF):
            best += beliefs[memory] * self._best_of(int(memory), num_ages)
        return np.pad(best, ((0, 0), (0, len(self._half_widths) - num_ages)))

    def _beliefs(self) -> Table:
        """The weight of each memory, of shape (memories,); they add up to 1."""
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
