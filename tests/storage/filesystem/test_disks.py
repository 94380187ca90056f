"""Storage on small real file systems, and as a user who may not do everything. Needs root, and skips without."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_connector.storage.filesystem.backend import FilesystemStorage
from kv_connector.storage.filesystem.packs import PAGE
from tests.storage.storages import IDENTITY, PER_PACK, SECONDS, content, files_of, get, key, keys_of, open_store, put

NOBODY = 65534
DISK_BYTES = 12 << 20


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of twelve megabytes."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    place = tmp_path / "disk"
    place.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs"]
    if request.param == "ext4":
        image = tmp_path / "image"
        image.write_bytes(b"")
        os.truncate(image, DISK_BYTES)
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("no mkfs.ext4 here")
        subprocess.run(["mkfs.ext4", "-q", image], check=True)
        options = ["-o", "loop", str(image)]
    mounted = subprocess.run(["mount", *options, place], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"{request.param} cannot be mounted: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def test_on_a_disk_that_is_full_what_was_used_longest_ago_goes(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The capacity is more than the disk holds, and somebody else's file takes the rest."""
    store = open_store(disk / "store", capacity=1 << 30)
    store.recovered.result(SECONDS)
    assert all(all(put(store, keys_of(turn))) for turn in range(20)), "more than the disk holds"
    kept = [turn for turn in range(20) if all(get(store, keys_of(turn)))]
    assert kept == list(range(20 - len(kept), 20))
    assert len(kept) >= 5
    assert store.stats()["evicted_blocks"] == PER_PACK * (20 - len(kept))
    with open(disk / "file", "wb", buffering=0) as other:
        while True:  # to the last byte, so that not even the index can grow
            try:
                other.write(bytes(4096))
            except OSError:
                break
    assert all(put(store, keys_of("more")))
    assert all(get(store, keys_of("more")))
    assert all(all(get(store, keys_of(turn))) for turn in kept[-3:])
    assert not list((store.folder.layout.root / "tmp").iterdir())
    assert not caplog.records
    (disk / "file").unlink()
    store.close()
    store = open_store(disk / "store", capacity=1 << 30)
    store.recovered.result(SECONDS)
    for name in [*kept[-3:], "more"]:
        assert all(get(store, keys_of(name)))
    store.close()


def test_a_disk_with_room_for_a_pack_and_not_for_the_index_is_full(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(disk / "store", capacity=1 << 30)
    store.recovered.result(SECONDS)
    assert all(all(put(store, keys_of(turn))) for turn in range(3))
    pack_bytes = files_of(disk / "store")[0].stat().st_size
    with open(disk / "file", "wb") as other:
        room = os.statvfs(disk)
        os.posix_fallocate(other.fileno(), 0, room.f_bavail * room.f_frsize - pack_bytes)
    for turn in range(3, 8):
        assert all(put(store, keys_of(turn)))
        assert all(get(store, keys_of(turn)))
    assert store.stats()["evicted_blocks"] == store.stats()["written_blocks"] - store.stats()["stored_blocks"] > 0
    store.close()
    assert not caplog.records


def test_a_full_disk_has_room_for_an_index_that_must_be_written_anew(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As half a record was written to the last byte of the disk: it is longer than two packs, which make room else."""
    store = FilesystemStorage(disk / "store", IDENTITY, PAGE, 1 << 30, target_bytes=PAGE)
    store.recovered.result(SECONDS)
    block = [memoryview(bytearray(PAGE))]
    assert all(store.write([key(i)], block).result(SECONDS) == [True] for i in range(400))
    assert store.folder.layout.index.stat().st_size > 4 * files_of(disk / "store")[0].stat().st_size
    with open(disk / "file", "wb") as other:
        room = os.statvfs(disk)
        os.posix_fallocate(other.fileno(), 0, room.f_bavail * room.f_frsize)
    assert all(store.write([key(i)], block).result(SECONDS) == [True] for i in range(400, 500))
    assert store.stats()["failed_writes_blocks"] == 0
    store.close()
    assert not caplog.records


def test_an_unmounted_disk_is_not_replaced_by_the_one_below(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Which may be the system's own, and was not meant. When it is back all of it is, and what is new is written."""
    store = open_store(disk / "store", capacity=DISK_BYTES // 2)
    store.recovered.result(SECONDS)
    assert all(put(store, keys_of("a")))
    kept = disk.parent / "kept"
    kept.mkdir()
    subprocess.run(["mount", "--bind", disk, kept], check=True)
    try:
        subprocess.run(["umount", "--lazy", disk], check=True)
        assert not any(put(store, keys_of("b")))
        assert not any(get(store, keys_of("b")))
        assert not list(disk.iterdir()), "it wrote to what lies below"
        assert f"the file system that {disk / 'store'} lay on is gone" in caplog.text
        assert len(caplog.records) == 1
        subprocess.run(["mount", "--bind", kept, disk], check=True)
        assert all(put(store, keys_of("c")))
        assert all(get(store, keys_of("a"))) and all(get(store, keys_of("c")))
        store.close()
    finally:
        subprocess.run(["umount", "--lazy", kept], check=True)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that another user can reach."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    os.chown(path, NOBODY, NOBODY)
    yield path
    shutil.rmtree(path)


def act_as_nobody(root: Path) -> None:
    """Of one's own folder whatever may happen to it; of another's nothing. Exits with 0 where all was as it should."""
    content(key("a"))  # imports what nobody may not read
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    store = open_store(root / "mine")
    assert all(put(store, keys_of("a")))
    (pack,) = files_of(root / "mine")
    pack.chmod(0)
    assert get(store, keys_of("a")) == [False] * PER_PACK
    assert store.stats()["failed_reads_blocks"] == PER_PACK
    pack.chmod(0o600)
    assert all(put(store, keys_of("other")))  # it is looked for again
    assert all(get(store, keys_of("a")))
    assert store.stats()["written_blocks"] == 2 * PER_PACK
    (root / "mine" / "tmp").chmod(0o500)
    assert put(store, keys_of("b")) == [False] * PER_PACK
    (root / "mine" / "tmp").chmod(0o700)
    (root / "mine" / "kv_connector.format-2").chmod(0)
    assert put(store, keys_of("b")) == [False] * PER_PACK
    (root / "mine" / "kv_connector.format-2").chmod(0o600)
    assert all(put(store, keys_of("b")))
    store.close()
    (root / "mine" / "index").chmod(0)
    store = open_store(root / "mine")
    assert get(store, keys_of("a")) in ([True] * PER_PACK, [False] * PER_PACK)
    store.close()
    (root / "mine" / "index").chmod(0o600)
    try:
        FilesystemStorage(root / "theirs", bytes(32), 4096, 1 << 20)
    except PermissionError:
        return
    raise AssertionError("a folder of another user was opened")


def test_what_may_not_be_read_or_written_is_a_miss(shared: Path) -> None:
    (shared / "theirs").mkdir(mode=0o700)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.storage.storages", "tests.fakes"])
    process = context.Process(target=act_as_nobody, args=(shared,))
    process.start()
    process.join(SECONDS)
    assert process.exitcode == 0
