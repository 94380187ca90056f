"""A store of objects as storage, shared by all engines that know it: `client.py` says what such a store can do.

Blocks go straight between host memory and the store, in groups of a megabyte or more (`groups.py`), a batch of groups
at a time, on threads of this backend. A group is read whole, also where some of it is not wanted. Everything that is
read is checked against the checksum it was written with. A store that does not answer costs its first request a second
or so; then the breaker opens, and every request is a miss at once until a probe, on a thread of its own, finds the
store again.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

from ..base import MakeExecutor, ThreadedStorage, address, ended
from ..checksums import CRC32, BlockCheck
from ..filesystem.packs import PAGE, PackError, PackHeader
from .client import Answer, Fragment, StoreClient, Transfer
from .groups import GROUP_BYTES, Group, Groups
from .guarded import GuardedClient

NUM_READERS = 4
NUM_WRITERS = 2
BATCH_BYTES = 32 << 20  # checksums of one are computed while others travel
_BATCH_GROUPS = 64
_BATCH_BLOCKS = 1024  # each may be a fragment of its own: a store queues so many
_NAMES_PER_LOOK_UP = 16
_MOST_NAMES = 512  # what comes behind a miss is not asked for, and so not kept from eviction
_HEADERS_BYTES = _BATCH_GROUPS * PAGE

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Place:
    """A group of a call: its first block's place there, and the memory of its blocks, empty for one not wanted."""

    group: Group
    first: int
    buffers: list[memoryview]

    @property
    def num_wanted(self) -> int:
        return sum(map(bool, self.buffers))


