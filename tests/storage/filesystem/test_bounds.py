"""Who can write to a folder decides neither how much memory engines take for its index, nor that good packs go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_connector.storage.filesystem import journal
from kv_connector.storage.filesystem.backend import FilesystemStorage
from kv_connector.storage.filesystem.journal import Journal, encoded, most_bytes
from kv_connector.storage.filesystem.layout import FolderLayout
from kv_connector.storage.filesystem.packs import MAX_BLOCKS, PAGE, PackHeader
from tests.storage.storages import (
    BLOCK,
    CAPACITY,
    IDENTITY,
    PER_PACK,
    SECONDS,
    exists,
    get,
    key,
    keys_of,
    open_store,
    put,
    size_of,
)


@pytest.fixture(autouse=True)
def few_spare_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are 5 MB, which small folders would never fill."""
    monkeypatch.setattr(journal, "_SPARE_RECORDS", 0)


def invented(block_bytes: int = PAGE, identity: bytes = bytes(32)) -> Iterator[PackHeader]:
    """Headers of packs that nobody wrote."""
    number = 0
    while True:
        yield PackHeader(identity, block_bytes, (key(f"invented {number}"),), (bytes(4),))
        number += 1


def lengthen(index: Path, num_bytes: int) -> None:
    """Good records behind what is there, of packs that are not."""
    headers = invented()
    with index.open("ab") as file:
        while file.tell() <= num_bytes:
            file.write(encoded((1, next(headers).text())))


@pytest.mark.parametrize("checksum_bytes", [4, 16])
def test_a_record_takes_a_small_part_of_its_pack(checksum_bytes: int) -> None:
    """From which follows how long a journal of what lies there can be."""
    for count in (*range(1, 200), MAX_BLOCKS):
        header = PackHeader(IDENTITY, PAGE, (bytes(32),) * count, (bytes(checksum_bytes),) * count)
        assert len(encoded((0, header.text()))) * journal._PACK_SHARE <= header.file_bytes


def test_an_index_that_is_too_long_is_not_read_and_is_written_anew(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert all(put(store, keys_of("a")))
    store.close()
    index = tmp_path / "index"
    before = index.stat().st_size
    lengthen(index, most_bytes(CAPACITY))
    too_long = Journal(index, most_bytes(CAPACITY))
    assert too_long.read() == [] and not too_long.is_whole
    store = open_store(tmp_path)
    store.recovered.result(SECONDS)
    assert index.stat().st_size == before
    assert len(store.folder.catalog) == 1
    assert exists(store, keys_of("a")) == PER_PACK
    assert all(get(store, keys_of("a")))
    store.close()


def test_an_index_as_long_as_it_may_be_is_read(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    index = tmp_path / "index"
    lengthen(index, most_bytes(CAPACITY) - 200)
    longest = Journal(index, index.stat().st_size)
    assert len(longest.read()) > 1000 and longest.is_whole
    lengthen(index, index.stat().st_size)
    assert longest.read() == [] and not longest.is_whole


def test_an_index_that_gets_too_long_costs_a_running_engine_nothing(tmp_path: Path) -> None:
    """One that was read would take the room of all that lies there."""
    store = open_store(tmp_path)
    assert all(put(store, keys_of("a")))
    lengthen(tmp_path / "index", CAPACITY)
    assert exists(store, keys_of("a") + keys_of("b")) == PER_PACK
    assert len(store.folder.catalog) == 1
    assert all(put(store, keys_of("b")))
    assert (tmp_path / "index").stat().st_size < most_bytes(CAPACITY)
    assert store.stats()["evicted_blocks"] == 0
    assert all(get(store, keys_of("a") + keys_of("b")))
    store.close()


def test_what_claims_more_than_a_folder_holds_takes_no_room_of_good_packs(tmp_path: Path) -> None:
    """A record of a pack with blocks of exabytes, and a small file of its name."""
    store = open_store(tmp_path)
    assert all(put(store, keys_of("a")))
    header = next(invented(1 << 62, IDENTITY))
    FolderLayout(tmp_path).path(header.name).write_bytes(header.encode())
    with (tmp_path / "index").open("ab") as file:
        file.write(encoded((1, header.text())))
    assert all(put(store, keys_of("b")))
    assert store.stats()["evicted_blocks"] == 0
    assert all(get(store, keys_of("a") + keys_of("b")))
    store.close()
    store = open_store(tmp_path)
    store.recovered.result(SECONDS)
    assert store.stats()["stored_bytes"] == sum(path.stat().st_size for path in tmp_path.rglob("*.pack"))
    store.close()


def test_a_folder_whose_capacity_was_lowered_is_used_on(tmp_path: Path) -> None:
    """The index of what lies there is longer than the new capacity's, until most of it has gone."""
    capacity, num_packs = 64 * BLOCK, 400

    def opened(capacity: int) -> FilesystemStorage:
        storage = FilesystemStorage(tmp_path, IDENTITY, PAGE, capacity, PAGE)
        storage.recovered.result(SECONDS)
        return storage

    store = opened(1 << 30)
    assert all(put(store, keys_of("a", num_packs), PAGE))
    store.close()
    assert (tmp_path / "index").stat().st_size > most_bytes(capacity)
    store = opened(capacity)
    store.folder.recover()  # and no error that says that the disk does not hold what was written
    assert exists(store, keys_of("a", num_packs)) == num_packs
    assert all(put(store, keys_of("b", 4), PAGE))
    assert size_of(tmp_path) <= capacity
    assert all(get(store, keys_of("b", 4), PAGE))
    store.close()
