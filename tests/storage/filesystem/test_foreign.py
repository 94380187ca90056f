"""Folders that are somebody else's: nothing in them is read, written or deleted, whatever it is called."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from kv_connector.build import build_worker
from kv_connector.cli import main
from kv_connector.config import Config, StorageConfig
from kv_connector.errors import ConfigError
from kv_connector.storage.filesystem.layout import FolderLayout, ForeignFolderError
from tests.storage.storages import CAPACITY, PER_PACK, SECONDS, exists, files_of, get, keys_of, open_store, put

OLD = 0.0  # a time stamp, decades ago


def tree(root: Path) -> dict[str, bytes | None]:
    """Everything below a folder, with the bytes of files."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A user's folder, with all names that ours has, and a repository's packs and loose objects."""
    for name in ("tmp/notes", "index", "lock", "ab/0123", f"ab/ab{'0' * 62}.pack", f"pack/pack-{'1' * 40}.pack"):
        path = tmp_path / "theirs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"dear to somebody: {name}")
        os.utime(path, (OLD, OLD))
    return tmp_path / "theirs"


def test_a_folder_with_a_users_files_is_refused_and_left_alone(theirs: Path) -> None:
    before = tree(theirs)
    with pytest.raises(ForeignFolderError, match=r"is not empty \('ab', 'index', 'lock', ...\).*name an empty folder"):
        open_store(theirs)
    assert tree(theirs) == before


def test_an_engine_says_so_when_it_starts(theirs: Path) -> None:
    config = Config(host_memory=16 << 12, storage=StorageConfig(path=str(theirs), capacity=CAPACITY))
    with pytest.raises(ConfigError, match=r"storage at .* cannot be used: .* is not empty .* name an empty folder"):
        build_worker(config).register_kv_caches({"layers.0": torch.zeros(4, 2, 16, 64)}, 4)


def test_a_file_for_a_folder_is_told_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = Config(host_memory=16 << 12, storage=StorageConfig(path=str(tmp_path / "file"), capacity=CAPACITY))
    with pytest.raises(ConfigError, match=r"file' cannot be used: .*; give storage.path a folder that this user may"):
        build_worker(config).register_kv_caches({"layers.0": torch.zeros(4, 2, 16, 64)}, 4)


