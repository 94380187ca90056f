"""A store of objects that ranks share, and the real backend on it, in virtual time and without threads.

Objects are files of the simulated disk, so every fault of the disk is one of the store: it is slow or silent, loses,
damages or forgets objects, has no room, or cannot be reached. An object is there as a whole or not at all; a read that
fails may have written to its memory. The backend is given executors and a clock, and the thread that looks for a store
that was lost is an event.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from kv_connector.storage.objects import guarded
from kv_connector.storage.objects.backend import ObjectStorage
from kv_connector.storage.objects.client import Answer, StoreUnreachable, Transfer

from .disk import Disk, SimulatedStorage
from .files import File, Folder

FOLDER = "objects"


class ObjectsOnDisk:
    """See `StoreClient`. Of more than `capacity` bytes the oldest objects are forgotten."""

    def __init__(self, disk: Disk, capacity: int) -> None:
        self.disk = disk
        self._files = disk.files
        self._capacity = capacity

    def connect(self, regions: Sequence[tuple[int, int]]) -> None:
        self._objects()

    def exist(self, names: Sequence[str]) -> list[bool]:
        objects = self._objects()
        return [name in objects for name in names]

    def get(self, transfers: Sequence[Transfer]) -> list[Answer]:
        return [self._get(self._objects(), transfer) for transfer in transfers]

    def put(self, transfers: Sequence[Transfer]) -> list[Answer]:
        return [self._put(self._objects(), transfer) for transfer in transfers]

    def remove(self, names: Sequence[str]) -> list[bool]:
        objects = self._objects()
        return [objects.pop(name, None) is not None for name in names]

    def last_fault(self) -> str:
        return "the disk has failed"

    def close(self) -> None:
        """Nothing is open."""

    def _objects(self) -> dict[str, Any]:
        if self.disk.is_lost:
            raise StoreUnreachable("the disk is lost")
        folder = self._files.tree.entries.setdefault(FOLDER, Folder())
        assert isinstance(folder, Folder)
        return folder.entries

    def _get(self, objects: dict[str, Any], transfer: Transfer) -> Answer:
        file = objects.get(transfer.name)
        if file is None:
            return Answer.MISSING
        offset = 0
        for address, num_bytes in transfer.fragments:
            content = bytes(file.data[offset : offset + num_bytes])
            ctypes.memmove(address, content, len(content))
            offset += num_bytes
        if not self._works("preadv", transfer.name):
            return Answer.FAULT
        return Answer.OK if len(file.data) == offset else Answer.DAMAGED

    def _put(self, objects: dict[str, Any], transfer: Transfer) -> Answer:
        if transfer.name in objects:
            return Answer.OK
        content = b"".join(ctypes.string_at(*fragment) for fragment in transfer.fragments)
        if not self._works("pwritev", transfer.name):
            return Answer.FAULT
        while objects and sum(len(file.data) for file in objects.values()) + len(content) > self._capacity:
            del objects[next(iter(objects))]
        if not self._files.room(len(content)):
            return Answer.NO_ROOM
        file = objects[transfer.name] = File(bytearray(content))
        self._files.after_write(file, 0, len(content))
        return Answer.OK

    def _works(self, call: str, name: str) -> bool:
        try:
            self._files.before(call, f"/{FOLDER}/{name}")
        except OSError:
            return False
        return True


class SimulatedObjects(SimulatedStorage):
    """One rank's process with groups of `group_blocks` blocks. See `SimulatedStorage`."""

    def __init__(
        self, disk: Disk, name: str, identity: bytes, capacity: int, group_blocks: int, secret: bytes = b""
    ) -> None:
        super().__init__(disk, name, identity, capacity, secret=secret)
        self._group_blocks = group_blocks
        self._is_probe_due = False

    def open_storage(
        self, block_bytes: int, pool: memoryview, arrangement: str = "", num_served: int = 1
    ) -> ObjectStorage:  # type: ignore[override]
        """The real backend, as a new process."""
        assert self.storage is None, f"{self.name} runs already: kill or close it first"
        self.process = max(self.disk.files.processes, default=100) + 1
        self.disk.files.processes.add(self.process)
        idle = SimpleNamespace(start=lambda: None, join=lambda: None)
        with patch.object(guarded, "threading", SimpleNamespace(Event=threading.Event, Thread=lambda **_: idle)):
            storage = ObjectStorage(
                "objects",
                ObjectsOnDisk(self.disk, self._capacity),
                self._identity,
                block_bytes,
                pool,
                self.disk.time.now,
                group_bytes=self._group_blocks * block_bytes,
                executor=self._executor,
                check=self._check,
            )
        assert storage.group_blocks == self._group_blocks
        self.storage = storage  # type: ignore[assignment]
        self._spoil_what_is_read(storage)  # type: ignore[arg-type]
        self._note_what_is_no_fault(storage)  # type: ignore[arg-type]
        self._probe_later()
        return storage

    def run_batch(self, call: Any) -> object:
        """See `SimulatedStorage.run_batch`. What it has found out may be that the store is to be looked for."""
        try:
            return super().run_batch(call)
        finally:
            self._probe_later()

    def _probe_later(self) -> None:
        if self.storage is None or self._is_probe_due:
            return
        seconds = self._client.breaker.seconds_to_probe()
        if seconds is not None:
            self._is_probe_due = True
            probe = partial(self.disk.answer, partial(self._probe, self.storage))
            self.disk.time.call_after(seconds + self.disk.delay(), probe, f"{self.name} looks for the store")

    def _probe(self, storage: object) -> None:
        if self.storage is not storage:
            return  # its process has ended
        self._is_probe_due = False
        if self._client.breaker.begin_probe():
            self._client.breaker.end_probe(self._client._probe())
        self._probe_later()

    def kill(self) -> None:
        super().kill()
        self._is_probe_due = False

    @property
    def _client(self) -> guarded.GuardedClient:
        assert isinstance(self.storage, ObjectStorage)
        return self.storage._client
