"""A folder of files as storage: it needs no server, survives restarts, and several processes may share it.

Blocks are written in packs of megabytes, so that a file system is not asked for millions of small files, and read back
one by one: past the page cache where the file system allows it (O_DIRECT), straight between the disk and the caller's
memory, a megabyte at a time and many at a time. Everything that is read is checked against the checksum it was written
with, so nothing is ever forced to the disk: what a loss of power takes is a miss.
"""

from __future__ import annotations

import fcntl
import os
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ..base import MakeExecutor, ThreadedStorage, address
from .folder import Pack, PackFolder, room_bytes
from .packs import MAX_BLOCKS, PAGE, PackHeader, pack_name

PACK_BYTES = 8 << 20
"""A pack holds at least this many bytes of blocks, where a batch has as many: it is opened and evicted as a whole."""
NUM_THREADS = 16
_NUM_BATCHES = 4
_PIECE_BYTES = 1 << 20  # of one task: more is no faster, and leaves threads without work
_BUFFERS_PER_CALL = 256  # of one vectored read or write; the system allows 1,024


@dataclass(slots=True)
class _Writing:
    """A pack on its way: its header, at first without checksums, its blocks, the temporary file, and the checksums."""

    header: PackHeader
    buffers: list[memoryview]
    path: Path
    descriptor: int
    checksums: list[int]
    error: OSError | None = None


