"""A folder of packs that several processes share: what is in it, what may be added, what goes first.

The folder is the truth and `catalog.py` follows it: a pack that another process added is found in the journal, one that
was taken away is missed when it is opened, and everything is listed at the start, where the journal is not whole, and
now and then where room is short. A pack's modification time is when it was last used.

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
from pathlib import Path

from ..checksums import CRC_BYTES
from .catalog import SKEW_NS, Pack, PackCatalog
from .descriptors import OpenPacks
from .journal import Journal, Record
from .layout import FolderLayout
from .packs import PackHeader, name_and_keys, outline, pack_bytes, read_header
from .temporaries import Temporaries, Temporary

_LIST_NS = 10 * 10**9
"""Room that others have made is found where they must have made it: among what was used longest ago. What an operator
deletes may be anything, and is found this long behind it."""
_TELL_NS = 10**9
_AT_ONCE = 1000  # records taken in while the catalog is locked
_COPIES = 2  # of the journal: while a new one is written the old one is there


def room_bytes(count: int, block_bytes: int, checksum_bytes: int = CRC_BYTES) -> int:
    """What a pack of so many blocks takes of the capacity: its file, and what is written of it in the journal."""
    size = pack_bytes(count, block_bytes, checksum_bytes)
    return size + _COPIES * (size - count * block_bytes)


@dataclass(slots=True)
class Reservation:
    """New temporary files, None where there was no room; what was evicted; the last error."""

    files: list[Temporary | None] = field(default_factory=list)
    evicted_blocks: int = 0
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
        self.catalog = PackCatalog(clock)
        """What is known of what lies there; looks at no file."""
        self.opened = OpenPacks(self.layout)
        """What of it is being read."""
        self._identity = identity
        self._block_bytes = block_bytes
        self._capacity = capacity
        self._clock = clock
        self._temporaries = Temporaries(self.layout.temporaries)
        self._journal = Journal(self.layout.index)
        self._journal_lock = threading.RLock()
        self._listed_ns: int | None = None  # when everything was listed; None where that must be done
        self._read_lock = threading.Lock()
        self._read: dict[str, Pack] = {}  # since `_told_ns`, when the folder was told
        self._told_ns = 0
        self._missed: dict[str, None] = {}  # packs without a file, to be looked for when nobody is adding any
        self._told: dict[str, None] = {}  # packs that the journal has told of since everything was listed

    def recover(self) -> None:
        """Take in what lies there, and see to it that the next start is quick. Raises OSError."""
        self.catch_up()  # also where nobody lets us have the lock
        with self.layout.exclusive():
            self._temporaries.clear()
            self._refresh()
            self._renew_journal()

    def catch_up(self) -> None:
        """Take in what other processes have added, as far as it can be read."""
        with self._journal_lock:
            records = self._journal.read()
            limit, times = self.catalog.now(), []
            for time_ns, _ in reversed(records):  # they were written in this order, whatever clocks said
                limit = min(limit - 1, time_ns)
                times.append(limit)
            times.reverse()
            for start in range(0, len(records), _AT_ONCE):
                part = slice(start, start + _AT_ONCE)
                self.catalog.add(self._new_packs(records[part], times[part]))

    def missed(self, name: str) -> None:
        """The file of this pack cannot be read: it is not there any more, or not yet, or the disk does not give it. It
        is looked for again when something is next written."""
        self.opened.drop(name)
        self.catalog.forget(name)
        self._missed[name] = None

    @contextmanager
    def reading(self, packs: Sequence[Pack]) -> Iterator[None]:
        """Within, these packs are read: they may stay open, and are used. The folder is told once for all batches that
        are read at a time, behind the last of them, or after a second."""
        now = self.catalog.now()
        for pack in packs:
            self.catalog.used(pack, now)
        with self.opened.batch():
            yield
        with self._read_lock:
            self._read.update((pack.name, pack) for pack in packs)
            if self.opened.is_in_use and abs(now - self._told_ns) < _TELL_NS:
                return
            read, self._read, self._told_ns = self._read, {}, now
        self._tell(read.values())

    def used(self, packs: Iterable[Pack]) -> None:
        """These packs were read, or are to be kept: they go last. It is found out which of them are gone. Failing to
        note it is no fault."""
        now = self.catalog.now()
        used = list(packs)
        for pack in used:
            self.catalog.used(pack, now)
        self._tell(used)

    def reserve(self, headers: Sequence[PackHeader]) -> Reservation:
        """Temporary files for such packs, each to be given to `commit` or deleted. Raises OSError."""
        result = Reservation()
        if not headers:
            return result
        rooms = [room_bytes(len(header.keys), self._block_bytes, header.checksum_bytes) for header in headers]
        packs = [(header.file_bytes, room) for header, room in zip(headers, rooms, strict=True)]
        with self.layout.exclusive():
            taken = self._temporaries.clear() + _COPIES * self._journal.num_bytes()
            self.catch_up()
            is_short = taken + self.catalog.used_bytes + sum(room for _, room in packs) > self._capacity
            if not self._is_listed() or not self._journal.is_whole or (is_short and self._was_listed_long_ago()):
                self._refresh()
            elif is_short:
                self._look_at_told()
            self._look_again()
            for size, room in packs:
                result.evicted_blocks += self._make_room(taken + room - self._capacity)
                try:
                    fits = taken + self.catalog.used_bytes + room <= self._capacity
                    result.files.append(self._temporaries.new(size) if fits else None)
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
            with self._journal_lock:
                self._renew_journal()
                self._journal.append(records)
            return [self._rename(file, record) for (file, _), record in zip(files, records, strict=True)]

    def remove(self, pack: Pack) -> int:
        """Delete a pack; how many blocks can be read no more. What cannot be deleted counts, and is tried again."""
        self.opened.drop(pack.name)
        try:
            os.unlink(self.layout.path(pack.name))
        except FileNotFoundError:
            self.missed(pack.name)
            return 0
        except OSError:
            return self.catalog.hide(pack)
        return self.catalog.forget(pack.name)

    def read_anew(self, name: str) -> PackHeader | None:
        """The header in the file of this pack, not that in the journal; None where it is damaged. Raises OSError."""
        _, header, _ = read_header(self.layout.path(name))
        return header

    def _tell(self, packs: Iterable[Pack]) -> None:
        """Others, and the next start, when these were used."""
        for pack in packs:
            try:
                os.utime(self.layout.path(pack.name), ns=(pack.used_ns, pack.used_ns))
            except FileNotFoundError:
                self.missed(pack.name)
            except OSError:
                continue

    def _is_listed(self) -> bool:
        return self._listed_ns is not None

    def _was_listed_long_ago(self) -> bool:
        return self._listed_ns is None or abs(self._clock() - self._listed_ns) > _LIST_NS

    def _refresh(self) -> None:
        """Take in what lies there and what is gone. The caller holds the folder's lock. Raises OSError where the size
        of anything cannot be known: room is not to be made by guess."""
        self._listed_ns = None
        self.layout.claim()
        self.catch_up()
        self._told.clear()
        for name in sorted(self.catalog.keep(self.layout.pack_names())):  # in one order: a run is repeatable
            if (pack := self._read_pack(name)) is not None:
                self.catalog.add([pack])
        self._listed_ns = self._clock()

    def _look_again(self) -> None:
        """For packs that were missed. The caller holds the folder's lock. Raises OSError as `_refresh` does."""
        for name in list(self._missed):
            if name not in self.catalog and (pack := self._read_pack(name)) is not None:
                self.catalog.add([pack])
            del self._missed[name]

    def _look_at_told(self) -> None:
        """Forget what the journal has told of and never came: good packs are not to make room for it. The caller holds
        the folder's lock, so nobody is about to rename one. Raises OSError where that cannot be known."""
        for name in self._told:
            try:
                os.lstat(self.layout.path(name))
            except FileNotFoundError:
                self.catalog.forget(name)
        self._told.clear()

    def _new_packs(self, records: Sequence[Record], times: Sequence[int]) -> Iterator[tuple[Pack, Sequence[bytes]]]:
        """Those of these records that are not known yet, each with the time of its use."""
        for (_, text), used_ns in zip(records, times, strict=True):
            name, keys = name_and_keys(text)
            if name not in self.catalog:
                self._told[name] = None
                yield self._pack(name, used_ns, text, keys)

    def _read_pack(self, name: str) -> tuple[Pack, Sequence[bytes]] | None:
        """As it lies there; None where it has vanished. Raises OSError where not even its size can be had."""
        path, header = self.layout.path(name), None
        try:
            try:
                status, header, _ = read_header(path)
            except OSError:
                status = os.stat(path)
        except FileNotFoundError:
            return None
        used_ns = min(status.st_mtime_ns, self.catalog.now())
        if header is None:
            return Pack(name, status.st_size, used_ns, None), ()
        return self._pack(name, used_ns, header.text(), header.keys)

    def _renew_journal(self) -> None:
        """See to it that the journal is whole. The caller holds the folder's lock. Raises OSError."""
        with self._journal_lock:
            self.catch_up()
            if self._journal.is_whole and not self._journal.is_wasteful(len(self.catalog)):
                return
            self._refresh()
            self._journal.replace(self._records(), self._temporaries.new(0))
            self.catch_up()
            if not self._journal.is_whole:  # the disk does not hold what was written a moment ago
                raise OSError(errno.EIO, "the index cannot be read back", str(self.layout.index))

    def _records(self) -> list[Record]:
        """Of all packs of any identity, the least recently used first."""
        packs = self.catalog.packs()
        known = {pack.name: pack.text for pack in packs if pack.text is not None}
        if len(known) < len(packs):
            known |= {name_and_keys(text)[0]: text for _, text in Journal(self.layout.index).read()}
        texts = ((pack.used_ns, known.get(pack.name) or self._try_text(pack.name)) for pack in packs)
        return [(used_ns, text) for used_ns, text in texts if text is not None]

    def _try_text(self, name: str) -> bytes | None:
        try:
            header = self.read_anew(name)
        except OSError:
            return None
        return header.text() if header is not None else None

    def _pack(self, name: str, used_ns: int, text: bytes, keys: Sequence[bytes]) -> tuple[Pack, Sequence[bytes]]:
        """As its header says; of another identity or block size it only takes room. And the keys that it has for us."""
        found = outline(text)
        if found.identity == self._identity and found.block_bytes == self._block_bytes:
            return Pack(name, found.file_bytes, used_ns, text), keys
        return Pack(name, found.file_bytes, used_ns, None), ()

    def _rename(self, file: Temporary, record: Record) -> OSError | None:
        now, text = record
        name, keys = name_and_keys(text)
        try:
            os.utime(file.path, ns=(now, now))  # the system's own time stamps are coarse
            try:
                os.rename(file.path, self.layout.path(name))
            except (FileNotFoundError, IsADirectoryError):
                self.layout.clear_the_way(name)
                os.rename(file.path, self.layout.path(name))
        except OSError as error:
            return error
        self.catalog.add([self._pack(name, now, text, keys)])
        return None

    def _make_room(self, beyond: int) -> int:
        """Evict packs until `used_bytes` plus `beyond` is not above 0; blocks gone."""
        num_blocks, stuck = 0, []
        while self.catalog.used_bytes + beyond > 0 and (pack := self.catalog.take_oldest()) is not None:
            used_ns = self._used_since(pack)
            if used_ns > pack.used_ns:  # another process used it: not the oldest after all
                self.catalog.queue(pack, used_ns)
                continue
            num_blocks += self.remove(pack)
            if pack.name in self.catalog:
                stuck.append(pack)
        for pack in stuck:
            self.catalog.queue(pack, pack.used_ns)
        return num_blocks

    def _used_since(self, pack: Pack) -> int:
        """When it was used according to the folder. A time that has not come says nothing: a clock was wrong once."""
        try:
            used_ns = os.stat(self.layout.path(pack.name)).st_mtime_ns
        except OSError:
            return pack.used_ns
        return used_ns if used_ns <= self.catalog.now() + SKEW_NS else pack.used_ns
