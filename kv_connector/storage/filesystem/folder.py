"""A folder of packs that several processes share: what is in it, what may be added, what goes first.

    ROOT/lock        held while room is made, so that no two processes count on the same bytes
    ROOT/index       the packs' headers, so that a start or a look-up opens one file and not all (`journal.py`)
    ROOT/tmp/        packs that are being written
    ROOT/00 .. ff/   packs, by the first digits of their names

The folder is the truth and this index follows it: a pack that another process added is found in the journal, one that
was taken away is missed when it is opened, and where room is short sub-folders that have changed are listed. A pack's
modification time is when it was last used.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path

from .journal import Journal, Record
from .packs import PackHeader, pack_bytes, read_header
from .temporaries import Temporaries

SUFFIX = ".pack"
_SUB_FOLDERS = tuple(f"{i:02x}" for i in range(256))
_SETTLED_NS = 2_000_000_000  # a folder that changed longer ago cannot change again under the same time stamp


_COPIES = 2  # of the journal: while a new one is written the old one is there


def room_bytes(count: int, block_bytes: int) -> int:
    """What a pack of so many blocks takes of the capacity: its file, and what is written of it in the journal."""
    size = pack_bytes(count, block_bytes)
    return size + _COPIES * (size - count * block_bytes)


@dataclass(slots=True)
class Pack:
    """A file of the folder. `header` is None for one that is not ours: another identity, version or block size. It may
    have been used later than `used_ns` by another process, never earlier."""

    name: str
    num_bytes: int
    used_ns: int
    header: PackHeader | None


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a block lies."""

    pack: Pack
    index: int


@dataclass(slots=True)
class Reservation:
    """Paths and descriptors of new temporary files, None where there was no room; what was evicted; the last error."""

    files: list[tuple[Path, int] | None] = field(default_factory=list)
    evicted_blocks: int = 0
    error: OSError | None = None


