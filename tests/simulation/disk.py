"""A faulty disk in memory, and the real filesystem backend on it, in virtual time and without threads.

The backend runs as it is. It is given an executor and a clock, as production gives it threads and the time; the names
by which its modules call the system (`os`, `fcntl`, `open`) stand for `files.Files` while a disk is `installed`. That
is simpler than a protocol of the fifteen calls that it makes, which production code would carry for tests alone.

What is modelled. A batch waits for one of its kind's threads, then for the disk, and then runs at one instant: reads
deliver and writes take the caller's bytes at the last moment, which is the harshest for who touches a buffer too early
or too late; until then a buffer that is to be filled holds nonsense. Not modelled: two batches inside of each other, as
real threads and processes have them (`tests/storage/filesystem/test_kills.py` does that).
"""

from __future__ import annotations

import errno
import fcntl
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

from kv_connector.storage.base import StorageCounters
from kv_connector.storage.checksums import CRC32
from kv_connector.storage.filesystem import (
    backend,
    contents,
    descriptors,
    folder,
    journal,
    layout,
    packs,
    reads,
    survey,
    temporaries,
    transfers,
    writes,
)
from kv_connector.storage.filesystem.backend import FilesystemStorage
from kv_connector.storage.filesystem.layout import SUFFIX
from kv_connector.storage.filesystem.packs import PackError, PackHeader
from kv_connector.storage.macs import choose_check

from .clock import Event, VirtualTime
from .files import SECTOR, Broken, File, Files, Folder, SimulatedPath, fail

MARKER = f"/kv_connector.format-{layout.FORMAT}"
_MODULES = (contents, descriptors, folder, journal, layout, packs, reads, survey, temporaries, transfers, writes)
EPOCH_NS = 1_700_000_000 * 10**9


class WouldHang(Broken):
    """The caller would wait for a disk that does not answer."""