@pytest.mark.parametrize("is_larger", [False, True])
def test_a_capacity_that_no_disk_here_has_is_told(
    tmp_path: Path, is_larger: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk will be full, for others who write to it, too."""
    found = os.statvfs(tmp_path)
    capacity = found.f_blocks * found.f_frsize + (1 if is_larger else 0)
    config = Config(host_memory=16 << 12, storage=StorageConfig(path=str(tmp_path / "store"), capacity=capacity))
    worker = build_worker(config)
    worker.register_kv_caches({"layers.0": torch.zeros(4, 2, 16, 64)}, 4)
    worker.shutdown()
    told = [record.getMessage() for record in caplog.records if "storage.capacity" in record.getMessage()]
    assert len(told) == is_larger
    assert all(f"storage.capacity={capacity} is more than the {capacity - 1} bytes" in line for line in told)


@pytest.mark.parametrize(
    "command", [["stat"], ["ls"], ["verify"], ["verify", "--delete"], ["gc", "--capacity", "0"], ["rm", "--all"]]
)
@pytest.mark.parametrize("is_empty", [False, True])
def test_an_operator_who_names_the_wrong_folder_loses_nothing(
    theirs: Path, command: list[str], is_empty: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = theirs / "empty" if is_empty else theirs
    (theirs / "empty").mkdir()
    before = tree(theirs)
    assert main(["storage", command[0], str(folder), *command[1:]]) == 2
    assert "is not a storage folder of this version: nothing in it was touched" in capsys.readouterr().err
    assert tree(theirs) == before


def test_a_folder_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv_connector.format-1").write_text("")
    with pytest.raises(ForeignFolderError, match=r"has another format than 2.*name another folder, or delete it"):
        open_store(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kv_connector.format-1"]


def test_the_root_of_a_file_system_is_empty(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    store = open_store(tmp_path)
    assert all(put(store, keys_of("a")))
    store.close()


def test_what_a_user_keeps_in_our_folder_stays(tmp_path: Path) -> None:
    """Although it is full: only files with our names are ever deleted, and no link is followed."""
    root, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    capacity = CAPACITY // 4
    store = open_store(root, capacity)
    elsewhere.mkdir()
    target = elsewhere / f"00{'0' * 62}.pack"
    kept = [root / "tmp" / "notes", root / "tmp" / f"{'a' * 32}.part.old", root / "00" / "notes.pack", root / "mine"]
    for path in (*kept, target):
        path.write_text("dear to somebody")
        os.utime(path, (OLD, OLD))
    (root / "00" / f"00{'0' * 62}.pack").symlink_to(target)
    (root / "tmp" / f"{'b' * 32}.part").symlink_to(target)
    (root / "00" / f"00{'1' * 62}.pack").mkdir()
    for turn in range(8):
        assert all(put(store, keys_of(turn)))
        assert all(get(store, keys_of(turn)))
    store.close()
    store = open_store(root, capacity)
    assert exists(store, keys_of(7)) == PER_PACK
    store.close()
    for command in (["verify", "--delete"], ["rm", "--all"]):
        assert main(["storage", command[0], str(root), *command[1:]]) == 0
    assert all(path.read_text() == "dear to somebody" for path in (*kept, target))
    assert (root / "00" / f"00{'1' * 62}.pack").is_dir()


def test_one_of_our_folders_that_is_a_link_is_not_used(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    open_store(root).close()
    (root / "tmp").rmdir()
    elsewhere.mkdir()
    (root / "tmp").symlink_to(elsewhere)
    with pytest.raises(ForeignFolderError, match="tmp is not a folder: delete it"):
        open_store(root)


def test_a_sub_folder_that_becomes_a_link_is_not_listed(tmp_path: Path) -> None:
    """While it is used: what lies behind the link is not taken for ours, nor deleted to make room."""
    root, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    store = open_store(root)
    store.recovered.result(SECONDS)
    (root / "00").rename(elsewhere)
    (elsewhere / f"00{'0' * 62}.pack").write_text("dear to somebody")
    (root / "00").symlink_to(elsewhere)
    with pytest.raises(ForeignFolderError, match="00 is not a folder: delete it"):
        store.folder.layout.pack_names()
    store.close()


def test_a_mark_that_is_a_link_does_not_make_a_folder_ours(theirs: Path, tmp_path: Path) -> None:
    """Somebody links to what they cannot copy: what is behind it is no mark of this folder."""
    (tmp_path / "mark").write_text("dear to somebody")
    (theirs / "kv_connector.format-2").symlink_to(tmp_path / "mark")
    before = tree(tmp_path)
    with pytest.raises(ForeignFolderError):
        open_store(theirs)
    assert main(["storage", "gc", str(theirs), "--capacity", "0"]) == 2
    assert tree(tmp_path) == before


def test_the_mark_is_not_written_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was put there between two looks, and points at a file of the user's."""
    root, target = tmp_path / "store", tmp_path / "notes"
    target.write_text("dear to somebody")
    listdir = os.listdir

    def late(path: Path) -> list[str]:
        names = listdir(path)
        (root / "kv_connector.format-2").symlink_to(target)
        return names

    monkeypatch.setattr(os, "listdir", late)
    with pytest.raises(OSError, match="format-2"):
        open_store(root)
    assert target.read_text() == "dear to somebody"


def test_two_engines_may_start_on_an_empty_folder_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other makes it theirs, which is ours, between our two looks."""
    listdir = os.listdir

    def late(path: Path) -> list[str]:
        monkeypatch.undo()
        open_store(tmp_path).close()
        return listdir(path)

    monkeypatch.setattr(os, "listdir", late)
    store = open_store(tmp_path)
    assert all(put(store, keys_of("a")))
    store.close()


def test_others_who_may_write_are_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_store(tmp_path / "store").close()
    assert not caplog.records
    for path in ("store", "store/00", "store/01"):
        (tmp_path / path).chmod(0o775)
    store = open_store(tmp_path / "store")
    assert all(put(store, keys_of("a")))
    store.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/store has mode 0775: other users may write to it, and so decide what models answer unless "
        "storage.secret_env names a secret; "
        f"if only engines of this user need it: chmod -R go-rwx {tmp_path}/store"
    ]


def test_a_pack_under_another_packs_name_is_not_believed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, keys_of("a"))
    put(store, keys_of("b"))
    one, other = files_of(tmp_path)
    other.write_bytes(one.read_bytes())
    store.recovered.result()
    found = [all(get(store, keys_of(name))) for name in "ab"]
    assert sorted(found) == [False, True]
    store.close()
    assert len(list(FolderLayout(tmp_path).pack_names())) == 1


@pytest.mark.parametrize("count", [PER_PACK, 1], ids=["all of its blocks", "one of its blocks"])
def test_what_cannot_be_read_is_stored_once_more_by_whoever_computes_it(tmp_path: Path, count: int) -> None:
    """A sector that is lost for ever does not keep its blocks from being stored."""
    store = open_store(tmp_path)
    assert all(put(store, keys_of("a")))
    (pack,) = files_of(tmp_path)
    pack.rename(pack.with_suffix(".moved"))
    pack.symlink_to(pack.with_suffix(".moved"))  # no link is followed: the system refuses to open it
    keys = keys_of("a")[:count]
    assert not any(get(store, keys))
    assert exists(store, keys) == 0
    assert all(put(store, keys))
    assert exists(store, keys) == count
    assert all(get(store, keys))
    store.close()


def test_who_tidies_up_empty_folders_costs_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.recovered.result(SECONDS)
    for folder in tmp_path.glob("??"):
        folder.rmdir()
    for name in "abc":
        assert all(put(store, keys_of(name)))
        assert all(get(store, keys_of(name)))
    store.close()


def test_who_deletes_all_files_leaves_a_folder_that_can_be_used(tmp_path: Path) -> None:
    """As tools do that delete old files and keep folders: engines that run store again, and others start."""
    store = open_store(tmp_path)
    store.recovered.result(SECONDS)
    assert all(put(store, keys_of("a")))
    for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
        path.unlink()
    assert not any(get(store, keys_of("a")))
    assert all(put(store, keys_of("b"))) and all(get(store, keys_of("b")))
    store.close()
    again = open_store(tmp_path)
    again.recovered.result(SECONDS)
    assert all(get(again, keys_of("b")))
    again.close()


@pytest.mark.parametrize("name", ["00/notes", "notes", "tmp/notes", f"00/{64 * '0'}.pack"])
def test_empty_folders_of_our_names_do_not_make_ours_what_lies_beside_them(tmp_path: Path, name: str) -> None:
    (tmp_path / "00").mkdir()
    (tmp_path / "tmp").mkdir()
    (tmp_path / name).write_text("dear to somebody")
    with pytest.raises(ForeignFolderError, match="is not empty"):
        open_store(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted({"00", "tmp", name.split("/")[0]})


def test_links_with_our_names_are_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder = tmp_path / "storage"
    folder.mkdir()
    (folder / "00").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ForeignFolderError, match="is not empty"):
        open_store(folder)


def test_a_folder_in_the_place_of_a_pack_makes_way(tmp_path: Path) -> None:
    """But for one that somebody uses."""
    store = open_store(tmp_path)
    put(store, keys_of("a"))
    store.close()
    (path,) = files_of(tmp_path)
    path.unlink()
    path.mkdir()
    (path / "notes").write_text("dear to somebody")
    store = open_store(tmp_path)
    store.recovered.result()
    assert not any(put(store, keys_of("a")))
    assert (path / "notes").read_text() == "dear to somebody"
    (path / "notes").unlink()
    assert all(put(store, keys_of("a"))) and all(get(store, keys_of("a")))
    store.close()
