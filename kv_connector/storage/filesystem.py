"""A folder of files as storage: it needs no server, survives restarts, and several processes may share it.

Blocks are written in packs of a megabyte or more, so that a file system is not asked for millions of small files, and
read back one by one: past the page cache where the file system allows it (O_DIRECT), straight between the disk and the
caller's memory, many requests at a time. Everything that is read is checked against the checksum it was written with.
"""

from __future__ import annotations

import fcntl
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from .base import ThreadedStorage, address
from .folder import Pack, PackFolder
from .packs import MAX_BLOCKS, PAGE, PackHeader, pack_bytes, pack_name

PACK_BYTES = 1 << 20
"""A pack holds at least this many bytes of blocks, where a batch has as many."""
NUM_THREADS = 8
_BUFFERS_PER_CALL = 256  # of one vectored read or write; the system allows 1,024


class FilesystemStorage(ThreadedStorage):
    """See `Storage`. `identity`, 32 bytes, names everything that must be equal for bytes to be shared."""

    def __init__(self, path: Path, identity: bytes, block_bytes: int, capacity: int) -> None:
        """Open or make the folder; its content is taken in, in the background. `block_bytes` are whole pages.

        Raises OSError where the folder cannot be made or written, and ValueError for sizes that cannot be.
        """
        if block_bytes % PAGE or block_bytes <= 0:
            raise ValueError(f"block_bytes={block_bytes}: give a multiple of {PAGE}")
        if capacity < pack_bytes(1, block_bytes):
            raise ValueError(f"capacity={capacity} bytes: one block takes {pack_bytes(1, block_bytes)}, give more")
        super().__init__("filesystem", NUM_THREADS)
        self.folder = PackFolder(path, identity, block_bytes, capacity)
        self._identity = identity
        self._block_bytes = block_bytes
        self._blocks_per_pack = min(MAX_BLOCKS, -(-PACK_BYTES // block_bytes))
        self._direct = _supports_direct(path)
        self.recovered = self._run(self._reading, self.folder.refresh, None)
        """Done when everything that was in the folder is known."""

    def find(self, keys: list[bytes]) -> int:
        """See `ThreadedStorage.find`. What is not known may have come from another process: the folder is looked at."""
        count = self._count_known(keys)
        if count == len(keys):
            return count
        self.folder.refresh()
        return self._count_known(keys)

    def fill(self, keys: list[bytes], buffers: list[memoryview]) -> list[bool]:
        """See `ThreadedStorage.fill`."""
        slots = [self.folder.slot(key) for key in keys]
        self.count(missed_blocks=sum(slot is None for slot in slots))
        by_pack: dict[str, list[int]] = {}
        for i, slot in enumerate(slots):
            if slot is not None:
                by_pack.setdefault(slot.pack.name, []).append(i)
        found = [False] * len(keys)
        tasks = []
        for wanted in by_pack.values():
            places = [place for i in wanted if (place := slots[i]) is not None]
            indices = [place.index for place in places]
            tasks.append(self.io.submit(self._read_pack, places[0].pack, indices, [buffers[i] for i in wanted]))
        for wanted, task in zip(by_pack.values(), tasks, strict=True):
            for i, good in zip(wanted, task.result(), strict=True):
                found[i] = good
        packs = {place.pack.name: place.pack for i, place in enumerate(slots) if place is not None and found[i]}
        self.folder.used(packs.values())
        return found

    def store(self, keys: list[bytes], buffers: list[memoryview]) -> list[bool]:
        """See `ThreadedStorage.store`."""
        blocks = dict(zip(keys, buffers, strict=True))
        new = [key for key in blocks if self.folder.slot(key) is None]
        batches = [new[i : i + self._blocks_per_pack] for i in range(0, len(new), self._blocks_per_pack)]
        room = self.folder.reserve([pack_bytes(len(batch), self._block_bytes) for batch in batches])
        if room.error is not None:
            self.note_fault("no room for new blocks", room.error)
        tasks = [
            (batch, self.io.submit(self._write_pack, *file, batch, [blocks[key] for key in batch]))
            for batch, file in zip(batches, room.files, strict=True)
            if file is not None
        ]
        written = {key for batch, task in tasks if task.result() for key in batch}
        self.count(
            evicted_blocks=room.evicted_blocks,
            skipped_writes_blocks=len(keys) - len(new),
            written_blocks=len(written),
            written_bytes=len(written) * self._block_bytes,
            failed_writes_blocks=len(new) - len(written),
        )
        lost = set(new) - written
        return [key not in lost for key in keys]

    def forget(self, keys: list[bytes]) -> int:
        """See `ThreadedStorage.forget`. A pack goes as a whole."""
        slots = [slot for key in keys if (slot := self.folder.slot(key)) is not None]
        for name in {slot.pack.name for slot in slots}:
            self.folder.remove(name)
        return len(slots)

    def stats(self) -> dict[str, float]:
        """See `Storage.stats`."""
        return super().stats() | {"stored_blocks": len(self.folder), "stored_bytes": self.folder.used_bytes}

    def _count_known(self, keys: Sequence[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if self.folder.slot(key) is None), len(keys))

    def _read_pack(self, pack: Pack, indices: list[int], buffers: list[memoryview]) -> list[bool]:
        """Read these blocks of one pack; on a thread of `io`."""
        assert pack.header is not None
        try:
            descriptor = os.open(self.folder.path(pack.name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # another process made room
            self.folder.remove(pack.name)
            self.count(missed_blocks=len(indices))
            return [False] * len(indices)
        except OSError as error:
            return self._cannot_read(pack, error, len(indices))
        good = [False] * len(indices)
        try:
            self._go_direct(descriptor, buffers)
            for run in _runs(indices):
                offset = pack.header.offset(indices[run[0]])
                _transfer(os.preadv, descriptor, [buffers[i] for i in run], offset)
                for i in run:
                    good[i] = zlib.crc32(buffers[i]) == pack.header.checksums[indices[i]]
        except OSError as error:
            return self._cannot_read(pack, error, len(indices))
        finally:
            os.close(descriptor)
        if all(good):
            self.note_success()
        else:
            self.note_fault(f"{pack.name} is damaged and was deleted", ValueError("checksums differ"))
            self.folder.remove(pack.name)
        self.count(read_blocks=sum(good), read_bytes=sum(good) * self._block_bytes, corrupt_blocks=good.count(False))
        return good

    def _cannot_read(self, pack: Pack, error: OSError, count: int) -> list[bool]:
        self.note_fault(f"cannot read {pack.name}", error)
        self.count(failed_reads_blocks=count)
        return [False] * count

    def _write_pack(self, path: Path, descriptor: int, keys: list[bytes], buffers: list[memoryview]) -> bool:
        """Write one pack; on a thread of `io`."""
        try:
            header = PackHeader(self._identity, self._block_bytes, tuple(keys), tuple(map(zlib.crc32, buffers)))
            try:
                os.pwrite(descriptor, header.encode(), 0)
                self._go_direct(descriptor, buffers)
                _transfer(os.pwritev, descriptor, buffers, header.header_bytes)
            finally:
                os.close(descriptor)
            self.folder.commit(path, pack_name(self._identity, keys), header)
        except OSError as error:
            self.note_fault("cannot write", error)
            self.folder.abandon(path)
            return False
        self.note_success()
        return True

    def _go_direct(self, descriptor: int, buffers: list[memoryview]) -> None:
        """Pass by the page cache from now on, where file system and buffers allow it."""
        if self._direct and all(address(buffer) % PAGE == 0 for buffer in buffers):
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)


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


def _runs(indices: Sequence[int]) -> list[list[int]]:
    """Positions in `indices`, those of neighbouring slots together, each run no longer than one call takes."""
    runs: list[list[int]] = []
    for i in sorted(range(len(indices)), key=indices.__getitem__):
        follows = bool(runs) and indices[i] == indices[runs[-1][-1]] + 1 and len(runs[-1]) < _BUFFERS_PER_CALL
        if follows:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def _transfer(
    call: Callable[[int, list[memoryview], int], int], descriptor: int, buffers: Sequence[memoryview], offset: int
) -> None:
    """Read into or write from all of `buffers`, one behind the other from `offset` on. Raises OSError."""
    left = list(buffers)
    while left:
        count = call(descriptor, left[:_BUFFERS_PER_CALL], offset)
        if count == 0:
            raise OSError(f"the file ends at {offset}")
        offset += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
