"""Packs that are open to be read: while batches are under way, each is opened once for all of them.

A file that is open takes room on the disk also when another process has deleted it. So nothing stays open once no batch
is read any more, of those in between at most `MOST_OPEN`, the ones that were read last, and none that is known to be
gone or could not be read. A descriptor is closed only when nobody uses it: its number may be another file's at once.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from .layout import FolderLayout
from .packs import open_file

MOST_OPEN = 128
"""An eighth of the 1,024 that a process may have open where nobody has raised that."""


@dataclass(slots=True, eq=False)
class OpenPack:
    """A file that somebody reads, or may read next. `is_kept` until it is to be closed behind its last user."""

    name: str
    flags: int
    descriptor: int
    num_users: int = 1
    is_kept: bool = True


class OpenPacks:
    """See the module. Any thread may call; no file is touched under the lock."""

    def __init__(self, layout: FolderLayout) -> None:
        self._layout = layout
        self._lock = threading.Lock()
        self._open: dict[tuple[str, int], OpenPack] = {}  # by name and flags, the ones that were read last behind
        self._num_batches = 0

    @property
    def is_in_use(self) -> bool:
        """Whether a batch is being read."""
        return self._num_batches > 0

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Within, packs are read: they may stay open."""
        with self._lock:
            self._num_batches += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_batches -= 1
                idle = self._take_idle(0) if not self._num_batches else []
            _close(idle)

    def borrow(self, name: str, flags: int) -> OpenPack:
        """A pack, open with these flags, to be given back. Raises OSError."""
        with self._lock:
            pack = self._open.pop((name, flags), None)
            if pack is not None:
                self._open[name, flags] = pack  # behind the others
                pack.num_users += 1
                return pack
        made = OpenPack(name, flags, self._open_file(name, flags))
        with self._lock:
            made.is_kept = self._open.setdefault((name, flags), made) is made
            idle = self._take_idle(MOST_OPEN)
        _close(idle)
        return made

    def give_back(self, pack: OpenPack) -> None:
        """Who borrowed it uses it no more."""
        with self._lock:
            pack.num_users -= 1
            is_over = not pack.is_kept and not pack.num_users
        if is_over:
            _close([pack])

    def drop(self, name: str) -> None:
        """This pack is gone, or to be opened anew: nobody borrows what is open of it any more."""
        with self._lock:
            dropped = [pack for flags in (0, os.O_DIRECT) if (pack := self._open.pop((name, flags), None)) is not None]
            for pack in dropped:
                pack.is_kept = False
            idle = [pack for pack in dropped if not pack.num_users]
        _close(idle)

    def _open_file(self, name: str, flags: int) -> int:
        path = self._layout.path(name)
        try:
            return open_file(path, os.O_RDONLY | flags)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        with self._lock:
            idle = self._take_idle(0)
        _close(idle)
        return open_file(path, os.O_RDONLY | flags)

    def _take_idle(self, most: int) -> list[OpenPack]:
        """Those that nobody uses and that are to be closed, so that no more than `most` stay open."""
        count = len(self._open) - most
        idle = [pack for pack in self._open.values() if not pack.num_users][: max(0, count)] if count > 0 else []
        for pack in idle:
            del self._open[pack.name, pack.flags]
        return idle


def _close(packs: list[OpenPack]) -> None:
    for pack in packs:
        with suppress(OSError):  # a network file system may say so here: what was read was checked
            os.close(pack.descriptor)