class FilesystemStorage(ThreadedStorage):
    """See `Storage`. `identity`, 32 bytes, names everything that must be equal for bytes to be shared."""

    def __init__(
        self,
        path: Path,
        identity: bytes,
        block_bytes: int,
        capacity: int,
        target_bytes: int = PACK_BYTES,
        executor: MakeExecutor = ThreadPoolExecutor,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        """Open or make the folder; its content is taken in, in the background. `block_bytes` are whole pages; packs of
        `target_bytes` are written. `clock` is in nanoseconds, and that of the file system's time stamps.

        Raises OSError where the folder cannot be made or written, and ValueError for sizes that cannot be.
        """
        if block_bytes % PAGE or block_bytes <= 0:
            raise ValueError(f"block_bytes={block_bytes}: give a multiple of {PAGE}")
        if capacity < room_bytes(1, block_bytes):
            least = room_bytes(1, block_bytes)
            raise ValueError(f"storage.capacity={capacity} is too small for one block: give at least {least}")
        super().__init__("filesystem", NUM_THREADS, _NUM_BATCHES, executor)
        self.folder = PackFolder(path, identity, block_bytes, capacity, clock)
        self.is_direct = _supports_direct(path)
        """Whether the page cache is passed by."""
        self._identity = identity
        self._block_bytes = block_bytes
        # Of half the capacity at most, so that there is room for the one that is written and an older one.
        most = max(1, capacity // 2 // block_bytes)
        self._blocks_per_pack = min(MAX_BLOCKS, -(-target_bytes // block_bytes), most)
        self._blocks_per_piece = min(_BUFFERS_PER_CALL, -(-_PIECE_BYTES // block_bytes))
        self.recovered = self._run(self._looking, self.folder.recover, None)
        """Done when everything that was in the folder is known."""

    def find(self, keys: list[bytes]) -> int:
        """See `ThreadedStorage.find`. What is not known may come from another process: the journal is looked at."""
        count = self._count_known(keys)
        if count == len(keys):
            return count
        self.folder.catch_up()
        return self._count_known(keys)

    def fill(self, keys: list[bytes], buffers: list[memoryview]) -> list[bool]:
        """See `ThreadedStorage.fill`."""
        by_pack: dict[str, tuple[Pack, list[tuple[int, int]]]] = {}  # slots in the pack, each with a number in `keys`
        for i, key in enumerate(keys):
            slot = self.folder.slot(key)
            if slot is not None:
                by_pack.setdefault(slot.pack.name, (slot.pack, []))[1].append((slot.index, i))
        found = [False] * len(keys)
        calls = [
            partial(self._read, pack, run, buffers, found)
            for pack, wanted in by_pack.values()
            for run in _runs(wanted, self._blocks_per_piece)
        ]
        self._run_all(calls)
        self.folder.used(pack for pack, _ in by_pack.values())
        num_read = sum(found)
        self.count(
            read_blocks=num_read,
            read_bytes=num_read * self._block_bytes,
            missed_blocks=len(keys) - sum(len(wanted) for _, wanted in by_pack.values()),
        )
        return found

    def store(self, keys: list[bytes], buffers: list[memoryview]) -> list[bool]:
        """See `ThreadedStorage.store`."""
        blocks = dict(zip(keys, buffers, strict=True))
        new = [key for key in blocks if self.folder.slot(key) is None]
        batches = [new[i : i + self._blocks_per_pack] for i in range(0, len(new), self._blocks_per_pack)]
        room = self.folder.reserve([len(batch) for batch in batches])
        if room.error is not None:
            self.note_fault("no room for new blocks", room.error)
        packs = [
            _Writing(self._header(batch), [blocks[key] for key in batch], *file, [0] * len(batch))
            for batch, file in zip(batches, room.files, strict=True)
            if file is not None
        ]
        self._run_all([call for pack in packs for call in self._begin(pack)])
        written = {key for header in self._complete(packs) for key in header.keys}
        self.count(evicted_blocks=room.evicted_blocks)
        return self.count_stored(keys, new, written, self._block_bytes)

    def forget(self, keys: list[bytes]) -> int:
        """See `ThreadedStorage.forget`. A pack goes as a whole."""
        slots = [slot for key in keys if (slot := self.folder.slot(key)) is not None]
        for name in {slot.pack.name for slot in slots}:
            self.folder.remove(name)
        return len(slots)

    def stats(self) -> dict[str, float]:
        """See `Storage.stats`."""
        return super().stats() | {"stored_blocks": len(self.folder), "stored_bytes": self.folder.used_bytes}

    def _header(self, keys: list[bytes]) -> PackHeader:
        return PackHeader(self._identity, self._block_bytes, tuple(keys), ())

    def _count_known(self, keys: Sequence[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if self.folder.slot(key) is None), len(keys))

    def _run_all(self, calls: Sequence[Callable[[], None]]) -> None:
        """On the threads of `io`, each of which takes the next call: that is half the work of a task for each."""
        left = iter(calls)  # of a list: the threads can share it

        def work() -> None:
            for call in left:
                call()

        tasks = [self.io.submit(work) for _ in range(min(NUM_THREADS, len(calls)))]
        wait(tasks)  # for all of them, whatever happened to one: they use the caller's memory
        for task in tasks:
            task.result()

    def _read(self, pack: Pack, run: list[tuple[int, int]], buffers: list[memoryview], found: list[bool]) -> None:
        """Read neighbouring blocks of a pack, given as slots and their numbers in `buffers` and `found`."""
        assert pack.header is not None
        first, targets = run[0][0], [buffers[i] for _, i in run]
        try:
            descriptor = os.open(self.folder.path(pack.name), os.O_RDONLY | os.O_CLOEXEC | self._direct_flag(targets))
            try:
                _transfer(os.preadv, descriptor, targets, pack.header.offset(first))
            finally:
                os.close(descriptor)
        except FileNotFoundError:  # another process made room
            self.folder.forget(pack.name)
            self.count(missed_blocks=len(run))
            return
        except EOFError:
            self._drop_damaged(pack, len(run))
            return
        except OSError as error:
            self.note_fault(f"cannot read {pack.name}", error)
            self.count(failed_reads_blocks=len(run))
            return
        for (slot, i), target in zip(run, targets, strict=True):
            found[i] = zlib.crc32(target) == pack.header.checksums[slot]
        if num_bad := sum(not found[i] for _, i in run):
            self._drop_damaged(pack, num_bad)
        else:
            self.note_success()

    def _drop_damaged(self, pack: Pack, num_blocks: int) -> None:
        self.note_fault(f"{pack.name} was deleted", ValueError("a checksum differs, or the file is too short"))
        self.folder.remove(pack.name)
        self.count(corrupt_blocks=num_blocks)

    def _begin(self, pack: _Writing) -> list[Callable[[], None]]:
        """Calls that write the blocks of a pack behind its header."""
        _set_flags(pack.descriptor, self._direct_flag(pack.buffers))
        numbers = range(len(pack.buffers))
        return [
            partial(self._write, pack, numbers[i : i + self._blocks_per_piece])
            for i in numbers[:: self._blocks_per_piece]
        ]

    def _write(self, pack: _Writing, piece: range) -> None:
        buffers = [pack.buffers[i] for i in piece]
        try:
            for i, buffer in zip(piece, buffers, strict=True):
                pack.checksums[i] = zlib.crc32(buffer)
            _transfer(os.pwritev, pack.descriptor, buffers, pack.header.offset(piece[0]))
        except OSError as error:
            pack.error = error

    def _complete(self, packs: list[_Writing]) -> list[PackHeader]:
        """Make files packs, where all of their blocks were written; those that are now."""
        whole = [pack for pack in packs if self._guarded(pack, self._finish)]
        try:
            self.folder.publish([pack.header for pack in whole])
        except OSError as error:
            for pack in whole:
                pack.error = error
        return [pack.header for pack in whole if self._guarded(pack, self._commit)]

    def _guarded(self, pack: _Writing, call: Callable[[_Writing], None]) -> bool:
        try:
            call(pack)
        except OSError as error:
            self.note_fault("cannot write", error)
            self.folder.abandon(pack.path)
            return False
        return True

    def _finish(self, pack: _Writing) -> None:
        """Write the header and close the file. Raises OSError."""
        pack.header = replace(pack.header, checksums=tuple(pack.checksums))
        try:
            if pack.error is not None:
                raise pack.error
            _set_flags(pack.descriptor, 0)
            os.pwrite(pack.descriptor, pack.header.encode(), 0)
        finally:
            os.close(pack.descriptor)

    def _commit(self, pack: _Writing) -> None:
        if pack.error is not None:
            raise pack.error
        self.folder.commit(pack.path, pack_name(self._identity, pack.header.keys), pack.header)
        self.note_success()

    def _direct_flag(self, buffers: Iterable[memoryview]) -> int:
        """To pass by the page cache, where file system and buffers allow it."""
        return os.O_DIRECT if self.is_direct and all(address(buffer) % PAGE == 0 for buffer in buffers) else 0


def _supports_direct(folder: Path) -> bool:
    """Whether files here can be opened past the page cache; some file systems refuse."""
    path = folder / "tmp" / f"probe-{os.getpid()}"
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600))
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def _set_flags(descriptor: int, direct: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_SETFL, direct)


def _runs(wanted: list[tuple[int, int]], length: int) -> list[list[tuple[int, int]]]:
    """Those of neighbouring slots together, each run no longer than `length`."""
    runs: list[list[tuple[int, int]]] = []
    for entry in sorted(wanted):
        if runs and entry[0] == runs[-1][-1][0] + 1 and len(runs[-1]) < length:
            runs[-1].append(entry)
        else:
            runs.append([entry])
    return runs


def _transfer(
    call: Callable[[int, list[memoryview], int], int], descriptor: int, buffers: Sequence[memoryview], offset: int
) -> None:
    """Read into or write from all of `buffers`, one behind the other from `offset` on. Raises OSError, and EOFError at
    the file's end."""
    left = list(buffers)
    while left:
        count = call(descriptor, left, offset)
        if count == 0:
            raise EOFError
        offset += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
