"""Finds the packs of a folder, by the journal, a listing and single files, and puts them into the catalog, and from
there into a new journal where the old one is damaged.

The folder is the truth and `catalog.py` follows it: a pack that another process added is found in the journal, one that
was taken away is missed when it is opened, and everything is listed at the start, where the journal is not whole, and
when it is asked for. A start makes nothing of a pack but what the catalog keeps, and looks at its header once.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from .catalog import Facts, PackCatalog
from .journal import Journal, Record, most_bytes
from .layout import FolderLayout
from .packs import PackHeader, read_header, summary
from .temporaries import Temporaries

_AT_ONCE = 1000  # records taken in while the catalog is locked


class FolderContents:
    """See the module. Any thread may call; some calls need the folder's lock, and within it the journal's is taken."""

    def __init__(
        self,
        layout: FolderLayout,
        temporaries: Temporaries,
        identity: bytes,
        block_bytes: int,
        capacity: int,
        clock: Callable[[], int],
    ) -> None:
        """Looks at nothing yet. Packs of another identity (32 bytes) or block size only take room. What the journal may
        say follows from `capacity`, in bytes."""
        self.catalog = PackCatalog(clock)
        """What is known of what lies there; looks at no file."""
        self._layout = layout
        self._temporaries = temporaries
        self._identity = identity
        self._block_bytes = block_bytes
        self._clock = clock
        self._capacity = capacity
        self._journal = Journal(layout.index, most_bytes(capacity))
        self._journal_lock = threading.RLock()
        self._listed_ns: int | None = None  # when everything was listed; None where that must be done
        self._missed: dict[str, None] = {}  # packs without a file, to be looked for when nobody is adding any
        self._told: list[str] = []  # packs that the journal has told of since everything was listed

    @property
    def is_known(self) -> bool:
        """Whether everything was listed, and the journal has told of all that came since."""
        return self._listed_ns is not None and self._journal.is_whole

    def was_listed_before(self, num_ns: int) -> bool:
        """Whether that is longer ago than this, whatever clocks said."""
        return self._listed_ns is None or abs(self._clock() - self._listed_ns) > num_ns

    def journal_bytes(self) -> int:
        """Length of the journal."""
        return self._journal.num_bytes()

    def drop_long_journal(self) -> None:
        """Where the journal is longer than it may be. The caller holds the folder's lock. Raises OSError."""
        with self._journal_lock:
            self._journal.drop_where_too_long()

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

    def list_all(self) -> None:
        """Take in what lies there and what is gone. The caller holds the folder's lock. Raises OSError where the size
        of anything cannot be known: room is not to be made by guess."""
        self._listed_ns = None
        self.catch_up()
        self._told.clear()
        for name in sorted(self.catalog.keep(self._layout.pack_names())):  # in one order: a run is repeatable
            self._look_at(name)
        self._listed_ns = self._clock()

    def missed(self, name: str) -> None:
        """The file of this pack cannot be read. It is looked for again by `look_again`."""
        self.catalog.forget(name)
        self._missed[name] = None

    def look_again(self) -> None:
        """For packs that were missed. The caller holds the folder's lock. Raises OSError as `list_all` does."""
        for name in list(self._missed):
            del self._missed[name]  # first: who misses it meanwhile marks it anew
            try:
                if name not in self.catalog:
                    self._look_at(name)
            except OSError:
                self._missed[name] = None
                raise

    def look_at_told(self) -> None:
        """Forget what the journal has told of and never came: good packs are not to make room for it. The caller holds
        the folder's lock, so nobody is about to rename one. Raises OSError where that cannot be known."""
        for name in self._told:
            try:
                os.lstat(self._layout.path(name))
            except FileNotFoundError:
                self.catalog.forget(name)
        self._told.clear()

    def tell(self, records: Sequence[Record]) -> None:
        """Of packs that are about to lie there. The caller holds the folder's lock. Raises OSError."""
        with self._journal_lock:
            self._renew_journal()
            self._journal.append(records)

    def pack(self, used_ns: int, text: bytes) -> tuple[Facts, Sequence[bytes]]:
        """For the catalog, what this header says; of another identity or block size the pack only takes room."""
        found, name, keys = summary(text)
        if found.identity == self._identity and found.block_bytes == self._block_bytes:
            return (name, found.file_bytes, used_ns, text), keys
        return (name, found.file_bytes, used_ns, None), ()

    def recover(self) -> None:
        """Take in what lies there, and see to it that the journal is whole. The caller holds the folder's lock. Raises
        OSError."""
        self.list_all()  # once: beside a thread that never rests it takes seconds
        with self._journal_lock:
            if not self._is_journal_good():
                self._write_journal()

    def _renew_journal(self) -> None:
        """See to it that the journal is whole. The caller holds both locks. Raises OSError."""
        self.catch_up()
        if not self._is_journal_good():
            self.list_all()
            self._write_journal()

    def _is_journal_good(self) -> bool:
        return self._journal.is_whole and not self._journal.is_wasteful(len(self.catalog))

    def _write_journal(self) -> None:
        """From the catalog. The caller holds both locks. Raises OSError."""
        self._journal.replace(self._records(), self._temporaries.new(0))
        self.catch_up()
        if not self._journal.is_whole:  # the disk does not hold what was written a moment ago
            raise OSError(errno.EIO, "the index cannot be read back", str(self._layout.index))

    def read_anew(self, name: str) -> PackHeader | None:
        """The header in the file of this pack, not that in the journal; None where it is damaged. Raises OSError."""
        _, header, _ = read_header(self._layout.path(name))
        return header

    def _new_packs(self, records: Iterable[Record], times: Iterable[int]) -> Iterator[tuple[Facts, Sequence[bytes]]]:
        """Those of these records that are not known yet, each with the time of its use. What claims more than the
        capacity is no pack that was made to lie here: it takes what its file takes, once that is listed."""
        for (_, text), used_ns in zip(records, times, strict=True):
            facts, keys = self.pack(used_ns, text)
            if facts[0] not in self.catalog and facts[1] <= self._capacity:
                self._told.append(facts[0])
                yield facts, keys

    def _look_at(self, name: str) -> None:
        """Take in a pack as it lies there, where it has not vanished. Raises OSError where not even its size can be
        had."""
        path, header = self._layout.path(name), None
        try:
            try:
                status, header, _ = read_header(path)
            except OSError:
                status = os.stat(path)
        except FileNotFoundError:
            return
        used_ns = min(status.st_mtime_ns, self.catalog.now())
        if header is None:
            self.catalog.add([((name, status.st_size, used_ns, None), ())])
        else:
            self.catalog.add([self.pack(used_ns, header.text())])

    def _records(self) -> list[Record]:
        """Of all packs of any identity, the least recently used first."""
        packs = self.catalog.packs()
        others: dict[str, bytes] = {}
        if any(text is None for _, _, _, text in packs):
            others = {
                summary(text)[1]: text for _, text in Journal(self._layout.index, most_bytes(self._capacity)).read()
            }
        texts = ((used_ns, text or others.get(name) or self._try_text(name)) for name, _, used_ns, text in packs)
        return [(used_ns, text) for used_ns, text in texts if text is not None]

    def _try_text(self, name: str) -> bytes | None:
        try:
            header = self.read_anew(name)
        except OSError:
            return None
        return header.text() if header is not None else None
