"""A folder of packs that several processes share: what may be added, what is evicted first. A pack's modification time
is when it was last used. What is in it `contents.py` finds out: at the start, before room is made, and where a lookup
misses. It is listed anew now and then where room is short.

Packs are told of in the journal and renamed under the folder's lock, so whoever holds it and reads a whole journal
knows of every pack. Who holds what: the folder's lock (`layout.py`) while room is made and packs are added, in it the
journal's lock while that is read or written, in it the catalog's lock, under which no file is touched.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from ..checksums import CRC_BYTES
from .catalog import SKEW_NS, Pack
from .contents import FolderContents
from .descriptors import OpenPacks
from .journal import Record
from .layout import FolderLayout
from .packs import PackHeader, pack_bytes
from .temporaries import Temporaries, Temporary

T = TypeVar("T")
_LIST_NS = 10 * 10**9
"""Room that others have made is found where they must have made it: among what was used longest ago. What an operator
deletes may be anything, and is found this long behind it."""
_TELL_NS = 10**9
_COPIES = 2  # of the journal: while a new one is written the old one is there


def room_bytes(count: int, block_bytes: int, checksum_bytes: int = CRC_BYTES) -> int:
    """What a pack of so many blocks takes of the capacity: its file, and what is written of it in the journal."""
    size = pack_bytes(count, block_bytes, checksum_bytes)
    return size + _COPIES * (size - count * block_bytes)


@dataclass(slots=True)
class Reservation:
    """New temporary files, None where there was no room; the last error."""

    files: list[Temporary | None] = field(default_factory=list)
    error: OSError | None = None


class PackFolder:
    """A folder as it is used for one identity. Any thread may call."""

    def __init__(
        self, root: Path, identity: bytes, block_bytes: int, capacity: int, clock: Callable[[], int] = time.time_ns
    ) -> None:
        """Makes the folder, for this user only. `capacity` in bytes, over all processes. Raises OSError, also for a
        folder that is somebody else's."""
        self.layout = FolderLayout(root)
        self.layout.claim()
        self.layout.warn_of_others()
        self.opened = OpenPacks(self.layout)
        """What of it is being read."""
        self._block_bytes = block_bytes
        self._capacity = capacity
        self._temporaries = Temporaries(self.layout.temporaries)
        self.contents = FolderContents(self.layout, self._temporaries, identity, block_bytes, capacity, clock)
        """What lies there, and what else is known of it."""
        self.catalog = self.contents.catalog
        """See `FolderContents`."""
        self.evicted_blocks = 0
        """Of all packs that made room, since the folder was opened."""
        self._read_lock = threading.Lock()
        self._read: dict[str, Pack] = {}  # since `_told_ns`, when the folder was told
        self._told_ns = 0
        self._may_evict = True  # on a full disk: see `_evicting`

    def recover(self) -> None:
        """Take in what lies there, and see to it that the next start is quick. Raises OSError."""
        self.contents.catch_up()  # also where nobody lets us have the lock
        with self.layout.exclusive():
            self._temporaries.clear()
            self.contents.recover()

    def missed(self, name: str) -> None:
        """The file of this pack cannot be read: it is not there any more, or not yet, or the disk does not give it. It
        is looked for again when something is next written."""
        self.opened.drop(name)
        self.contents.missed(name)

    @contextmanager
    def reading(self, packs: Sequence[Pack]) -> Iterator[None]:
        """Within, these packs are read: they may stay open, and are used. The folder is told once for all batches that
        are read at a time, behind the last of them, or after a second."""
        now = self.catalog.now()
        self.catalog.used(packs, now)
        with self.opened.batch():
            yield
        with self._read_lock:
            self._read.update((pack.name, pack) for pack in packs)
            if self.opened.is_in_use and abs(now - self._told_ns) < _TELL_NS:
                return
            read, self._read, self._told_ns = self._read, {}, now
        self._tell(read.values(), now)

    def used(self, packs: Iterable[Pack]) -> None:
        """These packs were read, or are to be kept: they go last. It is found out which of them are gone. Failing to
        note it is no fault."""
        now = self.catalog.now()
        used = list(packs)
        self.catalog.used(used, now)
        self._tell(used, now)

    def reserve(self, headers: Sequence[PackHeader]) -> Reservation:
        """Temporary files for such packs, each to be given to `commit` or deleted. Raises OSError."""
        result = Reservation()
        if not headers:
            return result
        rooms = [room_bytes(len(header.keys), self._block_bytes, header.checksum_bytes) for header in headers]
        packs = [(header.file_bytes, room) for header, room in zip(headers, rooms, strict=True)]
        with self.layout.exclusive():
            self.contents.drop_long_journal()  # it takes no room of good packs
            taken = self._temporaries.clear() + _COPIES * self.contents.journal_bytes()
            self.contents.catch_up()
            is_short = taken + self.catalog.used_bytes + sum(room for _, room in packs) > self._capacity
            if not self.contents.is_known or (is_short and self.contents.was_listed_before(_LIST_NS)):
                self.contents.list_all()
            elif is_short:
                self.contents.look_at_told()
            self.contents.look_again()
            for size, room in packs:
                self._make_room(taken + room - self._capacity)
                try:
                    fits = taken + self.catalog.used_bytes + room <= self._capacity
                    result.files.append(self._evicting(partial(self._temporaries.new, size), size) if fits else None)
                except OSError as error:
                    result.files.append(None)
                    result.error = error
                taken += room if result.files[-1] is not None else 0
        return result

    def commit(self, files: Sequence[tuple[Temporary, PackHeader]]) -> list[OSError | None]:
        """The files are whole: they become packs; for each what went wrong with it. Raises OSError where none does.

        They are told of before they are renamed, so that what a process leaves that is killed in between is counted: a
        record without a pack is a miss.
        """
        if not files:
            return []
        records = [(self.catalog.now(), header.text()) for _, header in files]
        with self.layout.exclusive():
            # There may be room for the files and none for the index, which may have to be written anew.
            size = self.contents.journal_bytes() + sum(header.file_bytes for _, header in files)
            self._evicting(partial(self.contents.tell, records), size)
            return [self._rename(file, record) for (file, _), record in zip(files, records, strict=True)]

    def remove(self, pack: Pack) -> int:
        """Delete a pack; how many blocks can be read no more. What cannot be deleted counts, and is tried again."""
        num_blocks = self._delete(pack)
        return self.catalog.hide(pack) if num_blocks is None else num_blocks

    def _evicting(self, call: Callable[[], T], size: int) -> T:
        """Make a call that writes. Evicts on a full disk as where the capacity is reached, twice the `size` of what is
        added, as other files grow too. Where that did not help somebody else takes the room, and nothing more is
        evicted for it before something was written. Raises OSError."""
        try:
            result = call()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._may_evict:
                raise
            self._may_evict = False
            self._make_room(2 * size - self.catalog.used_bytes)
            result = call()
        self._may_evict = True
        return result

    def _delete(self, pack: Pack) -> int | None:
        """How many blocks have gone with its file; None where that cannot be deleted."""
        self.opened.drop(pack.name)
        try:
            os.unlink(self.layout.path(pack.name))
        except FileNotFoundError:
            self.missed(pack.name)
            return 0
        except OSError:
            return None
        return self.catalog.forget(pack.name)

    def _tell(self, packs: Iterable[Pack], now: int) -> None:
        """Others, and the next start, when these were used; of those that nobody knows any more, now."""
        for pack in packs:
            used_ns = self.catalog.used_ns(pack, now)
            try:
                os.utime(self.layout.path(pack.name), ns=(used_ns, used_ns))
            except FileNotFoundError:
                self.missed(pack.name)
            except OSError:
                continue

    def _rename(self, file: Temporary, record: Record) -> OSError | None:
        now, text = record
        facts, keys = self.contents.pack(now, text)
        name = facts[0]
        try:
            os.utime(file.path, ns=(now, now))  # the system's own time stamps are coarse
            try:
                os.rename(file.path, self.layout.path(name))
            except (FileNotFoundError, IsADirectoryError):
                self.layout.clear_the_way(name)
                os.rename(file.path, self.layout.path(name))
        except OSError as error:
            return error
        self.catalog.add([(facts, keys)])
        return None

    def _make_room(self, beyond: int) -> None:
        """Evict packs until `used_bytes` plus `beyond` is not above 0; those that cannot be deleted are read on."""
        stuck = []
        while self.catalog.used_bytes + beyond > 0 and (oldest := self.catalog.take_oldest()) is not None:
            pack, known_ns = oldest
            used_ns = self._used_since(pack, known_ns)
            if used_ns > known_ns:  # another process used it: not the oldest after all
                self.catalog.queue(pack, used_ns)
                continue
            if (num_blocks := self._delete(pack)) is None:
                stuck.append(oldest)
            else:
                self.evicted_blocks += num_blocks
        for pack, known_ns in stuck:
            self.catalog.queue(pack, known_ns)

    def _used_since(self, pack: Pack, known_ns: int) -> int:
        """When it was used according to the folder. A time that has not come says nothing: a clock was wrong once."""
        try:
            used_ns = os.stat(self.layout.path(pack.name)).st_mtime_ns
        except OSError:
            return known_ns
        return used_ns if used_ns <= self.catalog.now() + SKEW_NS else known_ns
