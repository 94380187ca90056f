"""The journal of a folder of packs: what is known without opening them, and what a broken one costs."""

from __future__ import annotations

import errno
import gc
import os
import random
from pathlib import Path

import pytest

from kv_connector.storage.filesystem import contents, journal
from kv_connector.storage.filesystem.folder import PackFolder
from kv_connector.storage.filesystem.journal import Journal, Record, encoded
from kv_connector.storage.filesystem.packs import PackHeader
from kv_connector.storage.filesystem.temporaries import Temporaries
from tests.storage.storages import (
    BLOCK,
    CAPACITY,
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
)


def record(number: int, count: int = 3) -> Record:
    keys = tuple(keys_of(number, count))
    return number, PackHeader(IDENTITY, BLOCK, keys, tuple(i.to_bytes(4, "little") for i in range(count))).text()


def empty_journal(path: Path) -> Journal:
    made = Journal(path)
    made.replace([], Temporaries(path.parent).new(0))
    assert made.read() == []
    return made


def forbid_opening_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise AssertionError(f"{path} was opened")

    monkeypatch.setattr(contents, "read_header", fail)


def test_a_start_opens_no_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_store(tmp_path)
    put(first, keys_of("a") + keys_of("b"))
    put(first, keys_of("c", 3))
    first.close()
    forbid_opening_packs(monkeypatch)
    second = open_store(tmp_path)
    second.recovered.result(SECONDS)
    assert second.stats()["stored_blocks"] == 2 * PER_PACK + 3
    assert second.stats()["stored_bytes"] == sum(path.stat().st_size for path in files_of(tmp_path))
    assert all(get(second, keys_of("a") + keys_of("c", 3)))
    second.close()


def test_a_missed_look_up_opens_one_file_and_finds_what_a_neighbour_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where time stamps do not tell that anything has changed."""
    one, two = open_store(tmp_path), open_store(tmp_path)
    one.recovered.result(SECONDS)
    two.recovered.result(SECONDS)
    put(one, keys_of("a"))
    for path in [tmp_path, *tmp_path.rglob("*")]:
        os.utime(path, ns=(10**18, 10**18))

    def look(path: object) -> object:
        raise AssertionError(f"{path} was looked at")

    forbid_opening_packs(monkeypatch)
    monkeypatch.setattr(os, "stat", look)
    monkeypatch.setattr(os, "scandir", look)
    assert exists(two, [key("nobody's")]) == 0
    assert exists(two, keys_of("a")) == PER_PACK
    monkeypatch.undo()
    put(one, keys_of("b"))
    os.utime(tmp_path / "index", ns=(10**18, 10**18))
    assert exists(two, keys_of("b")) == PER_PACK
    assert all(get(two, keys_of("a") + keys_of("b")))
    one.close()
    two.close()


def test_good_packs_do_not_make_room_for_packs_that_never_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine's disk renames nothing for a while, so what it tells of in the journal is not there."""
    capacity = capacity_for(4)
    one, two = open_store(tmp_path, capacity), open_store(tmp_path, capacity)
    one.recovered.result(SECONDS)
    two.recovered.result(SECONDS)
    for name in "abc":
        assert all(put(two, keys_of(name)))

    def broken(source: object, target: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "rename", broken)
    for name in "xyz":
        assert not any(put(one, keys_of(name)))
    monkeypatch.undo()
    assert all(put(two, keys_of("d")))
    assert two.stats()["evicted_blocks"] == 0
    for name in "abcd":
        assert all(get(two, keys_of(name)))
    one.close()
    two.close()


