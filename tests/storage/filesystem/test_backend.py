"""The folder of packs: restarts, damage, full disks, and several processes at a time."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import random
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kv_connector.config import StorageConfig
from kv_connector.errors import ConfigError
from kv_connector.storage.filesystem import contents, journal, layout, temporaries
from kv_connector.storage.filesystem.backend import FilesystemStorage
from kv_connector.storage.filesystem.folder import PackFolder
from kv_connector.storage.filesystem.packs import MAX_BLOCKS, PackError, PackHeader, pack_bytes
from tests.storage.storages import (
    BLOCK,
    CAPACITY,
    IDENTITY,
    PER_PACK,
    SECONDS,
    buffers,
    capacity_for,
    content,
    exists,
    files_of,
    get,
    key,
    keys_of,
    open_store,
    put,
    size_of,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FilesystemStorage]:
    one = open_store(tmp_path / "store")
    yield one
    one.close()


def test_a_restart_finds_everything(tmp_path: Path) -> None:
    first = open_store(tmp_path)
    put(first, keys_of("a") + keys_of("b", 3))
    first.close()
    second = open_store(tmp_path)
    second.recovered.result(SECONDS)
    assert second.stats()["stored_blocks"] == PER_PACK + 3
    assert exists(second, keys_of("a")) == PER_PACK
    assert all(get(second, keys_of("b", 3) + keys_of("a")))
    second.close()


def test_nobody_else_makes_room_or_publishes_meanwhile(
    store: FilesystemStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that share a folder take turns: two that counted the same free bytes would both fill them."""
    kept_out = []

    marker = store.folder.layout.root / "kv_connector.format-2"

    def locked(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            with open(marker, "rb") as neighbour:
                try:
                    fcntl.flock(neighbour, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    kept_out.append(what)
            return call(*arguments)

        return wrapped

    store.recovered.result(SECONDS)
    monkeypatch.setattr(temporaries.Temporaries, "new", locked("makes room", temporaries.Temporaries.new))
    monkeypatch.setattr(journal.Journal, "append", locked("publishes", journal.Journal.append))
    assert all(put(store, keys_of("a")))
    assert kept_out == ["makes room", "publishes"]
    with open(marker, "rb") as neighbour:
        fcntl.flock(neighbour, fcntl.LOCK_EX | fcntl.LOCK_NB)  # and leave nothing locked


def test_small_blocks_share_a_file_and_large_ones_have_their_own(tmp_path: Path) -> None:
    small = open_store(tmp_path / "small")
    put(small, keys_of("a", 2 * PER_PACK + 5))
    assert sorted(path.stat().st_size for path in files_of(tmp_path / "small")) == [
        pack_bytes(5, BLOCK),
        pack_bytes(PER_PACK, BLOCK),
        pack_bytes(PER_PACK, BLOCK),
    ]
    large = open_store(tmp_path / "large", block_bytes=2 << 20)
    put(large, keys_of("a", 3), 2 << 20)
    assert all(get(large, keys_of("a", 3), 2 << 20))
    assert len(files_of(tmp_path / "large")) == 3
    small.close()
    large.close()


def test_files_are_for_this_user_only_and_no_key_is_in_a_path(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    put(store, [b"../../../../../../../../etc/passwd"[:32], *keys_of("a", 3)])
    store.close()
    for path in (tmp_path / "store").rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
        assert "passwd" not in path.name
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700


def test_the_least_recently_used_go_first_also_after_a_restart(tmp_path: Path) -> None:
    capacity = capacity_for(4)
    store = open_store(tmp_path, capacity)
    for name in "abcd":
        put(store, keys_of(name))
    get(store, keys_of("a", 1))
    store.close()
    store = open_store(tmp_path, capacity)
    put(store, keys_of("e"))
    assert [exists(store, keys_of(name, 1)) for name in "abcde"] == [1, 0, 1, 1, 1]
    assert store.stats()["evicted_blocks"] == PER_PACK
    store.close()


def test_another_process_that_uses_a_pack_keeps_it(tmp_path: Path) -> None:
    capacity = capacity_for(2)
    one, two = open_store(tmp_path, capacity), open_store(tmp_path, capacity)
    put(one, keys_of("a"))
    put(one, keys_of("b"))
    assert exists(two, keys_of("a")) == PER_PACK, "a neighbour's blocks are found without a restart"
    get(two, keys_of("a", 1))
    put(one, keys_of("c"))
    assert [exists(one, keys_of(name, 1)) for name in "abc"] == [1, 0, 1]
    assert get(two, keys_of("b", 1)) == [False], "gone, and that is a miss"
    assert two.stats()["failed_reads_blocks"] == 0
    one.close()
    two.close()


def test_engines_of_two_kinds_at_one_folder_find_their_own_and_keep_within_its_capacity(tmp_path: Path) -> None:
    """Blocks of other sizes, under another identity; by chance some have the same key."""
    small, capacity = BLOCK // 2, capacity_for(3)
    one = open_store(tmp_path, capacity)
    two = FilesystemStorage(tmp_path, hashlib.sha256(b"another engine").digest(), small, capacity)
    put(one, keys_of("a"))
    assert exists(two, keys_of("a")) == 0
    put(two, keys_of("a", 4), small)
    assert get(one, keys_of("a")) == [True] * PER_PACK
    assert get(two, keys_of("a", 4), small) == [True] * 4
    assert get(two, keys_of("a", 5)[4:], small) == [False]
    for name in "bcdef":
        put(one, keys_of(name))
        put(two, keys_of(name), small)
        assert get(one, keys_of(name, 1)) == [True]
        assert get(two, keys_of(name, 1), small) == [True]
        assert size_of(tmp_path) <= capacity
    assert one.stats()["evicted_blocks"] + two.stats()["evicted_blocks"] > 0
    one.close()
    two.close()


def test_memory_that_does_not_begin_on_a_page_is_served_too(store: FilesystemStorage) -> None:
    keys = keys_of("a", 3)
    memory = memoryview(bytearray(3 * BLOCK + 1))
    blocks = [memory[1 + i * BLOCK : 1 + (i + 1) * BLOCK] for i in range(3)]
    for block_key, block in zip(keys, blocks, strict=True):
        block[:] = content(block_key)
    assert all(store.write(keys, blocks).result(SECONDS))
    assert all(get(store, keys))
    memory[:] = bytes(len(memory))
    assert all(store.read(keys, blocks).result(SECONDS))
    assert [bytes(block) for block in blocks] == [content(block_key) for block_key in keys]


def test_a_folder_of_the_least_capacity_takes_part_of_a_batch_that_would_fill_it(tmp_path: Path) -> None:
    """A pack never fills it alone: nothing would be written, now or later."""
    least = 8 << 20
    with pytest.raises(ConfigError, match=f"storage.capacity={least - 1} is too small: give at least {least}"):
        StorageConfig(path=str(tmp_path), capacity=least - 1)
    store = FilesystemStorage(tmp_path, IDENTITY, BLOCK, StorageConfig(path=str(tmp_path), capacity=least).capacity)
    for name in "ab":
        keys = keys_of(name, least // BLOCK)
        written = put(store, keys)
        assert any(written)
        assert get(store, keys) == written
    store.close()
    assert size_of(tmp_path) <= least


def test_batches_longer_than_one_system_call(tmp_path: Path) -> None:
    store = FilesystemStorage(tmp_path, IDENTITY, 4096, 16 << 20)
    put(store, keys_of("a", 700), 4096)
    assert all(get(store, keys_of("a", 700), 4096))
    store.close()


@pytest.mark.parametrize("has_journal", [True, False])
@pytest.mark.parametrize("damage", ["flip", "truncate", "version", "identity", "garbage", "count", "empty"])
def test_damaged_and_foreign_files_are_misses(
    tmp_path: Path, damage: str, has_journal: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    keys = keys_of("a", 4)
    put(store, keys)
    (path,) = files_of(tmp_path)
    text = bytearray(path.read_bytes())
    if damage == "flip":
        text[4096 + BLOCK + 77] ^= 1
    elif damage == "version":
        text[8] = 3
    elif damage == "identity":
        header = PackHeader.decode(bytes(text[:4096]), len(text))
        text[:4096] = PackHeader(b"x" * 32, BLOCK, header.keys, header.checksums).encode()
    elif damage == "garbage":
        text[:4096] = random.Random(0).randbytes(4096)
    elif damage == "count":
        text[56:60] = (1 << 31).to_bytes(4, "little")
    path.write_bytes(text[: {"truncate": 4096 + 100, "empty": 0}.get(damage, len(text))])
    if damage in ("flip", "truncate"):  # those that are seen by an engine that knows the file
        assert get(store, keys) == ([True, False, True, True] if damage == "flip" else [False] * 4)
        assert len(caplog.records) == 1
    store.close()
    if not has_journal:
        (tmp_path / "index").unlink()
    store = open_store(tmp_path)
    store.recovered.result(SECONDS)
    if has_journal:  # it knows the blocks, and those that are whole are served
        get(store, keys)
    elif damage == "flip":  # costs one block, and not the pack
        assert get(store, keys) == [True, False, True, True]
    else:
        assert exists(store, keys) == 0
        assert get(store, keys) == [False] * 4
    assert put(store, keys) == [True] * 4
    assert get(store, keys) == [True] * 4
    assert size_of(tmp_path) <= CAPACITY
    store.close()


def test_a_header_is_what_it_says_or_nothing() -> None:
    header = PackHeader(IDENTITY, BLOCK, tuple(keys_of("a", 100)), tuple(bytes((i,) * 4) for i in range(100)))
    assert PackHeader.decode(header.encode(), header.file_bytes) == header
    encoded = header.encode()
    rng = random.Random(0)
    for _ in range(300):
        broken = bytearray(encoded)
        broken[rng.randrange(60 + 36 * 100 + 4)] ^= 1 << rng.randrange(8)
        with pytest.raises(PackError):
            PackHeader.decode(bytes(broken), header.file_bytes)
    for length in (0, 7, 59, 60 + 36 * 100 + 3):
        with pytest.raises(PackError):
            PackHeader.decode(encoded[:length], header.file_bytes)
    with pytest.raises(PackError, match="do not make"):
        PackHeader.decode(encoded, header.file_bytes - 1)
    assert len(PackHeader(IDENTITY, BLOCK, tuple(keys_of("a", MAX_BLOCKS)), (bytes(4),) * MAX_BLOCKS).encode()) <= 40960


def test_where_eviction_does_not_help_on_a_full_disk_the_writes_are_lost_and_nothing_else(
    store: FilesystemStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    allocate = temporaries._allocate
    store.recovered.result(SECONDS)  # it opens files, too
    for name in "abcd":
        assert all(put(store, keys_of(name)))
    monkeypatch.setattr(temporaries, "_allocate", full)
    descriptors = len(os.listdir("/proc/self/fd"))
    for turn in range(3):
        assert put(store, keys_of(turn)) == [False] * PER_PACK
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert [all(get(store, keys_of(name))) for name in "abcd"] == [False, False, True, True], "it was tried once"
    monkeypatch.undo()
    assert all(put(store, keys_of("e")))
    times_full = iter([True, False])
    monkeypatch.setattr(temporaries, "_allocate", lambda *given: full(*given) if next(times_full) else allocate(*given))
    assert all(put(store, keys_of("f"))), "it is tried again behind a file that was made"
    assert store.stats()["failed_writes_blocks"] == 3 * PER_PACK
    assert len(caplog.records) == 1
    assert not list((store.folder.layout.root / "tmp").iterdir())


def test_what_cannot_be_deleted_to_make_room_is_found_as_before(
    store: FilesystemStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems need room to delete a file, and have none at their quota."""

    def full(path: Path, *arguments: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded", str(path))

    for name in "abcd":
        assert all(put(store, keys_of(name)))
    monkeypatch.setattr(temporaries, "_allocate", full)
    monkeypatch.setattr(os, "unlink", full)
    assert put(store, keys_of("e")) == [False] * PER_PACK
    monkeypatch.undo()
    assert all(all(get(store, keys_of(name))) for name in "abcd")
    assert store.stats()["evicted_blocks"] == 0
    assert store.stats()["stored_bytes"] == sum(file.stat().st_size for file in files_of(store.folder.layout.root))
    assert store.remove(keys_of("a")).result(SECONDS) == PER_PACK
    assert all(put(store, keys_of("e")))


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_broken_disk_is_a_miss(store: FilesystemStorage, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def broken(*arguments: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    put(store, keys_of("a"))
    monkeypatch.setattr(os, call, broken)
    if call == "preadv":
        assert get(store, keys_of("a")) == [False] * PER_PACK
    else:
        assert put(store, keys_of("b")) == [False] * PER_PACK
    monkeypatch.undo()
    assert all(put(store, keys_of("b")))  # what could not be read is looked for again
    assert all(get(store, keys_of("a")))
    assert not list((store.folder.layout.root / "tmp").iterdir())


@pytest.mark.parametrize("call", ["pread", "unlink", "scandir", "rename", "utime"])
def test_a_hung_disk_holds_up_neither_statistics_nor_what_is_known(
    store: FilesystemStorage, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The thread that launches the model asks for statistics while another waits for the disk in this call."""
    hangs, goes_on = threading.Event(), threading.Event()
    real = getattr(os, call)

    def hang(*arguments: Any, **options: Any) -> Any:
        hangs.set()
        goes_on.wait(SECONDS)
        return real(*arguments, **options)

    put(store, keys_of("a"))
    put(store, keys_of("b"))
    monkeypatch.setattr(os, call, hang)
    removed = store.remove(keys_of("a"))
    looked = store.exists(keys_of("c"))
    written = store.write(keys_of("d"), buffers(PER_PACK))
    assert hangs.wait(SECONDS)
    with ThreadPoolExecutor(1) as model:
        try:
            assert model.submit(store.stats).result(SECONDS)["stored_blocks"] >= PER_PACK
            assert all(model.submit(store.folder.catalog.slots, keys_of("b")).result(SECONDS))
        finally:
            goes_on.set()
    monkeypatch.undo()
    for future in (removed, looked, written):
        future.result(SECONDS)


def test_a_neighbour_that_was_stopped_with_the_lock_is_not_waited_for_for_ever(
    store: FilesystemStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(store, keys_of("a"))
    monkeypatch.setattr(layout, "LOCK_SECONDS", 0.0)
    with open(store.folder.layout.root / "kv_connector.format-2", "rb") as neighbour:
        fcntl.flock(neighbour, fcntl.LOCK_EX)
        assert put(store, keys_of("b")) == [False] * PER_PACK
        assert all(get(store, keys_of("a")))
        assert "another process has kept" in caplog.text
    assert all(put(store, keys_of("b")))


def test_a_start_lists_a_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one without an index, which is written from what lies there."""
    first = open_store(tmp_path)
    put(first, keys_of("a"))
    first.close()
    (tmp_path / "index").unlink()
    listed, names = [], layout.FolderLayout.pack_names
    monkeypatch.setattr(layout.FolderLayout, "pack_names", lambda self: listed.append(self) or names(self))
    second = open_store(tmp_path)
    second.recovered.result(SECONDS)
    assert exists(second, keys_of("a")) == PER_PACK
    second.close()
    assert len(listed) == 1


def test_a_file_that_may_not_be_read_is_a_miss(store: FilesystemStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, keys_of("a", 2))

    def forbidden(*arguments: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", forbidden)
    assert get(store, keys_of("a", 2)) == [False] * 2
    monkeypatch.undo()
    assert all(put(store, keys_of("b")))  # it is looked for again
    assert get(store, keys_of("a", 2)) == [True] * 2


def test_a_folder_that_is_deleted_under_us_is_empty(store: FilesystemStorage, caplog: pytest.LogCaptureFixture) -> None:
    put(store, keys_of("a"))
    store.recovered.result(SECONDS)  # else it makes folders again while they are being deleted
    shutil.rmtree(store.folder.layout.root)
    assert get(store, keys_of("a")) == [False] * PER_PACK
    assert exists(store, keys_of("a")) == 0
    assert all(put(store, keys_of("a")))
    assert all(get(store, keys_of("a")))
    assert [record.message.partition(" was ")[2] for record in caplog.records] == [
        "deleted or moved while it was in use: it is made anew, with nothing in it"
    ]


def test_a_clock_that_goes_back_spoils_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capacity = capacity_for(3)
    store = open_store(tmp_path, capacity)
    put(store, keys_of("a"))
    put(store, keys_of("b"))
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now - 10**15)
    get(store, keys_of("a", 1))
    for turn in range(4):
        assert all(put(store, keys_of(turn)))
        assert all(get(store, keys_of(turn)))
        assert size_of(tmp_path) <= capacity
    store.close()


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="block_bytes=1000: give a multiple of 4096"):
        open_store(tmp_path, block_bytes=1000)
    with pytest.raises(ValueError, match=r"storage.capacity=100 is too small for one block: give at least 28672"):
        open_store(tmp_path, capacity=100)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        open_store(tmp_path / "file")


def test_temporary_files_of_the_dead_go_and_those_of_the_living_count(tmp_path: Path) -> None:
    """Whether a writer lives is seen by its lock: in a neighbour's container it has a process number of ours."""
    store = open_store(tmp_path, capacity_for(3))
    store.recovered.result(SECONDS)
    (tmp_path / "tmp" / f"{'1' * 32}.part").write_bytes(bytes(1 << 20))
    living = tmp_path / "tmp" / f"{'2' * 32}.part"
    living.write_bytes(bytes(pack_bytes(PER_PACK, BLOCK)))
    os.utime(living, (0, 0))
    with open(living, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for name in "abc":
            put(store, keys_of(name))
        assert [path.name for path in (tmp_path / "tmp").iterdir()] == [living.name]
        assert store.stats()["stored_blocks"] == 2 * PER_PACK
        assert size_of(tmp_path) <= capacity_for(3)
    put(store, keys_of("d"))
    assert not list((tmp_path / "tmp").iterdir())
    store.close()


def test_many_blocks_are_known_again_quickly_enough_to_be_of_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5,000 packs of one block: their headers are read once, and a second look reads none of them."""
    layout = PackFolder(tmp_path, IDENTITY, 4096, 1 << 40).layout
    for i in range(5000):
        header = PackHeader(IDENTITY, 4096, (key(i),), (bytes(4),))
        layout.path(header.name).write_bytes(header.encode() + bytes(4096))
    opened = PackFolder(tmp_path, IDENTITY, 4096, 1 << 40)
    opened.recover()
    assert opened.catalog.num_blocks == 5000
    assert opened.catalog.used_bytes == 5000 * pack_bytes(1, 4096)

    def fail(path: Path) -> None:
        raise AssertionError(f"{path} was opened")

    monkeypatch.setattr(contents, "read_header", fail)
    opened.recover()
    assert opened.catalog.num_blocks == 5000
