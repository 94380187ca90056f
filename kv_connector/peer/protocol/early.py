"""What peers want, or do not want, of KV transfers that nobody has begun here yet, and KV transfers that will not be.

Each rank that holds KV heads of this one asks for itself; it is known by its place among those that do. What is
remembered is bounded for each place, so that as many KV transfers have room whatever the other engine's TP size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..base import Ids

MOST_EARLY_WANTS = 1024
"""Of each place."""
MOST_EARLY_BLOCKS = 1 << 20
"""Of all early wants of a place together: 8 MiB."""
MOST_EARLY_NONES = 1024
"""Of each place."""
MOST_WITHDRAWN = 1024
"""KV transfers that are remembered."""

NOT_HELD = "the blocks are not held any more"
Key = tuple[str, int]
"""A KV transfer, and a block group of it."""


@dataclass(frozen=True, slots=True)
class Asker:
    """A rank of another engine, by its link: number `place` of the `count` ranks that hold parts of this rank's
    heads."""

    link: int
    place: int
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """A want of an asker."""

    asker: Asker
    grant: int
    first: int
    stop: int
    name: bytes
    block_ids: Ids


@dataclass(frozen=True, slots=True)
class _None:
    """What was not wanted, if a block of it has the name under which this is kept."""

    asker: Asker
    deadline: float


class Early:
    """Messages for KV transfers that have not begun here. Transfers that are not wanted, or were withdrawn, are
    remembered for `seconds`."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._wants: defaultdict[int, dict[Key, Wanted]] = defaultdict(dict)  # by place
        # By place; by KV transfer and name, the oldest first.
        self._nones: defaultdict[int, dict[tuple[str, bytes], _None]] = defaultdict(dict)
        self._withdrawn: dict[str, float] = {}  # by KV transfer, the oldest first: until when it is remembered

    def want(self, key: Key, wanted: Wanted) -> str:
        """Remember it; answers why not, or nothing."""
        place, count = wanted.asker.place, wanted.asker.count
        wants = self._wants[place]
        counts = {others[key].asker.count for others in self._wants.values() if key in others}
        num_blocks = sum(len(early.block_ids) for early in wants.values())
        if key[0] in self._withdrawn:
            return NOT_HELD
        if len(wants) >= MOST_EARLY_WANTS or num_blocks + len(wanted.block_ids) > MOST_EARLY_BLOCKS:
            return "too many blocks are asked for of KV transfers that nobody has begun"
        if key in wants or counts - {count}:
            return "the KV transfer is asked for twice, and nobody has begun it"
        if (key[0], wanted.name) in self._nones[place]:
            return "the blocks were not wanted before"
        wants[key] = wanted
        return ""

    def want_nothing(self, key: Key, name: bytes, asker: Asker) -> None:
        """Remember that an asker wants nothing of it, unless it has wanted something before."""
        if key in self._wants[asker.place]:
            return
        nones, where = self._nones[asker.place], (key[0], name)
        nones.pop(where, None)
        while len(nones) >= MOST_EARLY_NONES:
            del nones[next(iter(nones))]
        nones[where] = _None(asker, self._clock() + self._seconds)

    def take(self, key: Key, names: Iterable[bytes]) -> tuple[list[Wanted], list[Asker]]:
        """The transfer begins, and its blocks have these names: returns who wants what of it, and who wants nothing."""
        self._withdrawn.pop(key[0], None)
        wants = [wants.pop(key) for wants in self._wants.values() if key in wants]
        found, known = [], set(names)
        for nones in self._nones.values():
            for where in [where for where in nones if where[0] == key[0] and where[1] in known]:
                found.append(nones.pop(where).asker)
        return wants, found

    def withdraw(self, transfer_id: str) -> list[Wanted]:
        """The transfer will not be offered; returns who has wanted blocks of it."""
        self._withdrawn.pop(transfer_id, None)
        while len(self._withdrawn) >= MOST_WITHDRAWN:
            del self._withdrawn[next(iter(self._withdrawn))]
        self._withdrawn[transfer_id] = self._clock() + self._seconds
        return [wants.pop(key) for wants in self._wants.values() for key in list(wants) if key[0] == transfer_id]

    def stop(self, link: int, grant: int) -> None:
        """A grant is to be filled no more."""
        for wants in self._wants.values():
            for key in [k for k, want in wants.items() if (want.asker.link, want.grant) == (link, grant)]:
                del wants[key]

    def lost(self, link: int) -> None:
        """A peer is gone."""
        for wants in self._wants.values():
            for key in [key for key, want in wants.items() if want.asker.link == link]:
                del wants[key]
        for nones in self._nones.values():
            for where in [where for where, none in nones.items() if none.asker.link == link]:
                del nones[where]

    def forget_overdue(self) -> None:
        """Forget what was withdrawn, and what was not wanted of KV transfers that nobody has begun in time: their ids
        may come again."""
        now = self._clock()
        for nones in self._nones.values():
            while nones and next(iter(nones.values())).deadline <= now:
                del nones[next(iter(nones))]
        while self._withdrawn and next(iter(self._withdrawn.values())) <= now:
            del self._withdrawn[next(iter(self._withdrawn))]
