"""What a storage backend offers: asynchronous reads and writes of whole host blocks, by key, in batches.

A fault is a miss. No future ever raises: what could not be read or written is False, a counter says so, and one line of
the log for each episode of faults says why.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar

KEY_BYTES = 32
"""A key is a SHA-256 digest: it names a block's content and everything that decides its bytes."""

MakeExecutor = Callable[[int, str], Executor]
"""Makes an executor of this many threads with this name; called once for each kind of calls."""

T = TypeVar("T")
logger = logging.getLogger("kv_connector.storage")


@dataclass(slots=True)
class StorageCounters:
    """Sums since the backend was opened."""

    read_blocks: int = 0
    read_bytes: int = 0
    missed_blocks: int = 0  # were asked for and are not there
    corrupt_blocks: int = 0  # are there, and not what was written
    failed_reads_blocks: int = 0  # could not be read
    written_blocks: int = 0
    written_bytes: int = 0
    skipped_writes_blocks: int = 0  # were there already
    failed_writes_blocks: int = 0
    evicted_blocks: int = 0
    refused_calls: int = 0  # were not made because the store does not answer


class Storage(Protocol):
    """Blocks of one size by key. Calls return at once and may come from any thread; `close` ends them.

    Keys have `KEY_BYTES` bytes. A buffer is a writable, contiguous memoryview of bytes, as long as a block: it belongs
    to the backend until the future is done; if the future could be cancelled the buffer is unchanged. Buffers that
    start on a page are read and written without another copy.
    """

    def exists(self, keys: Sequence[bytes]) -> Future[int]:
        """How many of the leading `keys` are stored. No guarantee: they may be evicted before they are read."""

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> Future[list[bool]]:
        """Fill `buffers[i]` with the block of `keys[i]`; True where it holds every byte, verified. Else its content is
        undefined."""

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> Future[list[bool]]:
        """Store blocks; True where the block is stored now, also where it was already and is not written again."""

    def remove(self, keys: Sequence[bytes]) -> Future[int]:
        """Delete blocks; returns how many of them were stored."""

    def stats(self) -> dict[str, float]:
        """`StorageCounters` and gauges, by name; the unit is in the name."""

    def close(self) -> None:
        """Block until calls in progress have ended, and release everything. Idempotent. Later calls answer as for
        missing blocks."""


class GroupedStorage(Storage, Protocol):
    """What a rank uses: a `Storage` that may keep several blocks as one.

    A group is `group_blocks` consecutive blocks of one prefix, the first of them at a multiple of `group_blocks` in it.
    The keys of a call begin at a group and continue group by group; only the last may have fewer blocks, and is then a
    different group from the whole one. A lookup is of one prefix, and finds whole groups and, at its end, the longest
    shorter group. In a read an empty buffer stands for a block of a group that is not wanted.

    Blocks of sliding windows and of recurrent states are saved and evicted one by one, so they are kept `singly`: each
    is a group of its own, whatever `group_blocks` is, and `which` finds it.
    """

    group_blocks: int
    """A power of two; with 1 every block is found by itself."""

    def which(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        """Which of these blocks, kept singly, are stored. No guarantee, as with `exists`."""

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview], singly: bool = False) -> Future[list[bool]]:
        """See `Storage.read`."""

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview], singly: bool = False) -> Future[list[bool]]:
        """See `Storage.write`."""