def test_a_pack_from_before_1970_hinders_nobody(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, keys_of("a"))
    store.close()
    (pack,) = files_of(tmp_path)
    os.utime(pack, ns=(-(10**9), -(10**9)))
    (tmp_path / "index").unlink()
    for name in "bc":
        store = open_store(tmp_path)
        assert all(put(store, keys_of(name)))
        assert all(get(store, keys_of("a")))
        store.close()
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize("damage", ["cut", "flip", "head", "missing", "empty", "garbage", "zeros"])
def test_a_damaged_journal_loses_nothing_and_is_written_anew(tmp_path: Path, damage: str) -> None:
    store = open_store(tmp_path)
    for name in "abc":
        put(store, keys_of(name))
    store.close()
    path = tmp_path / "index"
    text = bytearray(path.read_bytes())
    if damage == "cut":
        del text[-100:]
    elif damage in ("flip", "head"):
        text[len(text) // 2 if damage == "flip" else 3] ^= 1
    elif damage == "garbage":
        text += random.Random(0).randbytes(1000)
    elif damage == "zeros":
        text += bytes(5000)
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"" if damage == "empty" else text)
    store = open_store(tmp_path)
    store.recovered.result(SECONDS)
    assert all(get(store, keys_of("a") + keys_of("b") + keys_of("c")))
    store.close()
    assert len(list(Journal(path).read())) == 3
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize("what", ["folder", "used folder", "link", "link to nowhere", "pipe", "forbidden", "broken"])
def test_an_index_that_is_no_readable_file_does_not_lose_the_folder(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packs are listed, and the index is replaced, but for a folder in its place that somebody uses."""
    root, index, elsewhere = tmp_path / "store", tmp_path / "store" / "index", tmp_path / "elsewhere"
    store = open_store(root)
    put(store, keys_of("a"))
    store.close()
    elsewhere.write_bytes(index.read_bytes())
    before = elsewhere.read_bytes()
    if what == "broken":
        inode, pread = index.stat().st_ino, os.pread

        def broken(descriptor: int, *arguments: int) -> bytes:
            if os.fstat(descriptor).st_ino == inode:
                raise OSError(errno.EIO, "Input/output error")
            return pread(descriptor, *arguments)

        monkeypatch.setattr(os, "pread", broken)
    else:
        index.unlink()
    if what in ("folder", "used folder"):
        index.mkdir()
        if what == "used folder":
            (index / "notes").write_text("dear to somebody")
    elif what in ("link", "link to nowhere"):
        index.symlink_to(elsewhere if what == "link" else tmp_path / "nowhere")
    elif what == "pipe":
        os.mkfifo(index)
    elif what == "forbidden":
        index.write_bytes(b"")
        index.chmod(0)
    store = open_store(root)
    assert exists(store, keys_of("a")) == PER_PACK
    assert all(get(store, keys_of("a")))
    assert all(put(store, keys_of("b"))) == (what != "used folder")
    store.close()
    assert elsewhere.read_bytes() == before
    if what == "used folder":
        assert (index / "notes").read_text() == "dear to somebody"
    else:
        assert not index.is_symlink() and len(Journal(index).read()) == 2


def test_where_no_file_can_be_read_every_answer_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk gives EIO for each of them; afterwards everything is there."""

    def broken(*arguments: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    store = open_store(tmp_path)
    put(store, keys_of("a"))
    store.close()
    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", broken)
        patched.setattr(os, "preadv", broken)
        store = open_store(tmp_path)
        assert get(store, keys_of("a")) == [False] * PER_PACK
        assert put(store, keys_of("b")) == [False] * PER_PACK
        store.close()
    store = open_store(tmp_path)
    assert exists(store, keys_of("a")) == PER_PACK
    assert all(get(store, keys_of("a")))
    assert all(put(store, keys_of("b")))
    store.close()


def test_a_pack_that_was_removed_is_not_brought_back_by_our_own_record(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, keys_of("a"))
    assert store.remove(keys_of("a")).result(SECONDS) == PER_PACK
    assert exists(store, keys_of("a")) == 0
    assert all(put(store, keys_of("a"))) and all(get(store, keys_of("a")))
    store.close()


def test_what_a_neighbour_has_removed_since_is_written_and_not_only_called_stored(tmp_path: Path) -> None:
    """Its record is still in the journal."""
    one, two = open_store(tmp_path), open_store(tmp_path)
    two.recovered.result(SECONDS)  # it lists the folder: what is removed by then is not found
    put(one, keys_of("a"))
    one.remove(keys_of("a")).result(SECONDS)
    assert exists(two, keys_of("a")) == PER_PACK, "as far as the journal tells"
    assert all(put(two, keys_of("a")))
    assert all(get(two, keys_of("a")))
    one.close()
    two.close()


def test_a_pack_that_the_journal_lacks_is_found_at_the_next_start(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.recovered.result(SECONDS)
    silent = PackFolder(tmp_path, IDENTITY, BLOCK, CAPACITY)
    header = PackHeader.decode(record(1)[1])
    (file,) = silent.reserve([header]).files
    assert file is not None
    os.pwrite(file.descriptor, header.encode(), 0)
    os.rename(file.path, silent.layout.path(header.name))
    file.close()
    assert exists(store, list(header.keys)) == 0
    store.close()
    store = open_store(tmp_path)
    store.recovered.result(SECONDS)
    assert exists(store, list(header.keys)) == 3
    store.close()


def test_what_others_append_is_read_once_and_what_we_append_is_not_read_back(tmp_path: Path) -> None:
    mine, theirs = empty_journal(tmp_path / "index"), Journal(tmp_path / "index")
    mine.append([record(1), record(2)])
    assert [time_ns for time_ns, _ in theirs.read()] == [1, 2]
    assert theirs.read() == []
    theirs.append([record(3)])
    assert theirs.read() == []
    assert mine.read() == [record(3)]


def test_half_a_record_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "index"
    reader = empty_journal(path)
    text = encoded(record(1)) + encoded(record(2))
    for cut in (1, 12, 40, len(encoded(record(1))) - 1):
        with open(path, "ab") as file:
            file.write(text[:cut])
        assert list(reader.read()) == []
        assert not reader.is_whole
        os.truncate(path, 16)
    with open(path, "ab") as file:
        file.write(text)
    assert [time_ns for time_ns, _ in reader.read()] == [1, 2]
    assert reader.is_whole


def test_a_file_that_was_replaced_is_read_from_its_beginning(tmp_path: Path) -> None:
    """A neighbour wrote it anew, and it is longer than what was read of the one before."""
    path = tmp_path / "index"
    mine, theirs = empty_journal(path), Journal(path)
    mine.append([record(1), record(2)])
    assert theirs.read() == [record(1), record(2)]
    mine.replace([record(3), record(4), record(5)], Temporaries(tmp_path).new(0))
    assert theirs.read() == [record(3), record(4), record(5)]


def test_a_file_that_lost_its_end_is_read_from_its_beginning(tmp_path: Path) -> None:
    """A loss of power took what was written last; what others add then lies before the end that was read."""
    path = tmp_path / "index"
    mine, theirs = empty_journal(path), Journal(path)
    mine.append([record(1), record(2)])
    assert theirs.read() == [record(1), record(2)]
    os.truncate(path, path.stat().st_size - len(encoded(record(2))))
    assert theirs.read() == [record(1)]
    assert mine.read() == [record(1)]
    mine.append([record(3)])
    assert theirs.read() == [record(3)]


def test_records_of_packs_that_are_gone_are_dropped_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_SPARE_RECORDS", 10)
    capacity = 3 * PER_PACK * BLOCK
    store, neighbour = open_store(tmp_path, capacity), open_store(tmp_path, capacity)
    for turn in range(40):
        put(store, keys_of(turn, PER_PACK // 2))
        assert exists(neighbour, keys_of(turn, PER_PACK // 2)) == PER_PACK // 2
    assert len(list(Journal(tmp_path / "index").read())) <= 2 * 6 + 10
    store.close()
    neighbour.close()


def test_a_record_whose_header_is_longer_than_its_blocks_need_ends_what_is_read(tmp_path: Path) -> None:
    """Its checksum is right: whoever wrote it has another notion of a header, and what lies behind is not believed."""
    path = tmp_path / "index"
    reader = empty_journal(path)
    time_ns, text = record(2)
    with open(path, "ab") as file:
        file.write(encoded(record(1)) + encoded((time_ns, text + b"more")) + encoded(record(3)))
    assert reader.read() == [record(1)]
    assert not reader.is_whole


def test_what_lies_in_a_large_folder_is_little_for_the_garbage_collector_to_walk(tmp_path: Path) -> None:
    """None for a pack, and none for its blocks: a full collection stops the process, and there are many of both."""
    num_packs, per_pack = 200, 20
    records = [record(number, per_pack) for number in range(num_packs)]
    Journal(tmp_path / "index").replace(records, Temporaries(tmp_path).new(0))
    folder_of_many = PackFolder(tmp_path / "store", IDENTITY, BLOCK, CAPACITY)
    os.rename(tmp_path / "index", folder_of_many.layout.index)
    gc.collect()
    before = len(gc.get_objects())
    folder_of_many.contents.catch_up()
    gc.collect()
    assert folder_of_many.catalog.num_blocks == num_packs * per_pack
    assert len(gc.get_objects()) - before < 0.1 * num_packs
