"""A wrapper of backends that are not trusted: every object carries its key and checksum, and every call has a time
limit.

An object is a block and a page behind it with the block's name and checksum. It is put together in memory of its batch
alone, and copied out of that only when it is whole: a backend that answers with other bytes, or too late, or that
writes when it has been given up, costs a miss. One that does not answer is left alone for a while (`breaker.py`).
"""

from __future__ import annotations

import hashlib
import mmap
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from .base import Storage, ThreadedStorage, ended, logger
from .breaker import Breaker, BreakerState
from .checksums import CRC32, CRC_BYTES, BlockCheck
from .macs import MAC_BYTES

PAGE = 4096
_MAGICS = {CRC_BYTES: b"kvcobj1\0", MAC_BYTES: b"kvcobj2\0"}
"""By the length of a checksum."""
_BATCH_BYTES = 64 << 20
_SECONDS = 30.0

T = TypeVar("T")


class CheckedStorage(ThreadedStorage):
    """See `Storage`; keeps its blocks in another one."""

    def __init__(
        self,
        name: str,
        inner: Storage,
        identity: bytes,
        block_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        seconds: float = _SECONDS,
        check: BlockCheck = CRC32,
    ) -> None:
        """`identity`, 32 bytes, names everything that must be equal for bytes to be shared: it goes into the keys that
        `inner` sees. An answer is waited for `seconds`. `check` is that of this identity."""
        super().__init__(name, num_threads=1)
        self.breaker = Breaker(clock)
        self._inner = inner
        self._identity = identity
        self._block_bytes = block_bytes
        self._block_check = check
        self._magic = _MAGICS[check.size]
        self._label = struct.Struct(f"<8s32s{check.size}s")  # magic, name, checksum of the block
        self._object_bytes = object_bytes(block_bytes)
        self._per_batch = max(1, _BATCH_BYTES // self._object_bytes)
        self._clock = clock
        self._seconds = seconds
        self._probe: _Probe | None = None
        self._gauges: dict[str, float] = {}
        self._gauges_asked: Future[None] = ended(None)
        self._gauges_failed = False

    def find(self, keys: list[bytes]) -> int:
        """See `ThreadedStorage.find`."""
        return min(len(keys), max(0, int(self._ask(partial(self._inner.exists, self._names(keys))))))

    def fill(self, keys: list[bytes], buffers: list[memoryview]) -> list[bool]:
        """See `ThreadedStorage.fill`."""
        found = []
        for batch in self._batches(len(keys)):
            found += self._fill(self._names(keys[batch]), buffers[batch])
        return found

    def store(self, keys: list[bytes], buffers: list[memoryview]) -> list[bool]:
        """See `ThreadedStorage.store`."""
        blocks = dict(zip(keys, buffers, strict=True))
        new, written = list(blocks), set[bytes]()
        for batch in self._batches(len(new)):
            names = self._names(new[batch])
            objects = self._objects(len(names))
            for name, key, view in zip(names, new[batch], objects, strict=True):
                view[: self._block_bytes] = blocks[key]
                checksum = self._block_check.of(name, blocks[key])
                self._label.pack_into(view, self._block_bytes, self._magic, name, checksum)
            stored = self._answers(self._ask(partial(self._inner.write, names, objects)), len(names))
            written |= {key for key, is_stored in zip(new[batch], stored, strict=True) if is_stored}
        self._look_at_gauges()
        return self.count_stored(keys, new, written, self._block_bytes)

    def forget(self, keys: list[bytes]) -> int:
        """See `ThreadedStorage.forget`."""
        return int(self._ask(partial(self._inner.remove, self._names(keys))))

    def stats(self) -> dict[str, float]:
        """See `Storage.stats`: what the backend last said of itself, our own counters, and the breaker."""
        is_open = self.breaker.state is not BreakerState.CLOSED
        breaker = {"breaker_is_open": is_open, "breaker_opened_times": self.breaker.num_opened}
        return self._gauges | super().stats() | breaker

    def close(self) -> None:
        """See `Storage.close`."""
        super().close()
        try:
            self._inner.close()
        except Exception as error:  # noqa: BLE001 - whatever a backend raises: there is nothing left to lose
            self.note_fault("it did not close", error)

    def _fill(self, names: list[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        objects = self._objects(len(names))
        there = self._answers(self._ask(partial(self._inner.read, names, objects)), len(names))
        good = [is_there and self._is_whole(name, o) for name, o, is_there in zip(names, objects, there, strict=True)]
        for buffer, view, is_good in zip(buffers, objects, good, strict=True):
            if is_good:
                buffer[:] = view[: self._block_bytes]
        damaged = [name for name, is_there, is_good in zip(names, there, good, strict=True) if is_there and not is_good]
        if damaged:
            self.note_fault("objects that are not what was written are removed", OSError(f"{len(damaged)} of them"))
            self._ask(partial(self._inner.remove, damaged))
        self.count(
            read_blocks=sum(good),
            read_bytes=sum(good) * self._block_bytes,
            missed_blocks=len(names) - sum(there),
            corrupt_blocks=len(damaged),
        )
        return good

    def _is_whole(self, name: bytes, view: memoryview) -> bool:
        *label, checksum = self._label.unpack_from(view, self._block_bytes)
        return label == [self._magic, name] and self._block_check.fits(name, view[: self._block_bytes], checksum)

    def _ask(self, begin: Callable[[], Future[T]]) -> T:
        """What the backend answers in time. Raises OSError where it does not, or is left alone."""
        if not self.breaker.allows:
            self._see_whether_it_is_back()
            self.count(refused_calls=1)
            raise ConnectionError("it is left alone after a fault")
        try:
            answer = begin().result(self._seconds)
        except BaseException as error:
            self.breaker.failed(at_once=isinstance(error, TimeoutError))
            raise
        self.breaker.succeeded()
        self.note_success()
        return answer

    def _see_whether_it_is_back(self) -> None:
        """Nobody waits for that; a probe whose answer is lost is not the last one."""
        probe = self._probe
        if probe is not None and self._clock() >= probe.ends_at:
            probe.end(False)
        if self.breaker.begin_probe():
            self._probe = probe = _Probe(self.breaker, self._clock() + self._seconds)
            try:
                self._inner.exists([]).add_done_callback(probe.answered)
            except Exception:  # noqa: BLE001 - whatever a backend raises
                probe.end(False)

    def _answers(self, answers: list[bool], count: int) -> list[bool]:
        if len(answers) != count:
            raise OSError(f"it gave {len(answers)} answers for {count} keys")
        return [bool(answer) for answer in answers]

    def _look_at_gauges(self) -> None:
        """On a thread that has nothing else to do: neither writes nor whoever asks for statistics wait for them."""
        if self._gauges_asked.done():
            self._gauges_asked = self.io.submit(self._ask_for_gauges)

    def _ask_for_gauges(self) -> None:
        try:
            self._gauges = {str(name): float(value) for name, value in self._inner.stats().items()}
            self._gauges_failed = False
        except Exception as error:  # noqa: BLE001 - whatever a backend raises: no block is lost with it
            if not self._gauges_failed:  # an episode of its own: the calls between two of these faults succeed
                logger.warning("%s storage: it has no statistics: %r", self._name, error)
            self._gauges_failed = True

    def _names(self, keys: Sequence[bytes]) -> list[bytes]:
        return [hashlib.blake2b(key, digest_size=32, key=self._identity).digest() for key in keys]

    def _objects(self, count: int) -> list[memoryview]:
        size = self._object_bytes
        memory = memoryview(mmap.mmap(-1, count * size))
        return [memory[i * size : (i + 1) * size] for i in range(count)]

    def _batches(self, count: int) -> Iterator[slice]:
        return (slice(start, start + self._per_batch) for start in range(0, count, self._per_batch))


class _Probe:
    """One probe of the breaker's, which ends once: with its answer, or at `ends_at` without."""

    def __init__(self, breaker: Breaker, ends_at: float) -> None:
        self.ends_at = ends_at
        self._breaker = breaker
        self._ended = threading.Lock()

    def answered(self, done: Future[int]) -> None:
        """On any thread."""
        self.end(not done.cancelled() and done.exception() is None)

    def end(self, ok: bool) -> None:
        """What came of it; nothing where it has ended."""
        if self._ended.acquire(blocking=False):
            self._breaker.end_probe(ok)


def object_bytes(block_bytes: int) -> int:
    """Bytes of the object that a block is kept as: whole pages."""
    return -(-block_bytes // PAGE) * PAGE + PAGE