class Disk:
    """A disk that several processes use. All faults are switched at any virtual time, and off by their opposite:

    `slow`          factor on every wait for it
    `freeze, thaw`  it answers nobody; `thaw` lets it go on with what waits, in any order
    `fill, is_full` nothing grows beyond what there is, or nothing at all, as somebody else takes what is deleted
    `error_rate`    share of calls that fail with EIO, of those in `error_calls` where any are; a read that fails has
                    moved its bytes
    `corrupt_rate`  share of writes of which a bit is flipped
    `short_rate`    share of reads and writes that move less than they were asked to, which is no fault
    `flip, cut_files, delete_files, replace_indices, wipe`   what lies there is damaged or taken away, now
    `forge`         the same by somebody who knows the format and no secret: only engines with one can see it
    `lose, come_back`   nothing is there (every call fails), and then again everything that was
    """

    def __init__(self, time: VirtualTime, name: str = "disk") -> None:
        self.time = time
        self.rng = time.stream(name)
        self.files = Files(lambda: self.clock_ns(), self.rng)
        self.files.before = self._before
        self.files.after_write = self._after_write
        self.files.cut_short = self._cut_short
        self.files.room = self._has_room
        self.seconds = (50e-6, 2e-3)
        """A batch waits between so many."""
        self.slow = 1.0
        self.is_full = False
        self._most_bytes = 0  # that it holds while it is full
        self._num_fills = 0
        self.error_rate = 0.0
        self.error_calls: tuple[str, ...] = ()
        self.corrupt_rate = 0.0
        self.short_rate = 0.0
        self.num_corrupted = 0
        """Bits flipped, files cut or taken away so far."""
        self.is_silent = False
        self.is_lost = False
        self.storages: list[SimulatedStorage] = []
        self._waiting: list[Callable[[], object]] = []
        self._is_called = False

    def clock_ns(self) -> int:
        return EPOCH_NS + int(self.time.now() * 1e9)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within, the backend's modules use this disk instead of the machine's."""
        names: list[tuple[Any, str, object]] = [(SimulatedPath, "installed", self.files)]
        names += [(module, "os", self.files) for module in _MODULES]
        names += [(module, "fcntl", _Fcntl(self.files)) for module in (layout, temporaries, transfers)]
        with ExitStack() as stack:
            for target, name, stand_in in names:
                stack.enter_context(patch.object(target, name, stand_in, create=True))
            yield

    # Faults.

    def freeze(self) -> None:
        self.is_silent = True

    def thaw(self) -> None:
        self.is_silent = False
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            self.time.call_after(self.delay(), partial(self.answer, call), "disk thaws")

    def lose(self) -> None:
        self.is_lost = True

    def come_back(self) -> None:
        self.is_lost = False

    def flip(self, count: int = 1) -> None:
        for _ in range(count):
            files = [file for _, file in self.files.walk() if file.data]
            if files:
                self._flip(file := self.rng.choice(files), 0, len(file.data))

    def cut_files(self, count: int = 1) -> None:
        for path, file in self._some(count):
            del file.data[self.rng.randrange(len(file.data) + 1) :]
            self.num_corrupted += not path.endswith(MARKER)

    def delete_files(self, count: int = 1) -> None:
        for path, _ in self._some(count):
            if path.endswith(MARKER):
                continue  # who deletes it has said that the folder is not ours
            above, name = self.files.folder_of(path)
            del above.entries[name]
            self.files.changed(above)
            self.num_corrupted += 1

    def forge(self) -> None:
        """A pack, or an object in that format, becomes another one that is whole, and engines are told of it."""
        packs = [(path, file) for path, file in self.files.walk() if file.data.startswith(b"KVCPACK")]
        if not packs:
            return
        path, file = self.rng.choice(packs)
        try:
            header, blocks = _forged(self.rng, bytes(file.data))
        except PackError:
            return  # it was damaged before
        above, name = self.files.folder_of(path)
        del above.entries[name]
        if name.endswith(SUFFIX):  # the name of an object says nothing of its bytes
            root = path.split("/")[1]
            name = header.name + SUFFIX
            above, _ = self.files.folder_of(f"/{root}/{name[:2]}/{name}")
            index = self.files.folder_of(f"/{root}/index")[0].entries.get("index")
            if isinstance(index, File):
                index.data += journal.encoded((file.mtime_ns, header.text()))
        above.entries[name] = File(bytearray(header.encode() + b"".join(blocks)), file.mtime_ns)
        self.num_corrupted += 1

    def replace_indices(self) -> None:
        """Each journal is an empty folder now."""
        for path, _ in list(self.files.walk()):
            if path.endswith("/index"):
                above, name = self.files.folder_of(path)
                above.entries[name] = Folder()
                self.files.changed(above)
                self.num_corrupted += 1

    def fill(self) -> None:
        self.is_full = True
        self._num_fills += 1
        self._most_bytes = self.files.used_bytes if self._num_fills % 2 else 0

    def wipe(self) -> None:
        """Somebody deletes every folder, while they are used."""
        for entry in self.files.tree.entries.values():
            if isinstance(entry, Folder):
                entry.entries.clear()
                self.files.changed(entry)
        self.num_corrupted += 1

    def heal(self) -> None:
        """Every fault is off; what was damaged stays so."""
        self.slow, self.is_full = 1.0, False
        self.error_rate = self.corrupt_rate = self.short_rate = 0.0
        self.come_back()
        self.thaw()

    def _has_room(self, num_bytes: int) -> bool:
        return not self.is_full or self.files.used_bytes + num_bytes <= self._most_bytes

    # For processes that use it.

    def delay(self) -> float:
        return self.slow * self.rng.uniform(*self.seconds)

    def answer(self, call: Callable[[], object]) -> None:
        """Run what waited for the disk, or keep it until the disk answers."""
        if self.is_silent:
            self._waiting.append(call)
        else:
            call()

    @contextmanager
    def called_by(self, process: int) -> Iterator[None]:
        """Calls to files are this process's. Nobody else may make any: a thread that must not wait would."""
        if self.is_silent:
            raise WouldHang("a disk that does not answer is waited for")
        before, self.files.process, self._is_called = (self.files.process, self._is_called), process, True
        try:
            yield
        finally:
            self.files.process, self._is_called = before

    def check_at_rest(self) -> None:
        """No fault is on, nothing waits, no file is open or locked, and every process's storage is at rest."""
        assert not self.is_silent and not self._waiting, f"{len(self._waiting)} batches wait for the disk"
        assert not self.files.handles, f"open files: {[handle.path for handle in self.files.handles.values()]}"
        for path, file in self.files.walk():
            assert file.locked_by is None, f"{path} is locked"
        for storage in self.storages:
            storage.check_at_rest()

    def _before(self, call: str, path: str) -> None:
        if not self._is_called:
            raise WouldHang(f"{call} of {path} by a thread that may not wait for the disk")
        if self.is_lost:
            raise fail(errno.ENOENT if call in ("open", "stat") else errno.EIO, path)
        is_meant = not self.error_calls or call in self.error_calls
        if self.error_rate and is_meant and self.rng.random() < self.error_rate:
            raise fail(errno.EIO, path)

    def _after_write(self, file: File, start: int, stop: int) -> None:
        if self.corrupt_rate and stop > start and self.rng.random() < self.corrupt_rate:
            self._flip(file, start, stop)

    def _cut_short(self, count: int) -> int:
        if count > SECTOR and self.short_rate and self.rng.random() < self.short_rate:
            return self.rng.randrange(1, count)
        return count

    def _flip(self, file: File, start: int, stop: int) -> None:
        file.data[self.rng.randrange(start, stop)] ^= 1 << self.rng.randrange(8)
        self.num_corrupted += 1

    def _some(self, count: int) -> list[tuple[str, File]]:
        files = list(self.files.walk())
        return self.rng.sample(files, min(count, len(files)))


