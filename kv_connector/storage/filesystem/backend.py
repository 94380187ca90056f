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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ..base import MakeExecutor, ThreadedStorage, address
from ..checksums import crc32
from .catalog import Pack, Slot
from .folder import PackFolder, room_bytes
from .packs import MAX_BLOCKS, PAGE, PackHeader, open_file
from .temporaries import Temporary, new_path

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
    file: Temporary
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

        Raises OSError where the folder cannot be made or written or is somebody else's, and ValueError for sizes that
        cannot be.
        """
        if block_bytes % PAGE or block_bytes <= 0:
            raise ValueError(f"block_bytes={block_bytes}: give a multiple of {PAGE}")
        if capacity < room_bytes(1, block_bytes):
            least = room_bytes(1, block_bytes)
            raise ValueError(f"storage.capacity={capacity} is too small for one block: give at least {least}")
        super().__init__("filesystem", NUM_THREADS, _NUM_BATCHES, executor)
        self.folder = PackFolder(path, identity, block_bytes, capacity, clock)
        self.is_direct = _supports_direct(self.folder.layout.temporaries)
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
        for i, slot in enumerate(self.folder.catalog.slots(keys)):
            if slot is not None:
                by_pack.setdefault(slot.pack.name, (slot.pack, []))[1].append((slot.place, i))
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
        # What lies there need not be written again. It must be there, and not make room for the rest of its batch.
        self.folder.used(_packs(self._slots(blocks)))
        known = self._slots(blocks)
        new = [key for key in blocks if key not in known]
        batches = [new[i : i + self._blocks_per_pack] for i in range(0, len(new), self._blocks_per_pack)]
        room = self.folder.reserve([len(batch) for batch in batches])
        if room.error is not None:
            self.note_fault("no room for new blocks", room.error)
        packs = [
            _Writing(self._header(batch), [blocks[key] for key in batch], file, [0] * len(batch))
            for batch, file in zip(batches, room.files, strict=True)
            if file is not None
        ]
        self._run_all([call for pack in packs for call in self._begin(pack)])
        written = {key for header in self._complete(packs) for key in header.keys}
        self.count(evicted_blocks=room.evicted_blocks)
        return self.count_stored(keys, new, written, self._block_bytes)

    def forget(self, keys: list[bytes]) -> int:
        """See `ThreadedStorage.forget`. A pack goes as a whole."""
        slots = self._slots(keys)
        for pack in _packs(slots):
            self.folder.remove(pack)
        return len(slots)

    def stats(self) -> dict[str, float]:
        """See `Storage.stats`. Waits for no disk: gauges are plain numbers."""
        catalog = self.folder.catalog
        return super().stats() | {"stored_blocks": catalog.num_blocks, "stored_bytes": catalog.used_bytes}

    def _slots(self, keys: Iterable[bytes]) -> dict[bytes, Slot]:
        """Where those of these blocks lie that are known."""
        asked = list(dict.fromkeys(keys))
        return {key: slot for key, slot in zip(asked, self.folder.catalog.slots(asked), strict=True) if slot}

    def _header(self, keys: list[bytes]) -> PackHeader:
        return PackHeader(self._identity, self._block_bytes, tuple(keys), ())

    def _count_known(self, keys: Sequence[bytes]) -> int:
        return next((i for i, slot in enumerate(self.folder.catalog.slots(keys)) if slot is None), len(keys))

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
        header = pack.header
        if header is None:  # it was found damaged meanwhile
            self.count(missed_blocks=len(run))
            return
        indices, targets = [index for index, _ in run], [buffers[i] for _, i in run]
        try:
            descriptor = open_file(self.folder.layout.path(pack.name), os.O_RDONLY | self._direct_flag(targets))
            try:
                _transfer(os.preadv, descriptor, targets, header.offset(indices[0]))
            finally:
                os.close(descriptor)
        except FileNotFoundError:  # another process made room
            self.folder.missed(pack.name)
            self.count(missed_blocks=len(run))
            return
        except EOFError:
            self._note_damage(pack, indices)
            return
        except OSError as error:
            self.note_fault(f"cannot read {pack.name}", error)
            self.count(failed_reads_blocks=len(run))
            return
        for (index, i), target in zip(run, targets, strict=True):
            found[i] = crc32(target) == header.checksums[index]
        damaged = [index for index, i in run if not found[i]]
        if damaged:
            self._note_damage(pack, damaged)
        else:
            self.note_success()

    def _note_damage(self, pack: Pack, indices: list[int]) -> None:
        """These blocks are not what the pack's header says. Where it is also the header in its file, and so the one
        that the file's name covers, they are damaged and the others are not; else the file is no pack of this name."""
        try:
            header = self.folder.read_anew(pack.name)
        except FileNotFoundError:
            self.folder.missed(pack.name)
            self.count(missed_blocks=len(indices))
            return
        except OSError as error:
            self.note_fault(f"cannot read {pack.name}", error)
            self.count(failed_reads_blocks=len(indices))
            return
        self.count(corrupt_blocks=len(indices))
        if header is not None and self.folder.catalog.drop(pack, indices):
            damage = ValueError("checksums differ")
            self.note_fault(f"blocks {indices} of {pack.name} are not read any more", damage)
        else:
            self.note_fault(f"{pack.name} was deleted", ValueError("it is damaged as a whole"))
            self.folder.remove(pack)

    def _begin(self, pack: _Writing) -> list[Callable[[], None]]:
        """Calls that write the blocks of a pack behind its header."""
        _set_flags(pack.file.descriptor, self._direct_flag(pack.buffers))
        numbers = range(len(pack.buffers))
        return [
            partial(self._write, pack, numbers[i : i + self._blocks_per_piece])
            for i in numbers[:: self._blocks_per_piece]
        ]

    def _write(self, pack: _Writing, piece: range) -> None:
        buffers = [pack.buffers[i] for i in piece]
        try:
            for i, buffer in zip(piece, buffers, strict=True):
                pack.checksums[i] = crc32(buffer)
            _transfer(os.pwritev, pack.file.descriptor, buffers, pack.header.offset(piece[0]))
        except OSError as error:
            pack.error = error

    def _complete(self, packs: list[_Writing]) -> list[PackHeader]:
        """Make files packs, where all of their blocks were written; those that are now."""
        whole = [pack for pack in packs if self._finish(pack)]
        faults: list[OSError | None]
        try:
            faults = self.folder.commit([(pack.file, pack.header) for pack in whole])
        except OSError as error:
            faults = [error] * len(whole)
        for pack, fault in zip(whole, faults, strict=True):
            if fault is None:
                pack.file.close()
                self.note_success()
            else:
                self._give_up(pack, fault)
        return [pack.header for pack, fault in zip(whole, faults, strict=True) if fault is None]

    def _finish(self, pack: _Writing) -> bool:
        """Write the header; whether the file is whole."""
        pack.header = replace(pack.header, checksums=tuple(pack.checksums))
        try:
            if pack.error is not None:
                raise pack.error
            _set_flags(pack.file.descriptor, 0)
            os.pwrite(pack.file.descriptor, pack.header.encode(), 0)
        except OSError as error:
            self._give_up(pack, error)
            return False
        return True

    def _give_up(self, pack: _Writing, error: OSError) -> None:
        self.note_fault("cannot write", error)
        pack.file.delete()

    def _direct_flag(self, buffers: Iterable[memoryview]) -> int:
        """To pass by the page cache, where file system and buffers allow it."""
        return os.O_DIRECT if self.is_direct and all(address(buffer) % PAGE == 0 for buffer in buffers) else 0


def _packs(slots: dict[bytes, Slot]) -> list[Pack]:
    """Each once."""
    return list({slot.pack.name: slot.pack for slot in slots.values()}.values())


def _supports_direct(folder: Path) -> bool:
    """Whether files here can be opened past the page cache; some file systems refuse."""
    path = new_path(folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC
    try:
        os.close(os.open(path, flags, 0o600))
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
