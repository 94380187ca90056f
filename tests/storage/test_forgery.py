"""Who can write to a storage, and does not know its secret, can take blocks away and give nobody others."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_connector.build import open_storage
from kv_connector.config import StorageConfig
from kv_connector.index import RankIdentity
from kv_connector.storage.base import Storage
from kv_connector.storage.filesystem.backend import FilesystemStorage
from kv_connector.storage.filesystem.folder import room_bytes
from kv_connector.storage.filesystem.packs import MAX_BLOCKS
from kv_connector.storage.filesystem.survey import damaged_blocks, survey
from kv_connector.storage.macs import KeyedMac, OtherSecretError, check_of, choose_check
from tests.storage.forgers import (
    KEYS,
    OTHER_BYTES,
    PLACES,
    FolderPlace,
    Forger,
    Place,
    exchanged,
    other_bytes_with_a_guess,
    other_bytes_with_crcs,
    other_bytes_with_old_macs,
)
from tests.storage.storages import BLOCK, IDENTITY, SECONDS, buffers, content, exists, get, key, put, size_of

SECRET, OTHER_SECRET = b"known to our engines alone", b"known to another team alone"


@pytest.fixture(params=list(PLACES))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    return PLACES[request.param](tmp_path)


def stored(place: Place, secret: bytes) -> None:
    """An engine stores the blocks, and ends."""
    storage = place.open(secret)
    assert all(put(storage, KEYS))
    storage.close()


def read(storage: Storage) -> list[bytes | None]:
    """What an engine takes for the blocks; None for a miss."""
    blocks = buffers(len(KEYS))
    found = storage.read(KEYS, blocks).result(SECONDS)
    return [bytes(block) if is_found else None for block, is_found in zip(blocks, found, strict=True)]


def test_without_a_secret_a_forger_gives_engines_what_he_likes(place: Place) -> None:
    """So the forgeries of these tests are good ones."""
    stored(place, b"")
    place.forge(exchanged)
    engine = place.open(b"")
    taken = read(engine)
    assert None not in taken
    assert sorted(map(bytes, taken)) == sorted(map(content, KEYS))  # type: ignore[arg-type]
    assert taken != [content(key) for key in KEYS]
    engine.close()
    place.forge(other_bytes_with_crcs)
    engine = place.open(b"")
    assert read(engine) == [OTHER_BYTES] * len(KEYS)
    engine.close()


@pytest.mark.parametrize(
    "forger",
    [other_bytes_with_crcs, exchanged, other_bytes_with_a_guess, other_bytes_with_old_macs],
    ids=lambda forger: str(forger.__name__),
)
def test_with_a_secret_what_is_forged_is_a_miss_and_is_stored_again(place: Place, forger: Forger) -> None:
    stored(place, SECRET)
    place.forge(forger)
    engine = place.open(SECRET)
    assert read(engine) == [None] * len(KEYS)
    assert engine.stats()["corrupt_blocks"] == len(KEYS)
    assert all(put(engine, KEYS)), "whoever computes them stores them once more"
    assert all(get(engine, KEYS))
    engine.close()


def test_a_forger_who_spoils_one_block_costs_no_other_of_its_pack(tmp_path: Path) -> None:
    place = FolderPlace(tmp_path)
    stored(place, SECRET)
    place.forge(lambda header, blocks: (header, [OTHER_BYTES, *blocks[1:]]))
    engine = place.open(SECRET)
    assert read(engine) == [None, *map(content, KEYS[1:])]
    engine.close()


def test_an_engine_with_another_secret_or_none_finds_nothing_and_deletes_nothing(place: Place) -> None:
    """They share the place, and each finds its own."""
    stored(place, SECRET)
    before = place.content()
    assert before
    for secret in (OTHER_SECRET, b""):
        stranger = place.open(secret)
        assert exists(stranger, KEYS) == 0
        assert read(stranger) == [None] * len(KEYS)
        assert stranger.remove(KEYS).result(SECONDS) == 0
        assert stranger.stats()["corrupt_blocks"] == 0
        assert all(put(stranger, KEYS))
        assert all(get(stranger, KEYS))
        stranger.close()
    after = place.content()
    assert before.items() <= after.items()
    assert len(after) == 3 * len(before)
    for secret in (SECRET, OTHER_SECRET, b""):
        engine = place.open(secret)
        assert exists(engine, KEYS) == len(KEYS)
        assert read(engine) == [content(key) for key in KEYS]
        engine.close()


def test_an_older_copy_that_is_put_back_is_as_good(tmp_path: Path) -> None:
    """Names follow from content: there is nothing else that was ever stored under them."""
    place = FolderPlace(tmp_path)
    stored(place, SECRET)
    old = place.content()
    engine = place.open(SECRET)
    assert engine.remove(KEYS).result(SECONDS) == len(KEYS)
    assert all(put(engine, KEYS))
    for name, text in old.items():
        engine.folder.layout.path(name).write_bytes(text)
    assert read(engine) == [content(key) for key in KEYS]
    engine.close()


@pytest.mark.parametrize("forger", [exchanged, other_bytes_with_crcs], ids=lambda forger: str(forger.__name__))
def test_who_knows_the_secret_finds_what_is_forged_in_a_folder(tmp_path: Path, forger: Forger) -> None:
    place = FolderPlace(tmp_path)
    stored(place, SECRET)
    place.forge(forger)
    (pack,) = survey(place.root)
    assert list(damaged_blocks(pack, SECRET)) == list(range(len(KEYS)))


def test_long_packs_with_macs_take_no_more_than_the_folder_may_hold(tmp_path: Path) -> None:
    """Their headers are of two pages where those with CRCs are of one."""
    check, identity = choose_check(SECRET, IDENTITY)
    num_blocks, block_bytes = 100, 4096
    capacity = 3 * room_bytes(num_blocks, block_bytes, check.size)
    size = num_blocks * block_bytes
    storage = FilesystemStorage(tmp_path, identity, block_bytes, capacity, size, check=check)
    for i in range(4):
        keys = [key((i, j)) for j in range(num_blocks)]
        assert all(put(storage, keys, block_bytes))
        assert all(get(storage, keys, block_bytes))
        assert size_of(tmp_path) <= capacity
    assert storage.stats()["evicted_blocks"] >= num_blocks
    storage.close()
    packs = list(survey(tmp_path))
    assert {pack.num_bytes for pack in packs} == {2 * 4096 + size}
    assert not any(pack.problem or damaged_blocks(pack, SECRET) for pack in packs)


def test_a_mac_is_of_one_secret_one_identity_one_key_and_all_bytes() -> None:
    block = bytearray(content(KEYS[0]))
    marked = choose_check(SECRET, IDENTITY)[1]
    check, again = KeyedMac(SECRET, marked), KeyedMac(SECRET, marked)
    mac = check.of(KEYS[0], memoryview(block))
    assert len(mac) == check.size == 16
    assert again.of(KEYS[0], memoryview(block)) == mac
    others = [KeyedMac(OTHER_SECRET, marked), KeyedMac(SECRET, b"another rank".ljust(32))]
    assert all(not other.fits(KEYS[0], memoryview(block), mac) for other in others)
    assert not check.fits(KEYS[1], memoryview(block), mac)
    assert not check.fits(KEYS[0], memoryview(block)[:-4096], mac)
    for place in (0, BLOCK // 2, BLOCK - 1):
        block[place] ^= 1
        assert not check.fits(KEYS[0], memoryview(block), mac)
        block[place] ^= 1
    assert check.fits(KEYS[0], memoryview(block), mac)


def test_all_of_a_mac_counts_and_no_part_of_it_is_enough() -> None:
    """Who may try four bytes finds them in an afternoon."""
    block = memoryview(content(KEYS[0]))
    check, _ = choose_check(SECRET, IDENTITY)
    mac = check.of(KEYS[0], block)
    assert check.fits(KEYS[0], block, mac)
    assert not any(check.fits(KEYS[0], block, mac[:length]) for length in range(16))
    assert not check.fits(KEYS[0], block, mac + b"\0")
    for place in range(16):
        for bit in range(8):
            other = bytearray(mac)
            other[place] ^= 1 << bit
            assert not check.fits(KEYS[0], block, bytes(other))


def test_the_longest_packs_with_macs_are_found_without_an_index(tmp_path: Path) -> None:
    """Their headers are longer than any with CRCs."""
    check, identity = choose_check(SECRET, IDENTITY)
    block_bytes, keys = 4096, [key(i) for i in range(MAX_BLOCKS)]

    def opened() -> FilesystemStorage:
        size = MAX_BLOCKS * block_bytes
        storage = FilesystemStorage(tmp_path, identity, block_bytes, 4 * size, size, check=check)
        storage.recovered.result(SECONDS)
        return storage

    storage = opened()
    assert all(put(storage, keys, block_bytes))
    storage.close()
    assert len(list(survey(tmp_path))) == 1
    (tmp_path / "index").unlink()
    storage = opened()
    assert exists(storage, keys) == MAX_BLOCKS
    assert all(get(storage, keys, block_bytes))
    storage.close()


def test_whose_blocks_lie_under_an_identity_is_known_to_who_knows_the_secret() -> None:
    check, marked = choose_check(SECRET, IDENTITY)
    assert marked != IDENTITY
    assert marked != choose_check(OTHER_SECRET, IDENTITY)[1]
    block = memoryview(content(KEYS[0]))
    assert check_of(check.size, SECRET, marked).of(KEYS[0], block) == check.of(KEYS[0], block)
    for secret in (OTHER_SECRET, b""):
        with pytest.raises(OtherSecretError):
            check_of(check.size, secret, marked)


def test_the_setting_names_the_variable_and_a_change_of_the_secret_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of a secret is in the log, in the folder, or in what settings and parts show of themselves."""
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("OURS", SECRET.decode())
    monkeypatch.setenv("THEIRS", OTHER_SECRET.decode())

    def start(**settings: str) -> int:
        config = StorageConfig(path=str(tmp_path / "store"), capacity=8 << 20, **settings)  # type: ignore[arg-type]
        assert SECRET.decode() not in repr(config)
        storage = open_storage(config, RankIdentity(None, 0, 1), 0, BLOCK, memoryview(bytearray(1)), "", 1)
        found = exists(storage, [key(0)])
        assert all(put(storage, [key(0)]))
        storage.close()
        return found

    assert [start(secret_env="OURS"), start(secret_env="OURS"), start(secret_env="THEIRS"), start()] == [0, 1, 0, 0]
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 2
    assert "mac was 'HMAC-SHA256, secret " in warnings[0]
    assert warnings[1].endswith("and is ''")
    assert len(list(survey(tmp_path / "store"))) == 3
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for secret in (SECRET, OTHER_SECRET):
        assert secret.decode() not in caplog.text
        assert secret not in files
