"""Blocks into new packs: files get their full length, then their blocks, then the header with its checksums, and are
renamed when they are whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ..base import ThreadedStorage
from ..checksums import BlockCheck
from .folder import PackFolder
from .packs import PackHeader
from .temporaries import Temporary
from .transfers import are_aligned, blocks_per_piece, move, set_flags


@dataclass(slots=True)
class PackWrite:
    """A pack on its way: its header, which gets its checksums last, its blocks, the temporary file, the checksums."""

    header: PackHeader
    buffers: list[memoryview]
    file: Temporary
    checksums: list[bytes]
    error: OSError | None = None


class PackWriter:
    """See the module. Any thread may call."""

    def __init__(
        self, folder: PackFolder, storage: ThreadedStorage, block_bytes: int, is_direct: bool, check: BlockCheck
    ) -> None:
        """`storage` logs what becomes of packs; `is_direct` says whether the file system allows to pass by the page
        cache; `check` makes their checksums."""
        self._folder = folder
        self._check = check
        self._storage = storage
        self._length = blocks_per_piece(block_bytes)
        self._is_direct = is_direct

    def begin(self, header: PackHeader, buffers: list[memoryview], file: Temporary) -> PackWrite:
        """A pack for these blocks, in this file. `header` has checksums of the right length, and any value."""
        flags = os.O_DIRECT if self._is_direct and are_aligned(buffers) else 0
        set_flags(file.descriptor, flags)
        return PackWrite(header, buffers, file, list(header.checksums))

    def calls(self, pack: PackWrite) -> list[Callable[[], None]]:
        """What writes its blocks behind the header, in any order and on any threads."""
        numbers = range(len(pack.buffers))
        return [partial(self._write, pack, numbers[i : i + self._length]) for i in numbers[:: self._length]]

    def complete(self, packs: list[PackWrite]) -> list[PackHeader]:
        """Make files packs, where all of their blocks were written; those that are now."""
        whole = [pack for pack in packs if self._finish(pack)]
        faults: list[OSError | None]
        try:
            faults = self._folder.commit([(pack.file, pack.header) for pack in whole])
        except OSError as error:
            faults = [error] * len(whole)
        for pack, fault in zip(whole, faults, strict=True):
            if fault is None:
                pack.file.close()
                self._storage.note_success()
            else:
                self._give_up(pack, fault)
        return [pack.header for pack, fault in zip(whole, faults, strict=True) if fault is None]

    def _write(self, pack: PackWrite, piece: range) -> None:
        buffers = [pack.buffers[i] for i in piece]
        try:
            for i, buffer in zip(piece, buffers, strict=True):
                pack.checksums[i] = self._check.of(pack.header.keys[i], buffer)
            move(os.pwritev, pack.file.descriptor, buffers, pack.header.offset(piece[0]))
        except OSError as error:
            pack.error = error

    def _finish(self, pack: PackWrite) -> bool:
        """Write the header; whether the file is whole."""
        pack.header = replace(pack.header, checksums=tuple(pack.checksums))
        try:
            if pack.error is not None:
                raise pack.error
            set_flags(pack.file.descriptor, 0)
            os.pwrite(pack.file.descriptor, pack.header.encode(), 0)
        except OSError as error:
            self._give_up(pack, error)
            return False
        return True

    def _give_up(self, pack: PackWrite, error: OSError) -> None:
        self._storage.note_fault("cannot write", error)
        pack.file.delete()
