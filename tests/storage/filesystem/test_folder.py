"""The index of a folder that other processes write to, looked at again and again."""

from __future__ import annotations

from pathlib import Path

from kv_connector.storage.filesystem.folder import PackFolder
from kv_connector.storage.filesystem.packs import PackHeader
from tests.storage.storages import IDENTITY, PER_PACK, capacity_for, exists, get, key, keys_of, open_store, put, size_of

BLOCK_BYTES = 4096


def add(folder: PackFolder, block_key: bytes) -> None:
    """Another process adds a pack of one block, and its record in the journal is lost."""
    header = PackHeader(IDENTITY, BLOCK_BYTES, (block_key,), (0,))
    folder.layout.path(header.name).write_bytes(header.encode() + bytes(BLOCK_BYTES))


def test_packs_that_nobody_has_told_of_are_found_when_the_folder_is_listed(tmp_path: Path) -> None:
    """What is missed lies there for ever, and in nobody's count of what the folder takes."""
    folder = PackFolder(tmp_path, IDENTITY, BLOCK_BYTES, 1 << 30)
    for number in (1, 2):
        add(folder, key(number))
        folder.recover()
        assert folder.catalog.num_blocks == number


def test_packs_that_are_missed_while_the_disk_is_away_count_again_when_it_is_back(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store", capacity_for(2))
    put(store, keys_of("a"))
    put(store, keys_of("b"))
    (tmp_path / "store").rename(tmp_path / "away")
    assert not any(get(store, keys_of("a")) + get(store, keys_of("b")))
    (tmp_path / "away").rename(tmp_path / "store")
    assert all(put(store, keys_of("c")))
    assert size_of(tmp_path / "store") <= capacity_for(2)
    assert sorted(exists(store, keys_of(name)) for name in "ab") == [0, PER_PACK]
    store.close()