class ThreadedStorage(ABC):
    """A backend whose calls block, run on threads of its own: subclasses say what is done, and may raise OSError.

    Lookups wait for no reads, and reads for no writes: each kind has threads of its own that plan its batches, and
    they share `num_threads` for the input and output itself. With `num_batches` above one, so many reads and as many
    writes run side by side, so that the disk has work while the last blocks of a batch are awaited; and `num_look_ups`
    where a lookup waits for a network.
    """

    def __init__(
        self,
        name: str,
        num_threads: int,
        num_batches: int = 1,
        executor: MakeExecutor = ThreadPoolExecutor,
        num_look_ups: int = 1,
    ) -> None:
        self.group_blocks = 1
        """See `GroupedStorage`."""
        self.counters = StorageCounters()
        self.lock = threading.Lock()
        """Guards the counters and whatever the subclass shares between threads."""
        self.io = executor(num_threads, f"kv-{name}-io")
        self._looking = executor(num_look_ups, f"kv-{name}-look")
        self._reading = executor(num_batches, f"kv-{name}-read")
        self._writing = executor(num_batches, f"kv-{name}-write")
        self._name = name
        self._is_faulty = False
        self._is_closed = False

    def exists(self, keys: Sequence[bytes]) -> Future[int]:
        """See `Storage.exists`."""
        return self._run(self._looking, lambda: self.find(list(keys)), 0)

    def which(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        """See `GroupedStorage.which`."""
        return self._run(self._looking, lambda: self.find_each(list(keys)), [False] * len(keys))

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview], singly: bool = False) -> Future[list[bool]]:
        """See `GroupedStorage.read`."""
        self._check(keys, buffers)
        count = len(keys)
        lost, fill = {"failed_reads_blocks": count}, self.fill_singly if singly else self.fill
        return self._run(self._reading, lambda: fill(list(keys), list(buffers)), [False] * count, **lost)

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview], singly: bool = False) -> Future[list[bool]]:
        """See `GroupedStorage.write`."""
        self._check(keys, buffers)
        count = len(keys)
        lost, store = {"failed_writes_blocks": count}, self.store_singly if singly else self.store
        return self._run(self._writing, lambda: store(list(keys), list(buffers)), [False] * count, **lost)

    def remove(self, keys: Sequence[bytes]) -> Future[int]:
        """See `Storage.remove`."""
        return self._run(self._writing, lambda: self.forget(list(keys)), 0)

    def stats(self) -> dict[str, float]:
        """See `Storage.stats`."""
        with self.lock:
            return asdict(self.counters)

    def close(self) -> None:
        """See `Storage.close`."""
        self._is_closed = True
        for pool in (self._looking, self._reading, self._writing, self.io):
            pool.shutdown(wait=True)

    @abstractmethod
    def find(self, keys: list[bytes]) -> int:
        """How many of the leading keys are stored; on the thread of lookups."""

    @abstractmethod
    def fill(self, keys: list[bytes], buffers: list[memoryview]) -> list[bool]:
        """Read blocks; on a reading thread."""

    @abstractmethod
    def store(self, keys: list[bytes], buffers: list[memoryview]) -> list[bool]:
        """Write blocks; on a writing thread."""

    @abstractmethod
    def forget(self, keys: list[bytes]) -> int:
        """Remove blocks; on a writing thread."""

    def find_each(self, keys: list[bytes]) -> list[bool]:
        """Which blocks are stored; on the thread of lookups. Calls `find` once for each gap, unless a subclass does
        better."""
        there: list[bool] = []
        while len(there) < len(keys):
            there += [True] * self.find(keys[len(there) :]) + [False]
        return there[: len(keys)]

    def fill_singly(self, keys: list[bytes], buffers: list[memoryview]) -> list[bool]:
        """Read blocks that are kept one by one, as all are unless a subclass has groups; on a reading thread."""
        return self.fill(keys, buffers)

    def store_singly(self, keys: list[bytes], buffers: list[memoryview]) -> list[bool]:
        """Write blocks that are to be kept one by one; on a writing thread."""
        return self.store(keys, buffers)

    def count(self, **amounts: int) -> None:
        """Add to the counters; from any thread."""
        with self.lock:
            for name, amount in amounts.items():
                setattr(self.counters, name, getattr(self.counters, name) + amount)

    def count_stored(
        self, keys: Sequence[bytes], new: Sequence[bytes], written: set[bytes], num_bytes: int
    ) -> list[bool]:
        """Count a batch of writes: of `keys` those in `new` were not there yet, and of these `written` are now, with
        `num_bytes` each. Returns what `store` does."""
        self.count(
            skipped_writes_blocks=len(keys) - len(new),
            written_blocks=len(written),
            written_bytes=len(written) * num_bytes,
            failed_writes_blocks=len(new) - len(written),
        )
        lost = set(new) - written
        return [key not in lost for key in keys]

    def note_fault(self, what: str, error: BaseException) -> None:
        """Log the first fault of an episode; `note_success` ends it."""
        if not self._is_faulty:
            self._is_faulty = True
            logger.warning("%s storage: %s: %s: %s", self._name, what, type(error).__name__, error)

    def note_success(self) -> None:
        """A call succeeded: the next fault is logged again."""
        self._is_faulty = False

    def _run(self, pool: Executor, call: Callable[[], T], otherwise: T, **lost: int) -> Future[T]:
        """Make a call on a thread. Where it fails its result is `otherwise`, and `lost` is counted."""

        def guarded() -> T:
            try:
                return call()
            except Exception as error:  # noqa: BLE001 - a thread's top: whatever a backend raises is a miss.
                self.note_fault("a batch failed", error)
                self.count(**lost)
                return otherwise

        if not self._is_closed:
            try:
                return pool.submit(guarded)
            except RuntimeError:  # it was closed meanwhile
                pass
        return ended(otherwise)

    def _check(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys and {len(buffers)} buffers: give one buffer for each key")
        for key in keys:
            if len(key) != KEY_BYTES:
                raise ValueError(f"a key has {len(key)} bytes: give {KEY_BYTES}")


def ended(result: T) -> Future[T]:
    """A future that is done."""
    future: Future[T] = Future()
    future.set_result(result)
    return future


def address(buffer: memoryview) -> int:
    """Where in memory a buffer begins; it is writable."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
