"""Blocks of windows and states in a store of objects: each is an object, and found whatever is in front of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kv_connector.storage.objects.backend import ObjectStorage
from tests.storage.objects.stores import ImitatedStore, connected
from tests.storage.storages import IDENTITY, SECONDS, buffers, content, key

SMALL = 128 << 10  # groups of eight


@pytest.fixture
def store() -> ImitatedStore:
    return ImitatedStore()


@pytest.fixture
def storage(store: ImitatedStore) -> Iterator[ObjectStorage]:
    backend = connected(ObjectStorage("mooncake", store, IDENTITY, SMALL))
    yield backend
    backend.close()


def write(storage: ObjectStorage, keys: list[bytes], singly: bool) -> list[bool]:
    blocks = buffers(len(keys), SMALL)
    for block_key, block in zip(keys, blocks, strict=True):
        block[:] = content(block_key, SMALL)
    return storage.write(keys, blocks, singly).result(SECONDS)


def read(storage: ObjectStorage, keys: list[bytes], singly: bool) -> list[bool]:
    blocks = buffers(len(keys), SMALL)
    found = storage.read(keys, blocks, singly).result(SECONDS)
    for block_key, block, is_found in zip(keys, blocks, found, strict=True):
        assert not is_found or bytes(block) == content(block_key, SMALL)
    return found


def test_each_block_is_an_object_and_found_by_itself(storage: ObjectStorage, store: ImitatedStore) -> None:
    keys = [key(i) for i in range(10)]
    there = [i not in (0, 4, 5) for i in range(10)]
    kept = [k for k, is_there in zip(keys, there, strict=True) if is_there]
    assert write(storage, kept, singly=True) == [True] * 7
    assert len(store.objects) == 7
    assert storage.which(keys).result(SECONDS) == there
    assert read(storage, keys, singly=True) == there


def test_what_is_there_is_not_written_again_wherever_gaps_are(storage: ObjectStorage) -> None:
    keys = [key(i) for i in range(6)]
    write(storage, [keys[1], keys[4]], singly=True)
    assert write(storage, keys, singly=True) == [True] * 6
    stats = storage.stats()
    assert (stats["written_blocks"], stats["skipped_writes_blocks"]) == (6, 2)


def test_more_blocks_than_one_question_names_are_all_asked_for(storage: ObjectStorage, store: ImitatedStore) -> None:
    keys = [key(i) for i in range(1100)]
    write(storage, keys[1000:1001], singly=True)
    store.calls.clear()
    assert storage.which(keys).result(SECONDS) == [i == 1000 for i in range(1100)]
    assert [count for _, count in store.calls] == [512, 512, 76]


def test_a_store_that_is_gone_has_none(storage: ObjectStorage, store: ImitatedStore) -> None:
    keys = [key(i) for i in range(3)]
    write(storage, keys, singly=True)
    store.is_down = True
    assert storage.which(keys).result(SECONDS) == [False] * 3
    assert read(storage, keys, singly=True) == [False] * 3
