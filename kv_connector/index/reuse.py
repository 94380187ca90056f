"""How likely a block is to be asked for again soon, learned from the blocks that were.

    time          counts blocks that requests have asked for, so an idle hour ages nothing
    class         by visits, in half octaves: how often a block was asked for again, or the chat whose newest it is;
                  they fade as other blocks are visited, or whatever is old would be of the highest class some day, and
                  prompts that come once make nothing less popular
    age           time since it was asked for last, in buckets of half an octave

For each class and age two sums are kept (`Rates`): `events`, blocks that were asked for at that age and were not on the
device, so that the host was of use or would have been; and `exposure`, how many known blocks spent how much time there.
Older intervals decay, the faster the worse they predicted the latest ones. A block's worth is the highest rate of
events over exposure from its age up to any later age (the Gittins index, 1979, which orders blocks by how likely and
how soon keeping them pays off). Blocks that are known without a copy count like all others, so that an eviction that
was too early is noticed; a tree remembers twice as many as the host holds. A new block is admitted by the worth of its
class at age 0, scaled down while recent blocks return less often than expected (`Frailty`): only new blocks, as the age
of the others has shown already whether they return. While recent blocks do return and older ones no longer, it is
scaled up: the workload has become another one, which rates of a long time do not show yet.

Keeping a block that is asked for while it is on the device never pays off, nor does a one-off prompt, and a chat whose
user reads for a minute pays off after a minute: all of this is learned, and none is a setting.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from ..types import BlockHash
from .columns import column
from .frailty import LOOKS, Frailty
from .rates import Rates, Table
from .terms import NUM_PRIORITIES, PRIORITY_STEP
from .tree import ROOT, PrefixTree, rows_of

_CLASS_BEGINS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # visits
_CLASSES = len(_CLASS_BEGINS)
_MOST_VISITS = _CLASS_BEGINS[-1]
_CLASS_OF = bytes(bisect_right(_CLASS_BEGINS, visits) - 1 for visits in range(_MOST_VISITS + 1))
_PER_OCTAVE = 2
_OCTAVES = 48
_BUCKETS = _PER_OCTAVE * _OCTAVES
_SHAPE = _CLASSES, _BUCKETS
_PARTS = 4
"""In the time in which as many blocks are asked for as the tier holds. Chosen without a search: of 2, 8 and 16 none is
better or worse by more than 0.04 points of hit rate on average, though by up to 2.4 in a row (the first 15 % of the
synthetic traces of `integration/bench/policies.py`, hosts of 5, 15 and 40 %, 2026-11-28)."""
_LEAST_PART = 256
"""Blocks asked for: a part of fewer has a few prompts, whose blocks come together, so its rates are chance. On the same
traces 64 has 0.02 and 1,024 0.08 points less on average: tiers of more than four times as many blocks have longer parts
anyway."""
_HALF_LIFE = 8
"""Of visits, in the time in which as many blocks are visited as the tier holds. Of 4 to 64 that were tried, where what
is popular stays so for ever or changes soon, 8 were nowhere far behind."""
_SAMPLE = 1 << 15
"""Rows of the tree that are looked at for the exposure, where there are more: so many take 0.8 ms of the scheduler's
thread, all of a million 22 (a core of an AMD EPYC, 2026-11-28). With 1,024 rows hits are 0.03 points fewer on average
on the traces above, 0.3 at most."""
_LATELY_PRIOR = 16.0
"""Of the factor of what was asked for lately, see `Frailty`. Of 4 to 16 none was better or worse everywhere."""
_BEFORE_PRIOR = 0.5
"""The same of what was asked for before, in parts of blocks: prompts stay away as a whole, so it takes more of them to
tell. With 16 blocks hits were up to 0.27 points fewer where days and nights differ, with 256 up to 0.07 (`nightly` and
`nightly_crowded` of `integration/bench/policies.py`, 2026-11-28)."""
_AS_EXPECTED = 0.95
"""The least factor of what was asked for lately with which the other one counts: at night neither comes back."""
_HALF_WIDTHS: Table = np.maximum(0.5, 0.25 / _PER_OCTAVE * 2.0 ** (np.arange(_BUCKETS) // _PER_OCTAVE))
"""Of each bucket of ages."""


class ReuseModel:
    """The eviction order of a tier behind the device. Called from one thread, the scheduler's. Where no tier uses it as
    its order nothing is learned, only counted."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._asked = tree.asked
        self._visits = tree.visits
        self._priority = tree.terms.priority
        self._rates = Rates(_CLASSES, _HALF_WIDTHS)
        self._lately, self._before = Frailty(), Frailty()  # of what was asked for within a part, and of older blocks
        self._events = np.zeros(_SHAPE)  # since the last look
        self._part_events, self._part_exposure = np.zeros(_SHAPE), np.zeros(_SHAPE)  # of the part, until that look
        self._worth = [[0.0] * _BUCKETS for _ in range(_CLASSES)]
        self._looked_at = self._learned_at = 0
        self._capacity = 0
        self.least_part = _LEAST_PART
        """So many blocks are asked for, at least, before more is learned; few only where a whole run has few."""

    def resized(self, capacity: int) -> None:
        """The tier has so many blocks."""
        self._capacity = capacity

    def class_of(self, node: int) -> int:
        """The node's class, one for each priority; those of priority 0 come first. It becomes another one only when the
        node is asked for."""
        visits, priority = self._visits[node], self._priority[node]
        of_visits = _CLASS_OF[min(int(visits), _MOST_VISITS)]
        return of_visits + _CLASSES * (priority % NUM_PRIORITIES) if priority else of_visits

    def worth(self, node: int) -> float:
        """Of a node's copy; the lowest is evicted first. Expected events while one more block is asked for, plus a step
        for the node's priority."""
        of_visits = _CLASS_OF[min(int(self._visits[node]), _MOST_VISITS)]
        worth = self._worth[of_visits][_bucket(self._tree.time - self._asked[node])]
        priority = self._priority[node]
        return worth + PRIORITY_STEP * priority if priority else worth

    def worth_of(self, path: Sequence[BlockHash], index: int, priority: int = 0) -> float:
        """The worth of block `index` of this path as a new one, asked for now with this priority."""
        tree = self._tree
        node = tree.get(path[index])
        parent = tree.get(path[index - 1]) if node is None and index else ROOT
        visits = tree.visits[node] if node is not None else tree.visits_behind(ROOT if parent is None else parent)
        worth = self._worth[_CLASS_OF[min(int(visits), _MOST_VISITS)]][0]
        return min(worth * self._newcomers_factor(), PRIORITY_STEP / 2) + PRIORITY_STEP * priority

    def distances(self, nodes: Sequence[int]) -> list[int]:
        """How many blocks were asked for since these nodes of a path were, once for each part of the path that was
        asked for at one time. Looked at before `visited` counts them."""
        asked, time = self._tree.asked, self._tree.time
        return [time - since for since, _ in groupby(rows_of(asked, nodes))]

    def visited(self, nodes: NDArray[np.intc], is_of_use: NDArray[np.bool_]) -> None:
        """A request asks for these nodes, each once: the known ones of all its blocks, as an array of shape
        (num_nodes,); `is_of_use` marks those that the device does not hold, so that the host could help. Updates the
        tree's `hits`, `visits`, `visited` and `asked`."""
        tree = self._tree
        faded, since = column(tree.visits)[nodes], tree.num_visits - column(tree.visited)[nodes]
        cells = _cells(faded, tree.time - column(tree.asked)[nodes])
        self._events += _table(cells[is_of_use])
        self.used(nodes)
        column(tree.visits)[nodes] = faded * np.exp2(-since / (_HALF_LIFE * max(1, self._capacity))) + 1
        column(tree.visited)[nodes] = tree.num_visits
        tree.num_visits += len(nodes)

    def used(self, nodes: NDArray[np.intc]) -> None:
        """These nodes, each once, are used on the device by an unknown request, which may use one several times. So
        their age restarts, and it counts as a hit, not as a visit."""
        tree = self._tree
        column(tree.hits)[nodes] += 1
        column(tree.asked)[nodes] = tree.time

    def asked(self, num_blocks: int) -> None:
        """A request asks for this many blocks, known or not: advances the time. Called after `visited`."""
        self._tree.time += num_blocks

    def learn(self) -> None:
        """Learn, if an interval has passed. Takes up to a millisecond: call it when no request waits."""
        if self._capacity and self._tree.time - self._looked_at >= max(1, self._part_length // LOOKS):
            self._look()

    @property
    def _part_length(self) -> int:
        return max(self.least_part, self._capacity // _PARTS)

    def _newcomers_factor(self) -> float:
        lately = self._lately.factor(_LATELY_PRIOR)
        if lately < _AS_EXPECTED:
            return lately
        return lately / self._before.factor(_BEFORE_PRIOR * self._part_length)

    def _look(self) -> None:
        time = self._tree.time
        exposure = self._open() * (time - self._looked_at)
        expected, end = exposure * self._rates.mean, _bucket(self._part_length)
        for frailty, ages in ((self._lately, slice(end)), (self._before, slice(end, None))):
            frailty.add(float(self._events[:, ages].sum()), float(expected[:, ages].sum()))
        self._part_events += self._events
        self._part_exposure += exposure
        self._events[:] = 0.0
        self._looked_at = time
        if time - self._learned_at >= self._part_length:
            self._learn()

    def _learn(self) -> None:
        time = self._tree.time
        self._rates.add(self._part_events, self._part_exposure, time - self._learned_at)
        self._part_events[:] = self._part_exposure[:] = 0.0
        self._learned_at = time
        # No age is above the time, and nothing is known of later ones.
        self._worth = self._rates.best(_bucket(time) + 1).tolist()

    def _open(self) -> Table:
        """How many known blocks are of each class and age now."""
        tree = self._tree
        stride = -(-len(tree.asked) // _SAMPLE)
        sampled = slice(tree.time % stride, None, stride)  # every so many: a prefix lies in neighbouring rows
        asked, visits = column(tree.asked)[sampled].copy(), column(tree.visits)[sampled].copy()
        is_known = asked >= 0
        cells = _cells(visits[is_known], tree.time - asked[is_known])
        return stride * _table(cells)


def _bucket(age: int) -> int:
    if age <= 0:
        return 0
    octave = age.bit_length()
    return _PER_OCTAVE * octave + (_PER_OCTAVE * age >> octave - 1) - _PER_OCTAVE


def _cells(visits: NDArray[np.float32], ages: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where in a table of classes and ages, made flat, blocks belong."""
    classes = np.frombuffer(_CLASS_OF, np.uint8)[np.minimum(visits, _MOST_VISITS).astype(np.intp)].astype(np.int64)
    # A float64 has its exponent in front of its fraction: with the first bit of that it counts half octaves.
    halves: NDArray[np.int64] = ages.astype(np.float64).view(np.int64) >> 51
    return classes * _BUCKETS + np.maximum(halves - _PER_OCTAVE * 1022, 0)  # 2 ** -1 has the exponent 1022; 0 has 0


def _table(cells: NDArray[np.int64]) -> Table:
    """How many blocks are of each class and age."""
    return np.bincount(cells, minlength=_CLASSES * _BUCKETS).reshape(_SHAPE).astype(np.float64)
