"""The index of a folder's packs: where each block is, and which pack is least recently used. It opens no file, so its
lock is held for moments, and `num_blocks` and `used_bytes` are read without it.

A pack is a number, which is given once: whoever has that of one that is gone finds nothing, also where a pack of the
same name came back. What is known of it is a plain tuple, replaced where any of it changes. There are many of them, and
Python's garbage collector drops such tuples, and dictionaries of them, from what it walks.

    _numbers  name -> number, those of others too, for they take room
    _packs    number -> `Facts`
    _dropped  number -> blocks that were found damaged, where there are any
    _slots    key  -> where the block is read: its newest copy; a number and a place in that pack as one integer
    _spare    key  -> older copies of the same block, computed anew by this process or another
    _oldest   heap of (time, number): at most one entry for each pack, none for one that was taken, and some for packs
              that are gone; where a pack was used since, its entry follows when it is next in line
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from operator import itemgetter
from typing import NamedTuple

from .packs import MAX_BLOCKS, keys_of

_SPARE_ENTRIES = 1000  # dead ones in the heap, before it is worth making anew
SKEW_NS = 60 * 10**9
"""By how much the clocks of machines that share a folder may differ. A time further ahead was never the time."""

Facts = tuple[str, int, int, bytes | None]
"""Of a pack: its name, the bytes of its file, when it was used (ns), and its header's text. The text is None where the
pack is not to be read: another identity or block size, damaged, or to be deleted. By another process it may have been
used later, never earlier."""


class Pack(NamedTuple):
    """A file of the folder. One that was stored again under the same name is another."""

    number: int
    name: str


class Slot(NamedTuple):
    """Where a block lies."""

    pack: Pack
    place: int


class PackCatalog:
    """See the module. Any thread may call; `clock` is in nanoseconds."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.num_blocks = 0
        """Blocks that can be read."""
        self.used_bytes = 0
        """Of all packs."""
        self._clock = clock
        self._lock = threading.RLock()
        self._next_number = 0
        self._numbers: dict[str, int] = {}
        self._packs: dict[int, Facts] = {}
        self._dropped: dict[int, frozenset[int]] = {}
        self._slots: dict[bytes, int] = {}
        self._spare: dict[bytes, list[int]] = {}
        self._oldest: list[tuple[int, int]] = []
        self._last_ns = 0

    def __contains__(self, name: str) -> bool:
        return name in self._numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def now(self) -> int:
        """The time, later than any before, so that it orders what is used. Where the clock was set back, what was used
        in its future counts as used now, in the same order."""
        with self._lock:
            now = self._clock()
            if now + SKEW_NS < self._last_ns:
                self._bring_back(now)
            self._last_ns = max(now, self._last_ns + 1)
            return self._last_ns

    def slots(self, keys: Sequence[bytes]) -> list[Slot | None]:
        """Where each of these blocks lies, as far as is known."""
        with self._lock:
            found = [self._slots.get(key) for key in keys]
            return [None if slot is None else self._slot(slot) for slot in found]

    def text(self, pack: Pack) -> bytes | None:
        """Of its header; None where it is gone, or not to be read."""
        facts = self._packs.get(pack.number)
        return facts[3] if facts is not None else None

    def used_ns(self, pack: Pack, default: int) -> int:
        """When it was used, as far as is known; `default` where it is gone."""
        facts = self._packs.get(pack.number)
        return facts[2] if facts is not None else default

    def packs(self) -> list[Facts]:
        """All of them, the least recently used first."""
        with self._lock:
            return sorted(self._packs.values(), key=itemgetter(2))

    def add(self, packs: Iterable[tuple[Facts, Sequence[bytes]]]) -> None:
        """These packs lie there, each in the place of one of the same name. With each come the keys of its blocks; none
        of one that cannot be read."""
        with self._lock:
            numbers, slots, spare = self._numbers, self._slots, self._spare
            for facts, keys in packs:
                name, num_bytes, used_ns, _ = facts
                if name in numbers:
                    self.forget(name)
                number = self._next_number
                self._next_number = number + 1
                numbers[name] = number
                self._packs[number] = facts
                self.used_bytes += num_bytes
                heappush(self._oldest, (used_ns, number))
                for slot, key in enumerate(keys, number * MAX_BLOCKS):
                    if key in slots:
                        spare.setdefault(key, []).append(slots[key])
                    slots[key] = slot
            self._trim()
            self.num_blocks = len(slots)

    def forget(self, name: str) -> int:
        """The pack of this name is gone; how many blocks went with it."""
        with self._lock:
            number = self._numbers.pop(name, None)
            if number is None:
                return 0
            num_lost = self._hide(number)
            self.used_bytes -= self._packs.pop(number)[1]
            return num_lost

    def keep(self, names: Sequence[str]) -> list[str]:
        """Forget all packs but those of these names, which are distinct; those of them that are not known."""
        with self._lock:
            new = [name for name in names if name not in self._numbers]
            if len(names) - len(new) < len(self._numbers):  # else nothing is gone: names are looked up once at a start
                for name in sorted(self._numbers.keys() - set(names)):
                    self.forget(name)
            return new

    def hide(self, pack: Pack) -> int:
        """The pack is not to be read any more, and takes room; how many blocks went with it."""
        with self._lock:
            return self._hide(pack.number) if pack.number in self._packs else 0

    def drop(self, pack: Pack, indices: Iterable[int]) -> bool:
        """These blocks of a pack are damaged; whether a good one is left."""
        with self._lock:
            text = self.text(pack)
            if text is None:
                return False
            keys = keys_of(text)
            dropped = self._dropped[pack.number] = self._dropped.get(pack.number, frozenset()).union(indices)
            for index in dropped:
                self._drop(keys[index], pack.number)
            return len(dropped) < len(keys)

    def used(self, packs: Iterable[Pack], used_ns: int) -> None:
        """Packs were read: they go behind those that were read before."""
        with self._lock:
            for pack in packs:
                if self.used_ns(pack, used_ns) < used_ns:
                    self._set_used(pack.number, used_ns)

    def take_oldest(self) -> tuple[Pack, int] | None:
        """The pack that was used longest ago, as far as is known, and when. It stays; it is in the queue no more until
        `queue`, and so is offered once."""
        with self._lock:
            while self._oldest:
                queued_ns, number = heappop(self._oldest)
                facts = self._packs.get(number)
                if facts is None:
                    continue
                name, _, used_ns, _ = facts
                if used_ns == queued_ns:
                    return Pack(number, name), used_ns
                heappush(self._oldest, (used_ns, number))
            return None

    def queue(self, pack: Pack, used_ns: int) -> None:
        """Put a pack that was taken, and was used then or later, back in line."""
        with self._lock:
            if pack.number in self._packs:
                self.used([pack], used_ns)
                heappush(self._oldest, (used_ns, pack.number))

    def _trim(self) -> None:
        if len(self._oldest) > 2 * len(self._numbers) + _SPARE_ENTRIES:
            self._rebuild()

    def _rebuild(self) -> None:
        packs = self._packs
        self._oldest = [(packs[number][2], number) for _, number in self._oldest if number in packs]
        heapify(self._oldest)

    def _hide(self, number: int) -> int:
        name, num_bytes, used_ns, text = self._packs[number]
        self._packs[number] = name, num_bytes, used_ns, None
        self._dropped.pop(number, None)
        return sum(self._drop(key, number) for key in keys_of(text)) if text is not None else 0

    def _set_used(self, number: int, used_ns: int) -> None:
        name, num_bytes, _, text = self._packs[number]
        self._packs[number] = name, num_bytes, used_ns, text

    def _drop(self, key: bytes, number: int) -> bool:
        """Read the block from another pack than this, where there is one; whether it is lost."""
        slot = self._slots.get(key)
        spare = [other for other in self._spare.pop(key, ()) if other // MAX_BLOCKS != number]
        is_lost = False
        if slot is not None and slot // MAX_BLOCKS == number:
            if spare:
                self._slots[key] = spare.pop()
            else:
                del self._slots[key]
                self.num_blocks = len(self._slots)
                is_lost = True
        if spare:
            self._spare[key] = spare
        return is_lost

    def _slot(self, slot: int) -> Slot:
        number, place = divmod(slot, MAX_BLOCKS)
        return Slot(Pack(number, self._packs[number][0]), place)

    def _bring_back(self, now: int) -> None:
        late = sorted((facts[2], number) for number, facts in self._packs.items() if facts[2] > now)
        for place, (_, number) in enumerate(late, now - len(late)):
            self._set_used(number, place)
        self._last_ns = now
        self._rebuild()
