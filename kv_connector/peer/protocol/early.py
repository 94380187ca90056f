"""What peers want, or do not want, of KV transfers that nobody has begun here yet.

Each rank that holds KV heads of this one asks for itself; it is known by its place among those that do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..base import Ids

MOST_EARLY_WANTS = 1024
MOST_EARLY_BLOCKS = 1 << 20
"""Of all early wants together: 8 MiB."""
MOST_EARLY_NONES = 1024

Key = tuple[str, int]
"""A KV transfer, and a block group of it."""


@dataclass(frozen=True, slots=True)
class Asker:
    """A rank of another engine over its link: the one at `place` of `count` that hold parts of what this one holds."""

    link: int
    place: int
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """What an asker has said that it wants."""

    asker: Asker
    grant: int
    first: int
    stop: int
    name: bytes
    block_ids: Ids


@dataclass(frozen=True, slots=True)
class _None:
    """What was not wanted, if the last block of it has the name under which this is kept."""

    asker: Asker
    deadline: float


class EarlyWants:
    """Bounded. That something is not wanted is remembered for `seconds`."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._wants: dict[tuple[Key, int], Wanted] = {}  # by place
        self._nones: dict[tuple[str, bytes, int], _None] = {}  # by KV transfer, name and place, the oldest first

    def want(self, key: Key, wanted: Wanted) -> str:
        """Remember it; answers why not, or nothing."""
        place = wanted.asker.place
        num_blocks = sum(len(early.block_ids) for early in self._wants.values())
        if len(self._wants) >= MOST_EARLY_WANTS or num_blocks + len(wanted.block_ids) > MOST_EARLY_BLOCKS:
            return "too many blocks are asked for of KV transfers that nobody has begun"
        if (key, place) in self._wants:
            return "the KV transfer is asked for twice, and nobody has begun it"
        if (key[0], wanted.name, place) in self._nones:
            return "the blocks were not wanted before"
        self._wants[key, place] = wanted
        return ""

    def want_nothing(self, key: Key, name: bytes, asker: Asker) -> None:
        """Remember that an asker wants nothing of it, unless it has wanted something before."""
        if (key, asker.place) in self._wants:
            return
        where = key[0], name, asker.place
        self._nones.pop(where, None)
        while len(self._nones) >= MOST_EARLY_NONES:
            del self._nones[next(iter(self._nones))]
        self._nones[where] = _None(asker, self._clock() + self._seconds)

    def take(self, key: Key, name: bytes) -> tuple[list[Wanted], list[Asker]]:
        """It begins, and its last block has this name: who wants what of it, and who wants nothing."""
        wants = [where for where in self._wants if where[0] == key]
        nones = [where for where in self._nones if where[:2] == (key[0], name)]
        return [self._wants.pop(where) for where in wants], [self._nones.pop(where).asker for where in nones]

    def stop(self, link: int, grant: int) -> None:
        """A grant is to be filled no more."""
        self._wants = {
            where: want for where, want in self._wants.items() if (want.asker.link, want.grant) != (link, grant)
        }

    def lost(self, link: int) -> None:
        """A peer is gone."""
        self._wants = {where: want for where, want in self._wants.items() if want.asker.link != link}
        self._nones = {where: none for where, none in self._nones.items() if none.asker.link != link}

    def forget_overdue(self) -> None:
        """Forget what was not wanted of KV transfers that nobody has begun in time: their ids may come again."""
        now = self._clock()
        while self._nones:
            where, none = next(iter(self._nones.items()))
            if none.deadline > now:
                return
            del self._nones[where]