class SimulatedStorage:
    """One rank's process on a disk: `open_storage` is what a worker half is built with. Several may share a folder.

    `clock_ahead` seconds is by how much this process's clock differs from the disk's; it may change at any time.
    """

    def __init__(
        self,
        disk: Disk,
        name: str,
        identity: bytes,
        capacity: int,
        folder: str = "/storage",
        target_bytes: int = backend.PACK_BYTES,
        clock_ahead: float = 0.0,
        secret: bytes = b"",
    ) -> None:
        self.disk = disk
        self.name = name
        self.process = 0
        self.storage: FilesystemStorage | None = None
        self.num_unanswered = 0
        """Futures given out that have not ended."""
        self._check, self._identity = choose_check(secret, identity)
        self._capacity = capacity
        self._folder = folder
        self._target_bytes = target_bytes
        self.clock_ahead = clock_ahead
        self._executors: list[SimulatedExecutor] = []
        self._is_in_batch = False
        disk.storages.append(self)

    def open_storage(
        self, block_bytes: int, pool: memoryview, arrangement: str = "", num_served: int = 1
    ) -> FilesystemStorage:
        """The real backend, as a new process. Raises OSError where the folder cannot be used, and WouldHang where the
        disk is silent."""
        assert self.storage is None, f"{self.name} runs already: kill or close it first"
        self.process = max(self.disk.files.processes, default=100) + 1
        self.disk.files.processes.add(self.process)
        path = SimulatedPath(self._folder)
        with self.disk.called_by(self.process):
            try:
                self.storage = FilesystemStorage(
                    path,
                    self._identity,
                    block_bytes,
                    self._capacity,
                    self._target_bytes,
                    self._executor,
                    self._clock,
                    self._check,
                )
            except OSError:
                self.kill()
                raise
        self._spoil_what_is_read(self.storage)
        self._note_what_is_no_fault(self.storage)
        return self.storage

    def close(self) -> None:
        """Close the backend as the worker half does, and end the process. What is under way ends now."""
        if self.storage is not None:
            self.storage.close()
        self.check_at_rest()
        self.kill()

    def kill(self) -> None:
        """The process is gone: nothing of it runs any more, the kernel closes its files, and no future ends."""
        self.disk.files.processes.discard(self.process)
        for executor in self._executors:
            executor.abandon()
        self._executors.clear()
        self.disk.files.close_all_of(self.process)
        self.storage = None
        self.num_unanswered = 0

    def check_at_rest(self) -> None:
        """Every job is answered and no file of this process is open."""
        assert not self.num_unanswered, f"{self.name}: {self.num_unanswered} calls were not answered"
        self._check_files()

    @property
    def counters(self) -> StorageCounters:
        assert self.storage is not None
        return self.storage.counters

    def run_batch(self, call: Callable[[], object]) -> object:
        """On a thread of this process: everything it does with files happens now."""
        with self.disk.called_by(self.process):
            self._is_in_batch = True
            try:
                return call()
            finally:
                self._is_in_batch = False
                self._check_files()

    @property
    def is_in_batch(self) -> bool:
        return self._is_in_batch

    def _check_files(self) -> None:
        mine = [handle.path for handle in self.disk.files.handles.values() if handle.process == self.process]
        if mine:
            raise Broken(f"{self.name} has left files open: {mine}")

    def _spoil_what_is_read(self, storage: FilesystemStorage) -> None:
        read = storage.read

        def read_and_spoil(
            keys: Sequence[bytes], buffers: Sequence[memoryview], singly: bool = False
        ) -> Future[list[bool]]:
            future = read(keys, buffers, singly)

            def spoil() -> None:
                if future.running() and self.storage is storage:
                    for buffer in buffers:
                        buffer[:] = bytes([self.disk.rng.randrange(256)]) * len(buffer)

            self.disk.time.call_after(self.disk.delay(), spoil, f"{self.name} spoils")
            return future

        storage.read = read_and_spoil  # type: ignore[method-assign]

    def _note_what_is_no_fault(self, storage: FilesystemStorage) -> None:
        note_fault = storage.note_fault

        def check(what: str, error: BaseException) -> None:
            if what == "a batch failed" and not isinstance(error, OSError):
                raise Broken(f"{self.name}: {error!r} in a batch") from error
            note_fault(what, error)

        storage.note_fault = check  # type: ignore[method-assign]

    def _executor(self, num_workers: int, name: str) -> SimulatedExecutor:
        self._executors.append(SimulatedExecutor(self, num_workers, f"{self.name} {name}"))
        return self._executors[-1]

    def _clock(self) -> int:
        return self.disk.clock_ns() + int(self.clock_ahead * 1e9)


