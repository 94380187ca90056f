"""Packs that stay open while they are read: never the wrong file, never too many, none behind the last batch."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_connector.storage.filesystem import descriptors
from kv_connector.storage.filesystem.backend import FilesystemStorage
from kv_connector.storage.filesystem.descriptors import OpenPack, OpenPacks
from kv_connector.storage.filesystem.layout import FolderLayout
from tests.storage.storages import PER_PACK, SECONDS, exists, files_of, get, key, keys_of, open_store, put

NUM_PACKS = 6


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FilesystemStorage]:
    """With packs a, b, c and so on."""
    one = open_store(tmp_path)
    one.recovered.result(SECONDS)
    for turn in range(NUM_PACKS):
        put(one, keys_of(turn))
    yield one
    one.close()


def open_packs() -> list[str]:
    """Files of packs that this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # of the listing itself
            continue
    return [path for path in found if ".pack" in path]


def names_in(folder: Path) -> list[str]:
    return [path.stem for path in files_of(folder)]


def test_a_pack_is_opened_once_for_all_batches_and_closed_behind_the_last(
    store: FilesystemStorage, tmp_path: Path
) -> None:
    opened, name = store.folder.opened, names_in(tmp_path)[0]
    with opened.batch():
        with opened.batch():
            first = opened.borrow(name, 0)
            opened.give_back(first)
        second = opened.borrow(name, 0)
        assert second is first
        direct = opened.borrow(name, os.O_DIRECT if store.is_direct else os.O_SYNC)
        assert direct is not first, "its flags are others"
        assert len(open_packs()) == 2
        opened.give_back(second)
        opened.give_back(direct)
    assert not open_packs()


def test_reads_leave_nothing_open(store: FilesystemStorage) -> None:
    """A file that is open keeps its room on the disk when another process deletes it."""
    for turn in range(NUM_PACKS):
        assert all(get(store, keys_of(turn)))
    assert not open_packs()


def test_only_so_many_are_open_and_none_that_is_read_is_closed(
    store: FilesystemStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "MOST_OPEN", 3)
    opened, (used, *others) = store.folder.opened, names_in(tmp_path)
    with opened.batch():
        mine = opened.borrow(used, 0)
        inode = os.fstat(mine.descriptor).st_ino
        for name in others:
            opened.give_back(opened.borrow(name, 0))
            assert len(open_packs()) <= 3
        assert os.fstat(mine.descriptor).st_ino == inode
        assert opened.borrow(used, 0) is mine
        opened.give_back(mine)
        opened.give_back(mine)
    assert not open_packs()


def test_a_pack_that_is_dropped_is_closed_behind_its_last_reader(store: FilesystemStorage, tmp_path: Path) -> None:
    opened, name = store.folder.opened, names_in(tmp_path)[0]
    with opened.batch():
        mine = opened.borrow(name, 0)
        opened.drop(name)
        again = opened.borrow(name, 0)
        assert again is not mine and len(open_packs()) == 2
        opened.give_back(mine)
        assert len(open_packs()) == 1
        opened.give_back(again)
    assert not open_packs()


def test_where_the_process_may_open_no_more_files_unused_ones_are_closed(
    store: FilesystemStorage, tmp_path: Path
) -> None:
    opened, names = store.folder.opened, names_in(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.dup(0) for _ in range(4)]  # the lowest ones, whatever lies between them
    for descriptor in free:
        os.close(descriptor)
    try:
        with opened.batch():
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(free) + 1, hard))
            for name in names:
                opened.give_back(opened.borrow(name, 0))
            taken: list[OpenPack] = []

            def take_all() -> None:
                for name in names:
                    taken.append(opened.borrow(name, 0))

            with pytest.raises(OSError, match="Too many open files"):
                take_all()
            assert len(taken) >= 3
            for pack in taken:
                opened.give_back(pack)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not open_packs()
    assert all(get(store, keys_of(0))), "and it is a matter of that moment"


def test_what_a_neighbour_deletes_between_two_batches_is_a_miss_and_takes_no_room(
    store: FilesystemStorage, tmp_path: Path
) -> None:
    """Also while other batches keep packs open."""
    opened = store.folder.opened
    with opened.batch():
        assert all(get(store, keys_of(0)))
        assert open_packs()
        for path in files_of(tmp_path):
            path.unlink()
        get(store, keys_of(0))
        assert exists(store, [key("nobody's")]) == 0
    assert not open_packs()
    assert get(store, keys_of(0)) == [False] * PER_PACK


def test_a_file_that_cannot_be_opened_is_not_kept(tmp_path: Path) -> None:
    opened = OpenPacks(FolderLayout(tmp_path))
    with opened.batch():
        for _ in range(3):
            with pytest.raises(FileNotFoundError):
                opened.borrow("0" * 64, 0)
    shutil.rmtree(tmp_path)
    assert not open_packs()
