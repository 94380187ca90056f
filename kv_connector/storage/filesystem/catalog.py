"""What is known of a folder's packs: where each block lies, and which pack was used longest ago. It looks at no file,
so its lock is held for moments, and `num_blocks` and `used_bytes` are read without.

    _packs    name -> Pack, those of others too, for they take room
    _numbers  number -> Pack; a slot is a pack's number and a place in it as one integer: there are millions of them,
              and Python's garbage collector walks no integers
    _slots    key  -> where the block is read: its newest copy
    _spare    key  -> older copies of the same block, computed anew by this process or another
    _oldest   heap of (time, name), one live entry for each pack; an entry is dead once its pack was queued at another
              time or is gone
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from .packs import MAX_BLOCKS, name_and_keys

_SPARE_ENTRIES = 1000  # dead ones in the heap, before it is worth making anew
_NOT_QUEUED = -1
SKEW_NS = 60 * 10**9
"""By how much the clocks of machines that share a folder may differ. A time further ahead was never the time."""


@dataclass(slots=True)
class Pack:
    """A file of the folder. `text`, of its header, is None where it cannot be read: another identity or block size,
    damaged, or to be deleted. It may have been used later than `used_ns` by another process, never earlier."""

    name: str
    num_bytes: int
    used_ns: int
    text: bytes | None
    number: int = -1
    queued_ns: int = _NOT_QUEUED  # of its entry in the heap
    dropped: frozenset[int] = frozenset()  # blocks that were found damaged

    def keys(self) -> Sequence[bytes]:
        """Of the blocks that it has for us."""
        return name_and_keys(self.text)[1] if self.text is not None else ()


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
        self._packs: dict[str, Pack] = {}
        self._numbers: dict[int, Pack] = {}
        self._next_number = 0
        self._slots: dict[bytes, int] = {}
        self._spare: dict[bytes, list[int]] = {}
        self._oldest: list[tuple[int, str]] = []
        self._last_ns = 0

    def __contains__(self, name: str) -> bool:
        return name in self._packs

    def __len__(self) -> int:
        return len(self._packs)

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

    def packs(self) -> list[Pack]:
        """All of them, the least recently used first."""
        with self._lock:
            return sorted(self._packs.values(), key=lambda pack: pack.used_ns)

    def add(self, packs: Iterable[tuple[Pack, Sequence[bytes]]]) -> None:
        """These packs lie there, each in the place of one of the same name. With each come the keys of its blocks; none
        of one that cannot be read."""
        with self._lock:
            slots, spare = self._slots, self._spare
            for pack, keys in packs:
                name, used_ns = pack.name, pack.used_ns
                if name in self._packs:
                    self.forget(name)
                number = self._next_number
                self._next_number += 1
                self._packs[name] = self._numbers[number] = pack
                pack.number, pack.queued_ns = number, used_ns
                self.used_bytes += pack.num_bytes
                heappush(self._oldest, (used_ns, name))
                for slot, key in enumerate(keys, number * MAX_BLOCKS):
                    if key in slots:
                        spare.setdefault(key, []).append(slots[key])
                    slots[key] = slot
            self._trim()
            self.num_blocks = len(self._slots)

    def forget(self, name: str) -> int:
        """The pack of this name is gone; how many blocks went with it."""
        with self._lock:
            pack = self._packs.get(name)
            if pack is None:
                return 0
            num_lost = self.hide(pack)
            del self._packs[name], self._numbers[pack.number]
            self.used_bytes -= pack.num_bytes
            return num_lost

    def keep(self, names: Set[str]) -> Set[str]:
        """Forget all packs but those of these names; those of them that are not known."""
        with self._lock:
            for name in sorted(self._packs.keys() - names):
                self.forget(name)
            return names - self._packs.keys()

    def hide(self, pack: Pack) -> int:
        """The pack is not to be read any more, and takes room; how many blocks went with it."""
        with self._lock:
            keys, pack.text = pack.keys(), None
            return sum(self._drop(key, pack) for key in keys)

    def drop(self, pack: Pack, indices: Iterable[int]) -> bool:
        """These blocks of a pack are damaged; whether a good one is left."""
        with self._lock:
            keys = pack.keys()
            pack.dropped = pack.dropped.union(indices if keys else ())
            for index in pack.dropped:
                self._drop(keys[index], pack)
            return len(pack.dropped) < len(keys)

    def used(self, pack: Pack, used_ns: int) -> None:
        """A pack was read: it goes behind those that were read before."""
        pack.used_ns = max(pack.used_ns, used_ns)  # its entry in the heap follows when it is next in line

    def take_oldest(self) -> Pack | None:
        """The pack that was used longest ago, as far as is known. It stays; it is in the queue no more until `queue`,
        and so is offered once."""
        with self._lock:
            while self._oldest:
                queued_ns, name = heappop(self._oldest)
                pack = self._packs.get(name)
                if pack is None or pack.queued_ns != queued_ns:
                    continue
                if pack.used_ns == queued_ns:
                    pack.queued_ns = _NOT_QUEUED
                    return pack
                self._push(pack)
            return None

    def queue(self, pack: Pack, used_ns: int) -> None:
        """Put a pack that was taken back in line."""
        with self._lock:
            pack.used_ns = used_ns
            if self._packs.get(pack.name) is pack:
                self._push(pack)

    def _push(self, pack: Pack) -> None:
        pack.queued_ns = pack.used_ns
        heappush(self._oldest, (pack.used_ns, pack.name))
        self._trim()

    def _trim(self) -> None:
        if len(self._oldest) > 2 * len(self._packs) + _SPARE_ENTRIES:
            self._rebuild()

    def _rebuild(self) -> None:
        packs = self._packs.values()
        self._oldest = [(pack.queued_ns, pack.name) for pack in packs if pack.queued_ns != _NOT_QUEUED]
        heapify(self._oldest)

    def _drop(self, key: bytes, pack: Pack) -> bool:
        """Read the block from another pack, where there is one; whether it is lost."""
        slot = self._slots.get(key)
        spare = [other for other in self._spare.pop(key, ()) if other // MAX_BLOCKS != pack.number]
        is_lost = False
        if slot is not None and slot // MAX_BLOCKS == pack.number:
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
        return Slot(self._numbers[number], place)

    def _bring_back(self, now: int) -> None:
        late = sorted((pack for pack in self._packs.values() if pack.used_ns > now), key=lambda pack: pack.used_ns)
        for place, pack in enumerate(late, now - len(late)):
            pack.used_ns = place
            if pack.queued_ns != _NOT_QUEUED:
                pack.queued_ns = place
        self._last_ns = now
        self._rebuild()
