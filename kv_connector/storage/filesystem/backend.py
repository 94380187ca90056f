"""A folder of files as storage: it needs no server, survives restarts, and several processes may share it.

Blocks are written in packs of megabytes, so that a file system is not asked for millions of small files, and read back
one by one: past the page cache where the file system allows it (O_DIRECT), straight between the disk and the caller's
memory, a megabyte at a time and many at a time. Everything that is read is checked against the checksum it was written
with, so nothing is ever forced to the disk: what a loss of power takes is a miss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from ..base import MakeExecutor, ThreadedStorage
from ..checksums import CRC32, BlockCheck
from .catalog import Pack, Slot
from .folder import PackFolder, room_bytes
from .packs import MAX_BLOCKS, PAGE, PackHeader
from .reads import PackReader
from .transfers import supports_direct
from .writes import PackWriter

PACK_BYTES = 8 << 20
"""A pack holds at least this many bytes of blocks, where a batch has as many: it is opened and evicted as a whole."""
NUM_THREADS = 16
_NUM_BATCHES = 4


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
        check: BlockCheck = CRC32,
    ) -> None:
        """Open or make the folder; its content is taken in, in the background. `block_bytes` are whole pages; packs of
        `target_bytes` are written. `clock` is in nanoseconds, and that of the file system's time stamps. `check` is
        that of this identity.

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
        self.is_direct = supports_direct(self.folder.layout.temporaries)
        """Whether the page cache is passed by."""
        self._identity = identity
        self._block_bytes = block_bytes
        # Of half the capacity at most, so that there is room for the one that is written and an older one.
        most = max(1, capacity // 2 // block_bytes)
        self._blocks_per_pack = min(MAX_BLOCKS, -(-target_bytes // block_bytes), most)
        self._blank = bytes(check.size)
        self._reader = PackReader(self.folder, self, block_bytes, self.is_direct, check)
        self._writer = PackWriter(self.folder, self, block_bytes, self.is_direct, check)
        self.recovered = self._run(self._looking, self.folder.recover, None)
        """Done when everything that was in the folder is known."""

    def find(self, keys: list[bytes]) -> int:
        """See `ThreadedStorage.find`. What is not known may come from another process: the journal is looked at."""
        count = self._count_known(keys)
        if count == len(keys):
            return count
        self.folder.contents.catch_up()
        return self._count_known(keys)

    def find_each(self, keys: list[bytes]) -> list[bool]:
        """See `ThreadedStorage.find_each`."""
        there = self._are_known(keys)
        if not all(there):
            self.folder.contents.catch_up()
            there = self._are_known(keys)
        return there

    def fill(self, keys: list[bytes], buffers: list[memoryview]) -> list[bool]:
        """See `ThreadedStorage.fill`."""
        batch = self._reader.plan(keys, buffers)
        with self.folder.reading(batch.packs):
            self._run_all(batch.calls)
        num_read = sum(batch.found)
        self.count(read_blocks=num_read, read_bytes=num_read * self._block_bytes, missed_blocks=batch.num_missed)
        return batch.found

    def store(self, keys: list[bytes], buffers: list[memoryview]) -> list[bool]:
        """See `ThreadedStorage.store`."""
        blocks = dict(zip(keys, buffers, strict=True))
        # What lies there need not be written again. It must be there, and not make room for the rest of its batch.
        self.folder.used(_packs(self._slots(blocks)))
        known = self._slots(blocks)
        new = [key for key in blocks if key not in known]
        size = self._blocks_per_pack
        headers = [self._header(new[i : i + size]) for i in range(0, len(new), size)]
        room = self.folder.reserve(headers)
        if room.error is not None:
            self.note_fault("no room for new blocks", room.error)
        packs = [
            self._writer.begin(header, [blocks[key] for key in header.keys], file)
            for header, file in zip(headers, room.files, strict=True)
            if file is not None
        ]
        self._run_all([call for pack in packs for call in self._writer.calls(pack)])
        written = {key for header in self._writer.complete(packs) for key in header.keys}
        return self.count_stored(keys, new, written, self._block_bytes)

    def forget(self, keys: list[bytes]) -> int:
        """See `ThreadedStorage.forget`. A pack goes as a whole."""
        slots = self._slots(keys)
        for pack in _packs(slots):
            self.folder.remove(pack)
        return len(slots)

    def stats(self) -> dict[str, float]:
        """See `Storage.stats`. Waits for no disk: gauges are plain numbers."""
        catalog, evicted = self.folder.catalog, self.folder.evicted_blocks
        gauges = {"stored_blocks": catalog.num_blocks, "stored_bytes": catalog.used_bytes}
        return super().stats() | gauges | {"evicted_blocks": evicted}

    def _slots(self, keys: Iterable[bytes]) -> dict[bytes, Slot]:
        """Where those of these blocks lie that are known."""
        asked = list(dict.fromkeys(keys))
        return {key: slot for key, slot in zip(asked, self.folder.catalog.slots(asked), strict=True) if slot}

    def _header(self, keys: list[bytes]) -> PackHeader:
        """Its checksums come later."""
        return PackHeader(self._identity, self._block_bytes, tuple(keys), (self._blank,) * len(keys))

    def _count_known(self, keys: Sequence[bytes]) -> int:
        return [*self._are_known(keys), False].index(False)

    def _are_known(self, keys: Sequence[bytes]) -> list[bool]:
        return [slot is not None for slot in self.folder.catalog.slots(keys)]

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


def _packs(slots: dict[bytes, Slot]) -> list[Pack]:
    """Each once."""
    return list({slot.pack.name: slot.pack for slot in slots.values()}.values())
