"""Stores of objects for tests of the Mooncake backend: an imitation in memory, and the real one on loopback."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from integration.mooncake_master import MooncakeMaster, running_store, store_config, why_not
from integration.servers import SHARED
from kv_connector.storage.mooncake.client import MooncakeClient, MooncakeOptions
from kv_connector.storage.objects.backend import ObjectStorage
from kv_connector.storage.objects.client import Answer, StoreUnreachable, Transfer
from tests.waiting import until

SECONDS = 120.0


class ImitatedStore:
    """A client of a dictionary, which several may share; it fails as the test says."""

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        self.objects: dict[str, bytes] = {} if objects is None else objects
        self.is_down = False
        self.faults = 0  # objects, from now on, whose owner does not answer
        self.max_objects = 1 << 30
        self.calls: list[tuple[str, int]] = []
        self.connections: list[bool] = []
        self.down_calls = 0
        self._lock = threading.Lock()

    def connect(self, regions: Sequence[tuple[int, int]]) -> None:
        self.connections.append(not self.is_down)
        if self.is_down:
            raise StoreUnreachable("no master here")

    def exist(self, names: Sequence[str]) -> list[bool]:
        self._enter("exist", len(names))
        return [name in self.objects for name in names]

    def get(self, transfers: Sequence[Transfer]) -> list[Answer]:
        self._enter("get", len(transfers))
        last = {transfer.name: transfer for transfer in transfers}  # of one name twice Mooncake fills one
        return [self._get(transfer) if last[transfer.name] is transfer else Answer.OK for transfer in transfers]

    def put(self, transfers: Sequence[Transfer]) -> list[Answer]:
        self._enter("put", len(transfers))
        return [self._put(transfer) for transfer in transfers]

    def remove(self, names: Sequence[str]) -> list[bool]:
        self._enter("remove", len(names))
        return [self.objects.pop(name, None) is not None for name in names]

    def last_fault(self) -> str:
        return "it does not answer"

    def close(self) -> None:
        self.is_down = True

    def _enter(self, name: str, count: int) -> None:
        with self._lock:
            self.calls.append((name, count))
            if self.is_down:
                self.down_calls += 1
                raise StoreUnreachable("the master is gone")

    def _is_faulty(self) -> bool:
        with self._lock:
            is_faulty = self.faults > 0
            self.faults -= is_faulty
            return is_faulty

    def _get(self, transfer: Transfer) -> Answer:
        if self._is_faulty():
            return Answer.FAULT
        content = self.objects.get(transfer.name)
        if content is None:
            return Answer.MISSING
        if len(content) != sum(fragment.num_bytes for fragment in transfer.fragments):
            return Answer.FAULT
        offset = 0
        for address, num_bytes in transfer.fragments:
            ctypes.memmove(address, content[offset : offset + num_bytes], num_bytes)
            offset += num_bytes
        return Answer.OK

    def _put(self, transfer: Transfer) -> Answer:
        if self._is_faulty():
            return Answer.FAULT
        if len(self.objects) >= self.max_objects:
            return Answer.NO_ROOM
        content = b"".join(ctypes.string_at(fragment.address, fragment.num_bytes) for fragment in transfer.fragments)
        self.objects.setdefault(transfer.name, content)
        return Answer.OK


def make_imitated(folder: Path, block_bytes: int = 16384) -> ObjectStorage:
    """On an imitated store of its own; each block is a group."""
    identity = identity_of(folder)
    return connected(ObjectStorage("mooncake", ImitatedStore(), identity, block_bytes, group_bytes=block_bytes))


def make_mooncake(folder: Path, block_bytes: int = 16384) -> ObjectStorage:
    """On the real store of this run of tests; `folder` names what it shares with others, and each block is a group.
    Skips without Mooncake."""
    if reason := why_not():
        pytest.skip(reason)
    client = MooncakeClient(MooncakeOptions.of(store_config(shared_store()), 1, 1))
    identity = identity_of(folder)
    return connected(ObjectStorage("mooncake", client, identity, block_bytes, group_bytes=block_bytes))


def connected(storage: ObjectStorage) -> ObjectStorage:
    """The same, once it has reached its store."""
    assert storage.connected.wait(SECONDS)
    until(lambda: not storage.stats()["breaker_is_open"], told=storage.stats, seconds=SECONDS)
    return storage


def identity_of(folder: Path) -> bytes:
    """One for each folder."""
    return hashlib.sha256(str(folder).encode()).digest()


@functools.cache
def shared_store() -> MooncakeMaster:
    """A master and 256 MiB of another process, until the tests end."""
    return SHARED.enter_context(running_store(256 << 20))