class ObjectStorage(ThreadedStorage):
    """See `GroupedStorage`. It connects in the background: until then everything is a miss."""

    def __init__(
        self,
        name: str,
        client: StoreClient,
        identity: bytes,
        block_bytes: int,
        pool: memoryview | None = None,
        clock: Callable[[], float] = time.monotonic,
        group_bytes: int = GROUP_BYTES,
        batch_bytes: int = BATCH_BYTES,
        executor: MakeExecutor = ThreadPoolExecutor,
        num_parallel: int = 1,
        check: BlockCheck = CRC32,
    ) -> None:
        """`name` is what logs and threads are called by. `pool`: the memory whose blocks are read and written; over
        RDMA no other can be. `identity`, 32 bytes, names everything that must be equal for bytes to be shared.
        `group_bytes`: see `Groups`. One call of the client moves groups of about `batch_bytes`. `num_parallel` calls of
        each kind run side by side, where the store answers after a while. `check` is that of this identity. Raises
        ValueError for a size that cannot be.
        """
        if block_bytes % PAGE or block_bytes <= 0:
            raise ValueError(f"block_bytes={block_bytes}: give a multiple of {PAGE}")
        num_readers, num_writers = max(NUM_READERS, num_parallel), max(NUM_WRITERS, num_parallel)
        super().__init__(name, num_readers, num_parallel, executor, num_look_ups=num_parallel)
        self._identity = identity
        self._block_bytes = block_bytes
        self._batch_bytes = batch_bytes
        self._block_check = check
        self._groups = Groups(identity, block_bytes, group_bytes)
        self.group_blocks = self._groups.blocks_per_group
        self._write_io = executor(num_writers, f"kv-{name}-write-io")
        self._scratch: SimpleQueue[memoryview] = SimpleQueue()
        size = _HEADERS_BYTES + (block_bytes if self.group_blocks > 1 else 0)
        memory = memoryview(mmap.mmap(-1, (num_readers + num_writers) * size))
        for start in range(0, len(memory), size):
            self._scratch.put(memory[start : start + size])
        regions = [(address(region), region.nbytes) for region in (memory, pool) if region is not None]
        self._client = GuardedClient(name, client, regions, clock, self.note_fault)
        self.connected = self._client.connected
        """Set when the store was reached for the first time."""

    def find(self, keys: list[bytes]) -> int:
        """See `ThreadedStorage.find`. One name for each whole group, and where one is missing, its beginnings."""
        size = self.group_blocks
        ends = [self._groups.name(key) for key in keys[size - 1 :: size]]
        num_whole = self._count_leading(ends)
        behind = keys[num_whole * size :][: size - 1]
        there = self._client.exist([self._groups.name(key) for key in behind])
        return num_whole * size + max((place for place, is_there in enumerate(there, 1) if is_there), default=0)

    def find_each(self, keys: list[bytes]) -> list[bool]:
        """See `ThreadedStorage.find_each`."""
        names = [self._groups.name(key) for key in keys]
        parts = (names[start : start + _MOST_NAMES] for start in range(0, len(names), _MOST_NAMES))
        return [is_there for part in parts for is_there in self._client.exist(part)]

    def fill(self, keys: list[bytes], buffers: list[memoryview]) -> list[bool]:
        """See `ThreadedStorage.fill`."""
        return self._fill(self._places(keys, buffers), len(keys))

    def fill_singly(self, keys: list[bytes], buffers: list[memoryview]) -> list[bool]:
        """See `ThreadedStorage.fill_singly`."""
        return self._fill(self._places(keys, buffers, singly=True), len(keys))

    def _fill(self, places: list[_Place], num_keys: int) -> list[bool]:
        batches = self._batches(places)
        tasks = [self.io.submit(self._read_groups, batch) for batch in batches]
        wait(tasks)  # also where one of them raises: no buffer may be written to after this call
        good = {place for task in tasks for place in task.result()}
        return [place in good for place in range(num_keys)]

    def store(self, keys: list[bytes], buffers: list[memoryview]) -> list[bool]:
        """See `ThreadedStorage.store`. What comes behind a group that is missing is most likely missing as well, and
        is written without asking: a question may take as long as an answer."""
        unique = _by_name(self._places(keys, buffers))
        num_there = self._count_leading(list(unique), at_first=1)
        return self._store(keys, list(unique.values())[num_there:])

    def store_singly(self, keys: list[bytes], buffers: list[memoryview]) -> list[bool]:
        """See `ThreadedStorage.store_singly`. One that is missing says nothing of the others."""
        unique = _by_name(self._places(keys, buffers, singly=True))
        there = self.find_each([place.group.keys[0] for place in unique.values()])
        return self._store(
            keys,
            [place for place, is_there in zip(unique.values(), there, strict=True) if not is_there],
            singly=True,
        )

    def _store(self, keys: list[bytes], new: list[_Place], singly: bool = False) -> list[bool]:
        """Write these groups; returns what `store` does."""
        tasks = [self._write_io.submit(self._write_groups, batch) for batch in self._batches(new)]
        wait(tasks)
        written = {group.name: len(group.keys) for task in tasks for group in task.result()}
        num_new, num_written = sum(len(place.buffers) for place in new), sum(written.values())
        self.count(
            skipped_writes_blocks=len(keys) - num_new,
            written_blocks=num_written,
            written_bytes=num_written * self._block_bytes,
            failed_writes_blocks=num_new - num_written,
        )
        lost = {place.group.name for place in new} - written.keys()
        return [group.name not in lost for group in self._groups.cut(keys, singly) for _ in group.keys]

    def forget(self, keys: list[bytes]) -> int:
        """See `ThreadedStorage.forget`."""
        groups = {group.name: len(group.keys) for group in self._groups.cut(keys)}
        there = self._client.remove(list(groups))
        return sum(count for count, was_there in zip(groups.values(), there, strict=True) if was_there)

    def stats(self) -> dict[str, float]:
        """See `Storage.stats`."""
        return super().stats() | self._client.stats()

    def close(self) -> None:
        """See `Storage.close`."""
        super().close()
        self._write_io.shutdown(wait=True)
        self._client.close()

    def _run(self, pool: Executor, call: Callable[[], T], otherwise: T, **lost: int) -> Future[T]:
        """Refused at once while the breaker is open."""
        if self._client.breaker.allows:
            return super()._run(pool, call, otherwise, **lost)
        self.count(refused_calls=1, **lost)
        return ended(otherwise)

    def _count_leading(self, names: Sequence[str], at_first: int = _NAMES_PER_LOOK_UP) -> int:
        """How many leading objects there are; ever more are asked for at a time, since most lookups find few."""
        start, count = 0, at_first
        while start < len(names):
            there = self._client.exist(names[start : start + count])
            if not all(there):
                return start + there.index(False)
            start, count = start + count, min(2 * count, _MOST_NAMES)
        return len(names)

    def _places(self, keys: list[bytes], buffers: list[memoryview], singly: bool = False) -> list[_Place]:
        """The groups of a call of which a block is wanted."""
        places, first = [], 0
        for group in self._groups.cut(keys, singly):
            own = buffers[first : first + len(group.keys)]
            if any(own):
                places.append(_Place(group, first, own))
            first += len(own)
        return places

    def _read_groups(self, batch: list[_Place]) -> list[int]:
        """Those blocks, by their places in the call, that were read and are good; on a thread of `io`."""
        try:
            with self._borrow() as scratch:
                headers = [scratch[i * PAGE : (i + 1) * PAGE] for i in range(len(batch))]
                rest = address(scratch) + _HEADERS_BYTES
                transfers = [self._transfer(place, header, rest) for header, place in zip(headers, batch, strict=True)]
                answers = self._client.get(transfers)
                good: list[int] = []
                for header, place, answer in zip(headers, batch, answers, strict=True):
                    if answer in (Answer.OK, Answer.DAMAGED):
                        good += self._verify(bytes(header) if answer is Answer.OK else b"", place)
                    else:
                        self._cannot_read(place, answer)
                return good
        except OSError as error:
            self.note_fault("cannot read", error)
            self.count(failed_reads_blocks=sum(place.num_wanted for place in batch))
            return []

    def _transfer(self, place: _Place, header: memoryview, rest: int) -> Transfer:
        """A group as it lies in memory, what is not wanted of it at `rest`. Neighbours are one fragment."""
        fragments = [Fragment(address(header), PAGE)]
        for buffer in place.buffers:
            start, last = address(buffer) if buffer else rest, fragments[-1]
            if last.address + last.num_bytes == start:
                fragments[-1] = Fragment(last.address, last.num_bytes + self._block_bytes)
            else:
                fragments.append(Fragment(start, self._block_bytes))
        return Transfer(place.group.name, tuple(fragments))

    def _verify(self, text: bytes, place: _Place) -> list[int]:
        """Those of the wanted blocks that are what was written. A group with others is removed."""
        group = place.group
        try:
            header = PackHeader.decode(text, PAGE + len(group.keys) * self._block_bytes)
            if (header.identity, header.keys) != (self._identity, group.keys):
                raise PackError("it holds other blocks")
            wanted = [(i, buffer) for i, buffer in enumerate(place.buffers) if buffer]
            fits, checksums = self._block_check.fits, header.checksums
            good = [place.first + i for i, buffer in wanted if fits(group.keys[i], buffer, checksums[i])]
            if len(good) < len(wanted):
                raise PackError("checksums differ")
            self.note_success()
        except PackError as error:
            good = []
            self.note_fault(f"{group.name} is damaged and not read any more", error)
            self._client.remove([group.name])
        self.count(read_blocks=len(good), read_bytes=len(good) * self._block_bytes)
        self.count(corrupt_blocks=place.num_wanted - len(good))
        return good

    def _cannot_read(self, place: _Place, answer: Answer) -> None:
        if answer is Answer.MISSING:
            self.count(missed_blocks=place.num_wanted)
            return
        self.note_fault(f"cannot read {place.group.name}", OSError(self._client.last_fault()))
        self.count(failed_reads_blocks=place.num_wanted)

    def _write_groups(self, batch: list[_Place]) -> list[Group]:
        """Those that are stored now; on a thread of `_write_io`."""
        try:
            with self._borrow() as scratch:
                transfers = []
                for i, place in enumerate(batch):
                    blocks = zip(place.group.keys, place.buffers, strict=True)
                    checksums = tuple(self._block_check.of(key, buffer) for key, buffer in blocks)
                    header = scratch[i * PAGE : (i + 1) * PAGE]
                    header[:] = PackHeader(self._identity, self._block_bytes, place.group.keys, checksums).encode()
                    transfers.append(self._transfer(place, header, rest=0))
                answers = self._client.put(transfers)
        except OSError as error:
            self.note_fault("cannot write", error)
            return []
        for answer in {Answer.NO_ROOM, Answer.FAULT}.intersection(answers):
            why = _NO_ROOM if answer is Answer.NO_ROOM else self._client.last_fault()
            self.note_fault("cannot write", OSError(why))
        if Answer.OK in answers:
            self.note_success()
        return [place.group for place, answer in zip(batch, answers, strict=True) if answer is Answer.OK]

    def _batches(self, places: list[_Place]) -> Iterator[list[_Place]]:
        """Cut to what one call moves; a store may answer for a name once in a call."""
        batch: dict[str, _Place] = {}
        num_blocks = 0
        for place in places:
            is_full = len(batch) == _BATCH_GROUPS or num_blocks + len(place.buffers) > _BATCH_BLOCKS
            if batch and (is_full or place.group.name in batch or num_blocks * self._block_bytes >= self._batch_bytes):
                yield list(batch.values())
                batch, num_blocks = {}, 0
            batch[place.group.name] = place
            num_blocks += len(place.buffers)
        if batch:
            yield list(batch.values())

    @contextmanager
    def _borrow(self) -> Iterator[memoryview]:
        """Memory for headers, and for what is not wanted of groups; there is some for every thread."""
        memory = self._scratch.get()
        try:
            yield memory
        finally:
            self._scratch.put(memory)


def _by_name(places: list[_Place]) -> dict[str, _Place]:
    """Each group once."""
    return {place.group.name: place for place in places}


_NO_ROOM = "the store has no room, or no engine has lent it memory"
