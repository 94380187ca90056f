"""Packs that turn out to be damaged, or cannot be read, while they are: what goes with them, and what must not."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import pytest

from kv_connector.storage.filesystem.backend import FilesystemStorage
from kv_connector.storage.filesystem.packs import PAGE, PackHeader
from tests.storage.storages import BLOCK, CAPACITY, IDENTITY, SECONDS, exists, files_of, get, keys_of, open_store, put

KEYS = keys_of("a", 5)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FilesystemStorage]:
    """With one pack."""
    one = open_store(tmp_path)
    one.recovered.result(SECONDS)
    assert all(put(one, KEYS))
    yield one
    one.close()


def flip(path: Path, *places: int) -> None:
    """A bit of each of these bytes."""
    text = bytearray(path.read_bytes())
    for place in places:
        text[place] ^= 1
    path.write_bytes(text)


def test_a_pack_whose_header_is_damaged_too_goes_as_a_whole(store: FilesystemStorage, tmp_path: Path) -> None:
    """Whoever starts without the journal could read nothing of it: its blocks are stored once more."""
    (path,) = files_of(tmp_path)
    flip(path, 20, PAGE + 77)
    assert get(store, KEYS[:1]) == [False]
    assert not path.exists() and exists(store, KEYS[1:]) == 0
    assert all(put(store, KEYS)) and all(get(store, KEYS))


def test_a_pack_that_was_stored_again_meanwhile_is_not_deleted_for_the_damage_of_the_one_before(
    store: FilesystemStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the header of a damaged pack is looked at the pack is removed and stored anew, under the same name."""
    (path,) = files_of(tmp_path)
    flip(path, PAGE + 77)
    read_anew = store.folder.contents.read_anew

    def late(name: str) -> PackHeader | None:
        monkeypatch.undo()
        assert store.remove(KEYS).result(SECONDS) == len(KEYS)
        assert all(put(store, KEYS))
        return read_anew(name)

    monkeypatch.setattr(store.folder.contents, "read_anew", late)
    assert get(store, KEYS[:1]) == [False]
    assert files_of(tmp_path) == [path]
    assert all(get(store, KEYS))


def test_what_a_disk_does_not_give_is_asked_for_once_in_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is dying takes seconds for each answer: the rest of the pack is not asked for."""

    def one_by_one(num_threads: int, name: str) -> Executor:
        return ThreadPoolExecutor(1, name)

    store = FilesystemStorage(tmp_path, IDENTITY, BLOCK, CAPACITY, executor=one_by_one)
    assert all(put(store, KEYS))
    asked = []

    def broken(*arguments: object) -> int:
        asked.append(arguments)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    assert get(store, KEYS[::2]) == [False] * 3, "three blocks that are no neighbours"
    assert len(asked) == 1
    store.close()


def test_a_pack_that_could_not_be_read_is_opened_anew(
    store: FilesystemStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server restored the folder: what is open is stale for ever, however many batches follow each other."""
    (path,) = files_of(tmp_path)
    stale, preadv = path.stat().st_ino, os.preadv

    def restored(descriptor: int, *arguments: object) -> int:
        if os.fstat(descriptor).st_ino == stale:
            raise OSError(errno.ESTALE, "Stale file handle")
        return preadv(descriptor, *arguments)  # type: ignore[arg-type]

    with store.folder.opened.batch(), path.open():  # so that no other file is given its number
        assert all(get(store, KEYS))
        shutil.copy(path, tmp_path / "copy")
        os.rename(tmp_path / "copy", path)
        monkeypatch.setattr(os, "preadv", restored)
        assert get(store, KEYS) == [False] * len(KEYS)
        assert all(put(store, KEYS)), "it is looked for again"
        assert all(get(store, KEYS))
