"""The index of a folder that other processes write to, looked at again and again."""

from __future__ import annotations

from pathlib import Path

from kv_connector.storage.filesystem.folder import PackFolder
from kv_connector.storage.filesystem.packs import PackHeader
from tests.storage.storages import IDENTITY, key

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