class PackFolder:
    """The index of a folder for one identity. Any thread may call."""

    def __init__(
        self, root: Path, identity: bytes, block_bytes: int, capacity: int, clock: Callable[[], int] = time.time_ns
    ) -> None:
        """Makes the folder, for this user only. `capacity` in bytes, over all processes. Raises OSError."""
        self.root = root
        self._identity = identity
        self._block_bytes = block_bytes
        self._capacity = capacity
        self._clock = clock
        self._lock = threading.RLock()
        self._packs: dict[str, Pack] = {}
        self._names: dict[str, set[str]] = {name: set() for name in _SUB_FOLDERS}  # of packs, by sub-folder
        self._slots: dict[bytes, Slot] = {}
        self._seen: dict[str, int] = {}  # sub-folder: its modification time when it was listed
        self._last_ns = 0
        self.used_bytes = 0
        self._make_folders()
        self._temporaries = Temporaries(root / "tmp", clock)
        self._journal = Journal(root / "index")

    def path(self, name: str) -> Path:
        """Where the pack of this name lies."""
        return self.root / name[:2] / (name + SUFFIX)

    def __len__(self) -> int:
        """Blocks that can be read."""
        with self._lock:
            return len(self._slots)

    def slot(self, key: bytes) -> Slot | None:
        """Where a block lies as far as is known; looks at no file."""
        with self._lock:
            return self._slots.get(key)

    def packs(self) -> list[Pack]:
        """All that are known, those of others too, the least recently used first."""
        with self._lock:
            return sorted(self._packs.values(), key=lambda pack: pack.used_ns)

    def recover(self) -> None:
        """Take in what lies there, and see to it that the next start is quick. Raises OSError."""
        self.refresh()
        self.publish(())

    def catch_up(self) -> None:
        """Take in what other processes have published. Raises OSError."""
        with self._lock:
            for record in self._journal.read():
                name, header = record.name, record.header
                if name not in self._packs:
                    self._add(Pack(name, header.file_bytes, record.time_ns, self._ours(header)))

    def refresh(self) -> None:
        """Take in what lies there and what is gone. Raises OSError where the folder cannot be read."""
        self.catch_up()
        now = self._clock()
        for name in _SUB_FOLDERS:
            try:
                changed = os.stat(self.root / name).st_mtime_ns
            except FileNotFoundError:  # somebody deleted it: it is empty now
                self._make_folders()
                changed = os.stat(self.root / name).st_mtime_ns
            if self._seen.get(name) != changed:
                self._list(name)
                self._seen[name] = changed if now - changed > _SETTLED_NS else 0

    def used(self, packs: Iterable[Pack]) -> None:
        """These packs were read: they go last. Failing to note it is no fault."""
        now = self._now()
        for pack in packs:
            pack.used_ns = now
            try:
                os.utime(self.path(pack.name), ns=(now, now))
            except OSError:
                continue

    def reserve(self, counts: Sequence[int]) -> Reservation:
        """Temporary files for packs of so many blocks, each to be given to `commit` or `abandon`. Raises OSError."""
        result = Reservation()
        if not counts:
            return result
        packs = [(pack_bytes(count, self._block_bytes), room_bytes(count, self._block_bytes)) for count in counts]
        with self._exclusive():
            # In this order, so that a file that is renamed meanwhile counts twice and not never.
            taken = self._temporaries.clear() + _COPIES * self._journal.num_bytes()
            self.catch_up()
            is_short = taken + self.used_bytes + sum(room for _, room in packs) > self._capacity
            if is_short:  # else what others have deleted need not be known
                self.refresh()
            oldest = [(pack.used_ns, pack.name) for pack in self.packs()] if is_short else []
            for size, room in packs:
                result.evicted_blocks += self._make_room(taken + room - self._capacity, oldest)
                try:
                    fits = taken + self.used_bytes + room <= self._capacity
                    result.files.append(self._temporaries.new(size) if fits else None)
                except OSError as error:
                    result.files.append(None)
                    result.error = error
                taken += room if result.files[-1] is not None else 0
        return result

    def commit(self, temporary: Path, name: str, header: PackHeader) -> None:
        """The file is whole: it becomes the pack of this name, which was published. Raises OSError."""
        now = self._now()
        os.utime(temporary, ns=(now, now))  # the system's own time stamps are coarse
        os.rename(temporary, self.path(name))
        with self._lock:
            self._add(Pack(name, header.file_bytes, now, header))

    def publish(self, headers: Iterable[PackHeader]) -> None:
        """Tell other processes, and later ones, of packs that are about to be committed. Raises OSError.

        Before, so that what a process leaves that is killed in between is counted: a record without a pack is a miss
        and goes when room is short.
        """
        records = [Record(self._now(), header) for header in headers]
        with self._exclusive():
            self.catch_up()
            if not self._journal.is_whole or self._journal.is_wasteful(len(self._packs)):
                self.refresh()
                self._journal.replace({pack.name for pack in self.packs()}, self._record)
                self.catch_up()
            if not self._journal.is_whole:  # the disk does not hold what was written a moment ago
                raise OSError(errno.EIO, "the index cannot be read back", str(self.root / "index"))
            if records:
                self._journal.append(records)

    def abandon(self, temporary: Path) -> None:
        """The file will not be whole. Where it cannot be deleted it counts until its process is gone."""
        with suppress(OSError):
            temporary.unlink()

    def forget(self, name: str) -> None:
        """Somebody has deleted a pack."""
        with self._lock:
            self._forget(name)

    def remove(self, name: str) -> int:
        """Delete a pack; how many readable blocks it held."""
        with self._lock:
            with suppress(OSError):  # what cannot be deleted cannot be read either
                self.path(name).unlink(missing_ok=True)
            return self._forget(name)

    def _now(self) -> int:
        """Nanoseconds that never go back here, whatever the clock does."""
        with self._lock:
            self._last_ns = max(self._clock(), self._last_ns + 1)
            return self._last_ns

    def _list(self, sub_folder: str) -> None:
        present = {}
        with os.scandir(self.root / sub_folder) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX):
                    present[entry.name.removesuffix(SUFFIX)] = entry
        with self._lock:
            for name in self._names[sub_folder] - present.keys():
                self._forget(name)
            new = [name for name in present if name not in self._packs]
        for name in new:
            pack = self._read_pack(name)
            if pack is not None:
                with self._lock:
                    self._add(pack)

    def _read_pack(self, name: str) -> Pack | None:
        try:
            status, header, _ = read_header(self.path(name))
        except OSError:
            return None  # gone again, or not for us to read
        return Pack(name, status.st_size, status.st_mtime_ns, self._ours(header))

    def _record(self, name: str) -> Record | None:
        """For the journal, of any identity; None for what is no pack."""
        try:
            status, header, _ = read_header(self.path(name))
        except OSError:
            return None
        return Record(status.st_mtime_ns, header) if header is not None else None

    def _ours(self, header: PackHeader | None) -> PackHeader | None:
        """None for another identity or block size."""
        if header is None or (header.identity, header.block_bytes) != (self._identity, self._block_bytes):
            return None
        return header

    def _add(self, pack: Pack) -> None:
        self._forget(pack.name)
        self._packs[pack.name] = pack
        self._names[pack.name[:2]].add(pack.name)
        self.used_bytes += pack.num_bytes
        for index, key in enumerate(pack.header.keys if pack.header is not None else ()):
            self._slots[key] = Slot(pack, index)

    def _forget(self, name: str) -> int:
        pack = self._packs.pop(name, None)
        if pack is None:
            return 0
        self._names[name[:2]].discard(name)
        self.used_bytes -= pack.num_bytes
        keys = pack.header.keys if pack.header is not None else ()
        lost = [key for key in keys if (slot := self._slots.get(key)) is not None and slot.pack is pack]
        for key in lost:
            del self._slots[key]
        return len(lost)

    def _make_room(self, beyond: int, oldest: list[tuple[int, str]]) -> int:
        """Evict packs from the heap `oldest` until `used_bytes` plus `beyond` is not above 0; blocks gone."""
        blocks = 0
        while oldest and self.used_bytes + beyond > 0:
            pack = self._packs.get(heappop(oldest)[1])
            if pack is None:  # it was damaged, and somebody has read it
                continue
            used_ns = self._used_since(pack)
            if used_ns > pack.used_ns:  # another process used it: not the oldest after all
                pack.used_ns = used_ns
                heappush(oldest, (used_ns, pack.name))
            else:
                blocks += self.remove(pack.name)
        return blocks

    def _used_since(self, pack: Pack) -> int:
        try:
            return os.stat(self.path(pack.name)).st_mtime_ns
        except OSError:
            return pack.used_ns

    def _make_folders(self) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("tmp", *_SUB_FOLDERS):
            (self.root / name).mkdir(mode=0o700, exist_ok=True)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._temporaries.folder.is_dir():  # somebody deleted everything
            self._make_folders()
        descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # of this descriptor: other threads wait, too
            yield
        finally:
            os.close(descriptor)
