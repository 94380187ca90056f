"""A store of objects as storage, shared by all engines that know it: `client.py` says what such a store can do.

Blocks go straight between host memory and the store, in groups of a megabyte or more (`groups.py`), a batch of groups
at a time, on threads of this backend. Everything that is read is checked against the checksum it was written with. A
store that does not answer costs its first request a second or so; then the breaker opens, and every request is a miss
at once until a probe, on a thread of its own, finds the store again.
"""

from __future__ import annotations

import mmap
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TypeVar

from ..base import KEY_BYTES, ThreadedStorage, address, ended
from ..filesystem.packs import PAGE, PackError, PackHeader, pack_bytes
from .client import Answer, Fragment, StoreClient, Transfer
from .groups import GROUP_BYTES, MAX_BLOCKS, Group, Groups
from .guarded import GuardedClient

NUM_READERS = 4
NUM_WRITERS = 2
_BATCH_BYTES = 32 << 20
_BATCH_GROUPS = 64
_CARDS_PER_CALL = 256
_KEYS_PER_LOOK_UP = 512  # what comes behind a miss is not asked for, and so not kept from eviction
_NOTES_BYTES = max(_BATCH_GROUPS * PAGE, _CARDS_PER_CALL * MAX_BLOCKS * KEY_BYTES)  # headers or cards
_SCRATCH_BYTES = _NOTES_BYTES + GROUP_BYTES  # and a block that nobody asked for

T = TypeVar("T")
Wanted = tuple[Group, list[int]]  # blocks of one group, as positions in the batch that asks for them