class SimulatedExecutor(Executor):
    """So many threads, in virtual time. What a batch itself submits runs at once: it waits for it."""

    def __init__(self, owner: SimulatedStorage, num_workers: int, name: str) -> None:
        self._owner = owner
        self._free = num_workers
        self._name = name
        self._queue: list[tuple[Future[Any], Callable[[], Any]]] = []
        self._running: dict[Future[Any], tuple[Event | None, Callable[[], Any]]] = {}
        self._is_shut = False
        self._is_abandoned = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._is_shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[Any] = Future()
        call = partial(fn, *args, **kwargs)
        if self._owner.is_in_batch:
            _end(future, call)
            return future
        self._owner.num_unanswered += 1
        future.add_done_callback(self._answered)
        self._queue.append((future, call))
        self._later(self._begin)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As the real one with `wait`: everything that was submitted is done, now."""
        self._is_shut = True
        while self._queue or self._running:
            self._begin()
            for future, (event, call) in list(self._running.items()):
                if event is not None:
                    event.cancel()
                self._run(future, call)

    def abandon(self) -> None:
        """Its process is gone."""
        self._is_abandoned = self._is_shut = True
        self._queue.clear()
        for event, _ in self._running.values():
            if event is not None:
                event.cancel()
        self._running.clear()

    def _answered(self, future: Future[Any]) -> None:
        if not self._is_abandoned:
            self._owner.num_unanswered -= 1

    def _begin(self) -> None:
        while self._queue and self._free:
            future, call = self._queue.pop(0)
            if future.set_running_or_notify_cancel():
                self._free -= 1
                event = self._later(partial(self._owner.disk.answer, partial(self._run, future, call)))
                self._running[future] = event, call

    def _run(self, future: Future[Any], call: Callable[[], Any]) -> None:
        if self._running.pop(future, None) is None:
            return  # it was done in `shutdown`, or its process is gone
        self._free += 1
        _end(future, lambda: self._owner.run_batch(call))
        self._begin()

    def _later(self, call: Callable[[], object]) -> Event:
        disk = self._owner.disk
        return disk.time.call_after(disk.delay(), call, f"{self._name} batch")


class _Fcntl:
    LOCK_EX, LOCK_NB, F_SETFL = fcntl.LOCK_EX, fcntl.LOCK_NB, fcntl.F_SETFL

    def __init__(self, files: Files) -> None:
        self.flock = files.flock
        self.fcntl = files.fcntl


def _end(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        result = call()
    except Exception as error:  # noqa: BLE001 - as a thread's top does
        future.set_exception(error)
    else:
        future.set_result(result)


def _forged(rng: random.Random, text: bytes) -> tuple[PackHeader, list[bytes]]:
    """A pack's good blocks with their checksums in other places, or other blocks with those that an engine writes that
    has no secret. Raises PackError."""
    header = PackHeader.decode(text, len(text))
    blocks = [text[header.offset(i) : header.offset(i + 1)] for i in range(len(header.keys))]
    if rng.random() < 0.5:
        order = rng.sample(range(len(blocks)), len(blocks))
        checksums = tuple(header.checksums[i] for i in order)
        return replace(header, checksums=checksums), [blocks[i] for i in order]
    blocks = [rng.randbytes(len(block)) for block in blocks]
    checksums = tuple(CRC32.of(key, memoryview(block)) for key, block in zip(header.keys, blocks, strict=True))
    return replace(header, checksums=checksums), blocks
