"""The index of a folder that other processes write to, looked at again and again."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from kv_connector.storage.filesystem.folder import PackFolder
from kv_connector.storage.filesystem.packs import PackHeader, pack_name
from tests.storage.storages import IDENTITY, key

BLOCK_BYTES = 4096


def same_sub_folder() -> tuple[bytes, bytes]:
    """Keys of two blocks whose packs lie in one sub-folder."""
    first = key(0)
    there = pack_name(IDENTITY, (first,))[:2]
    return first, next(k for k in map(key, itertools.count(1)) if pack_name(IDENTITY, (k,))[:2] == there)


def add(folder: PackFolder, block_key: bytes, changed_ns: int) -> None:
    """Another process adds a pack of one block, and is killed before it has told of it in the journal."""
    header = PackHeader(IDENTITY, BLOCK_BYTES, (block_key,), (0,))
    path = folder.path(pack_name(IDENTITY, header.keys))
    path.write_bytes(header.encode() + bytes(BLOCK_BYTES))
    os.utime(path.parent, ns=(changed_ns, changed_ns))


def test_a_pack_that_comes_within_the_same_time_stamp_as_another_is_found(tmp_path: Path) -> None:
    """Time stamps of file systems are coarse: a sub-folder that has just changed may change again under the same one.
    What is missed lies there for ever, and in nobody's count of what the folder takes."""
    now = 10**18
    folder = PackFolder(tmp_path, IDENTITY, BLOCK_BYTES, 1 << 30, clock=lambda: now)
    first, second = same_sub_folder()
    add(folder, first, now)
    folder.refresh()
    assert len(folder) == 1
    add(folder, second, now)
    folder.refresh()
    assert len(folder) == 2