class ObjectStorage(ThreadedStorage):
    """See `Storage`. It connects in the background: until then everything is a miss."""

    def __init__(
        self,
        name: str,
        client: StoreClient,
        identity: bytes,
        block_bytes: int,
        pool: memoryview | None = None,
        clock: Callable[[], float] = time.monotonic,
        num_parallel: int = 1,
    ) -> None:
        """`name` is what logs and threads are called by. `pool`: the memory whose blocks are read and written; over
        RDMA no other can be. `identity`, 32 bytes, names everything that must be equal for bytes to be shared.
        `num_parallel` calls of each kind run side by side, where the store answers after a while. Raises ValueError
        for a size that cannot be.
        """
        if block_bytes % PAGE or block_bytes <= 0:
            raise ValueError(f"block_bytes={block_bytes}: give a multiple of {PAGE}")
        num_readers, num_writers = max(NUM_READERS, num_parallel), max(NUM_WRITERS, num_parallel)
        super().__init__(name, num_readers, num_parallel, num_look_ups=num_parallel)
        self._identity = identity
        self._block_bytes = block_bytes
        self._groups = Groups(identity, block_bytes)
        self._write_io = ThreadPoolExecutor(num_writers, f"kv-{name}-write-io")
        self._scratch: SimpleQueue[memoryview] = SimpleQueue()
        memory = memoryview(mmap.mmap(-1, (num_readers + num_writers + num_parallel + 1) * _SCRATCH_BYTES))
        for start in range(0, len(memory), _SCRATCH_BYTES):
            self._scratch.put(memory[start : start + _SCRATCH_BYTES])
        regions = [(address(region), region.nbytes) for region in (memory, pool) if region is not None]
        self._client = GuardedClient(name, client, regions, clock, self.note_fault)
        self.connected = self._client.connected
        """Set when the store was reached for the first time."""

    def find(self, keys: list[bytes]) -> int:
        """See `ThreadedStorage.find`."""
        for start in range(0, len(keys), _KEYS_PER_LOOK_UP):
            there = self._exist(keys[start : start + _KEYS_PER_LOOK_UP])
            if not all(there):
                return start + there.index(False)
        return len(keys)

    def fill(self, keys: list[bytes], buffers: list[memoryview]) -> list[bool]:
        """See `ThreadedStorage.fill`."""
        where = self._locate(keys)
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        wanted: dict[Group, list[int]] = {}
        for key, i in first.items():
            if (group := where.get(key)) is not None:
                wanted.setdefault(group, []).append(i)
        self.count(missed_blocks=sum(key not in where for key in keys))
        tasks = [
            self.io.submit(self._read_groups, batch, keys, buffers) for batch in self._batches(list(wanted.items()))
        ]
        wait(tasks)  # also where one of them raises: no buffer may be written to after this call
        good = {i for task in tasks for i in task.result()}
        for i, key in enumerate(keys):
            if i != first[key] and first[key] in good:
                buffers[i][:] = buffers[first[key]]
        return [first[key] in good for key in keys]

    def store(self, keys: list[bytes], buffers: list[memoryview]) -> list[bool]:
        """See `ThreadedStorage.store`."""
        blocks = dict(zip(keys, buffers, strict=True))
        new = [key for key, there in zip(blocks, self._exist(list(blocks)), strict=True) if not there]
        size = self._groups.blocks_per_group
        groups = [self._groups.group(new[i : i + size]) for i in range(0, len(new), size)]
        batches = self._batches([(group, list(range(len(group.keys)))) for group in groups])
        tasks = [self._write_io.submit(self._write_groups, [group for group, _ in batch], blocks) for batch in batches]
        wait(tasks)
        written = {key for task in tasks for group in task.result() for key in group.keys}
        return self.count_stored(keys, new, written, self._block_bytes)

    def forget(self, keys: list[bytes]) -> int:
        """See `ThreadedStorage.forget`. A group goes as a whole."""
        unique = list(dict.fromkeys(keys))
        stored = [key for key, there in zip(unique, self._exist(unique), strict=True) if there]
        for group in set(self._locate(stored).values()):
            self._remove(group)
        return len(stored)

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

    def _exist(self, keys: Sequence[bytes]) -> list[bool]:
        return self._client.exist([self._groups.entry(key) for key in keys])

    def _locate(self, keys: Sequence[bytes]) -> dict[bytes, Group]:
        """Groups of those blocks that have one. A card tells of a whole group: few of them need to be read."""
        where: dict[bytes, Group] = {}
        unknown = list(dict.fromkeys(keys))
        asked: set[bytes] = set()
        while unknown:
            where |= {key: group for key in unknown if (group := self._groups.find(key)) is not None}
            unknown = [key for key in unknown if key not in where and key not in asked]
            some = unknown[:: self._groups.blocks_per_group][:_CARDS_PER_CALL]
            asked.update(some)
            for group in self._read_cards(some):
                self._groups.learn(group)
        return where

    def _read_cards(self, keys: Sequence[bytes]) -> list[Group]:
        if not keys:
            return []
        size = self._groups.card_bytes
        with self._borrow() as scratch:
            slots = [scratch[i * size : (i + 1) * size] for i in range(len(keys))]
            transfers = [
                Transfer(self._groups.card(key), (Fragment(address(slot), size),))
                for key, slot in zip(keys, slots, strict=True)
            ]
            answers = self._client.get(transfers)
            cards = [
                self._groups.read_card(key, bytes(slot))
                for key, slot, answer in zip(keys, slots, answers, strict=True)
                if answer is Answer.OK
            ]
        return [group for group in cards if group is not None]

    def _read_groups(self, batch: list[Wanted], keys: list[bytes], buffers: list[memoryview]) -> list[int]:
        """Those positions that were read and are good; on a thread of `io`."""
        try:
            with self._borrow() as scratch:
                headers = [scratch[i * PAGE : (i + 1) * PAGE] for i in range(len(batch))]
                rest = address(scratch[_NOTES_BYTES:])
                transfers = [
                    self._transfer(group, header, {keys[i]: address(buffers[i]) for i in wanted}, rest)
                    for header, (group, wanted) in zip(headers, batch, strict=True)
                ]
                answers = self._client.get(transfers)
                good: list[int] = []
                for header, (group, wanted), answer in zip(headers, batch, answers, strict=True):
                    if answer in (Answer.OK, Answer.DAMAGED):
                        text = bytes(header) if answer is Answer.OK else b""
                        good += self._verify(text, group, {i: (keys[i], buffers[i]) for i in wanted})
                    else:
                        self._cannot_read(group, answer, len(wanted))
                return good
        except OSError as error:
            self.note_fault("cannot read", error)
            self.count(failed_reads_blocks=sum(len(wanted) for _, wanted in batch))
            return []

    def _transfer(self, group: Group, header: memoryview, blocks: Mapping[bytes, int], rest: int) -> Transfer:
        """A group as it lies in memory: `blocks` by address, others at `rest`. Neighbours are one fragment."""
        fragments = [Fragment(address(header), PAGE)]
        for key in group.keys:
            start, last = blocks.get(key, rest), fragments[-1]
            if last.address + last.num_bytes == start:
                fragments[-1] = Fragment(last.address, last.num_bytes + self._block_bytes)
            else:
                fragments.append(Fragment(start, self._block_bytes))
        return Transfer(group.name, tuple(fragments))

    def _verify(self, text: bytes, group: Group, blocks: dict[int, tuple[bytes, memoryview]]) -> list[int]:
        """Those of the blocks that are what was written. A group with others is removed."""
        try:
            header = PackHeader.decode(text, pack_bytes(len(group.keys), self._block_bytes))
            if (header.identity, header.keys) != (self._identity, group.keys):
                raise PackError("it holds other blocks")
            expected = dict(zip(header.keys, header.checksums, strict=True))
            good = [i for i, (key, buffer) in blocks.items() if zlib.crc32(buffer) == expected[key]]
            if len(good) < len(blocks):
                raise PackError("checksums differ")
            self.note_success()
        except PackError as error:
            good = []
            self.note_fault(f"{group.name} is damaged and was removed", error)
            self._remove(group)
        self.count(read_blocks=len(good), read_bytes=len(good) * self._block_bytes)
        self.count(corrupt_blocks=len(blocks) - len(good))
        return good

    def _cannot_read(self, group: Group, answer: Answer, count: int) -> None:
        if answer is not Answer.MISSING:
            self.note_fault(f"cannot read {group.name}", OSError(self._client.last_fault()))
            self.count(failed_reads_blocks=count)
            return
        self.count(missed_blocks=count)
        self._groups.forget(group)
        if self._groups.has_cards and group in self._read_cards(group.keys[:1]):
            self._remove(group)  # only its cards are left: with them nobody would write the blocks again

    def _write_groups(self, groups: list[Group], blocks: dict[bytes, memoryview]) -> list[Group]:
        """Those that are stored now; on a thread of `_write_io`."""
        try:
            with self._borrow() as scratch:
                transfers = []
                for i, group in enumerate(groups):
                    checksums = tuple(zlib.crc32(blocks[key]) for key in group.keys)
                    header = scratch[i * PAGE : (i + 1) * PAGE]
                    header[:] = PackHeader(self._identity, self._block_bytes, group.keys, checksums).encode()
                    own = {key: address(blocks[key]) for key in group.keys}
                    transfers.append(self._transfer(group, header, own, rest=0))
                stored = self._put(groups, transfers)
                if self._groups.has_cards:
                    stored = self._write_cards(stored, scratch)
        except OSError as error:
            self.note_fault("cannot write", error)
            return []
        for group in stored:
            self._groups.learn(group)
            self.note_success()
        return stored

    def _write_cards(self, groups: list[Group], scratch: memoryview) -> list[Group]:
        """Those whose blocks can all be found now."""
        size = self._groups.card_bytes
        owners, transfers = [], []
        for i, group in enumerate(groups):
            card = scratch[i * size : (i + 1) * size]
            card[:] = self._groups.write_card(group)
            for key in group.keys:
                owners.append(group)
                transfers.append(Transfer(self._groups.card(key), (Fragment(address(card), size),)))
        num_found = Counter(group.name for group in self._put(owners, transfers))
        return [group for group in groups if num_found[group.name] == len(group.keys)]

    def _put(self, groups: Sequence[Group], transfers: Sequence[Transfer]) -> list[Group]:
        """Write an object of each group; the groups of those that are stored."""
        answers = self._client.put(transfers)
        for answer in {Answer.NO_ROOM, Answer.FAULT}.intersection(answers):
            why = _NO_ROOM if answer is Answer.NO_ROOM else self._client.last_fault()
            self.note_fault("cannot write", OSError(why))
        return [group for group, answer in zip(groups, answers, strict=True) if answer is Answer.OK]

    def _remove(self, group: Group) -> None:
        """Remove a group and its cards. Raises OSError."""
        self._groups.forget(group)
        self._client.remove(self._groups.objects(group))

    def _batches(self, wanted: list[Wanted]) -> Iterator[list[Wanted]]:
        """Cut to what one call moves."""
        batch: list[Wanted] = []
        num_bytes = 0
        for group, positions in wanted:
            if batch and (len(batch) == _BATCH_GROUPS or num_bytes >= _BATCH_BYTES):
                yield batch
                batch, num_bytes = [], 0
            batch.append((group, positions))
            num_bytes += len(positions) * self._block_bytes
        if batch:
            yield batch

    @contextmanager
    def _borrow(self) -> Iterator[memoryview]:
        """Memory for headers and cards; there is some for every thread."""
        memory = self._scratch.get()
        try:
            yield memory
        finally:
            self._scratch.put(memory)


_NO_ROOM = "the store has no room, or no engine has lent it memory"
