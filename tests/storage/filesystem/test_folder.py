"""The index of a folder that other processes write to, looked at again and again."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from kv_connector.storage.filesystem import contents
from kv_connector.storage.filesystem.backend import FilesystemStorage
from kv_connector.storage.filesystem.catalog import Facts
from kv_connector.storage.filesystem.contents import FolderContents
from kv_connector.storage.filesystem.folder import PackFolder
from kv_connector.storage.filesystem.journal import Journal
from kv_connector.storage.filesystem.packs import PackHeader, read_header, summary
from tests.storage.storages import (
    BLOCK,
    IDENTITY,
    PER_PACK,
    SECONDS,
    capacity_for,
    exists,
    files_of,
    get,
    key,
    keys_of,
    open_store,
    put,
    size_of,
)

BLOCK_BYTES = 4096


def add(folder: PackFolder, block_key: bytes) -> None:
    """Another process adds a pack of one block, and its record in the journal is lost."""
    header = PackHeader(IDENTITY, BLOCK_BYTES, (block_key,), (bytes(4),))
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


def missed_pack(store: FilesystemStorage, name: str) -> str:
    """A pack of these blocks, whose file the disk did not give a moment ago."""
    assert all(put(store, keys_of(name)))
    (slot,) = store.folder.catalog.slots(keys_of(name, 1))
    assert slot is not None
    store.folder.missed(slot.pack.name)
    assert exists(store, keys_of(name)) == 0
    return slot.pack.name


def test_who_misses_a_pack_just_as_it_is_looked_at_again_does_not_lose_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader's EIO on its own thread, between the look and what comes of it: the next write looks once more."""
    store = open_store(tmp_path)
    missed_pack(store, "a")
    add = store.folder.catalog.add

    def then_missed(packs: Iterable[tuple[Facts, Sequence[bytes]]]) -> None:
        monkeypatch.undo()
        taken_in = list(packs)
        add(taken_in)
        for (name, *_), _ in taken_in:
            store.folder.missed(name)

    monkeypatch.setattr(store.folder.catalog, "add", then_missed)
    assert all(put(store, keys_of("b")))
    assert exists(store, keys_of("a")) == 0
    assert all(put(store, keys_of("c")))
    assert exists(store, keys_of("a")) == PER_PACK
    assert all(get(store, keys_of("a")))
    store.close()


def test_a_pack_whose_size_the_disk_does_not_tell_is_looked_for_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    missed_pack(store, "a")
    looked = []

    def broken(contents: FolderContents, name: str) -> None:
        looked.append(name)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(FolderContents, "_look_at", broken)
        assert put(store, keys_of("b")) == [False] * PER_PACK, "room is not made by guess"
    assert len(looked) == 1
    assert all(put(store, keys_of("b")))
    assert exists(store, keys_of("a")) == PER_PACK
    store.close()


def test_a_pack_that_is_gone_is_looked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator has deleted thousands: each write would ask the disk for all of them."""
    store = open_store(tmp_path)
    store.folder.layout.path(missed_pack(store, "a")).unlink()
    asked = []

    def counted(path: Path) -> tuple[os.stat_result, PackHeader | None, str]:
        asked.append(path)
        return read_header(path)

    monkeypatch.setattr(contents, "read_header", counted)
    assert all(put(store, keys_of("b"))) and all(put(store, keys_of("c")))
    assert len(asked) == 1
    store.close()


def test_blocks_of_another_size_only_take_room(tmp_path: Path) -> None:
    """Under the same identity, as when a pack is forged: nothing of it is read, nor taken for damaged."""
    other = open_store(tmp_path, block_bytes=2 * BLOCK)
    assert all(put(other, keys_of("a", 3), 2 * BLOCK))
    other.close()
    store = open_store(tmp_path)
    store.recovered.result(SECONDS)
    assert exists(store, keys_of("a", 3)) == 0
    assert get(store, keys_of("a", 3)) == [False] * 3
    stats = store.stats()
    assert (stats["stored_blocks"], stats["corrupt_blocks"]) == (0, 0)
    assert stats["stored_bytes"] == sum(path.stat().st_size for path in files_of(tmp_path)) > 0
    store.close()


def test_nothing_lies_there_that_the_journal_has_not_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what an engine leaves that is killed in between would be in nobody's count until the folder is listed."""
    store = open_store(tmp_path)
    store.recovered.result(SECONDS)

    def broken(journal: Journal, records: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "append", broken)
        assert put(store, keys_of("a")) == [False] * PER_PACK
    assert not files_of(tmp_path)
    assert all(put(store, keys_of("a"))) and all(get(store, keys_of("a")))
    store.close()


@pytest.mark.parametrize("is_lost", [True, False], ids=["the old journal is lost", "the old journal is there"])
def test_who_writes_the_journal_anew_tells_of_the_packs_of_others_too(
    tmp_path: Path, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another model: its next start opens no pack. Nor does who writes it, where the old one tells of them."""
    theirs = open_store(tmp_path)
    theirs.recovered.result(SECONDS)
    assert all(put(theirs, keys_of("a")))
    theirs.close()
    mine = PackFolder(tmp_path, bytes(32), BLOCK_BYTES, 1 << 30)
    mine.contents.catch_up()
    if is_lost:
        (tmp_path / "index").unlink()
    else:
        monkeypatch.setattr(Journal, "is_wasteful", lambda journal, num_packs: True)
        monkeypatch.setattr(contents, "read_header", None)
    mine.recover()
    (pack,) = files_of(tmp_path)
    assert [summary(text)[1] for _, text in Journal(tmp_path / "index").read()] == [pack.stem]
