"""Two processes that save the same prefix, whose bytes differ in their last bits: both are right, and both stay."""

from __future__ import annotations

import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

from kv_connector.storage.filesystem.backend import FilesystemStorage
from tests.storage.filesystem.test_kills import hear, started
from tests.storage.storages import BLOCK, SECONDS, buffers, files_of, keys_of, open_store

NUM_BLOCKS = 8
ROUNDS = 20
CAPACITY = 64 << 20  # for all that is written


def write(store: FilesystemStorage, name: object, last_bits: int) -> None:
    blocks = buffers(NUM_BLOCKS)
    for block in blocks:
        block[:] = bytes([last_bits]) * BLOCK
    assert all(store.write(keys_of(name, NUM_BLOCKS), blocks).result(SECONDS))


def read(store: FilesystemStorage, name: object) -> list[int]:
    """What each block is full of; all must be there."""
    blocks = buffers(NUM_BLOCKS)
    assert store.read(keys_of(name, NUM_BLOCKS), blocks).result(SECONDS) == [True] * NUM_BLOCKS
    assert all(bytes(block) == bytes(block[:1]) * BLOCK for block in blocks)
    return [block[0] for block in blocks]


def serve(root: Path, last_bits: int, pipe: Connection) -> None:
    """Write a prefix whenever told to, and read it when told to; what was read and called damaged is sent."""
    store = open_store(root, CAPACITY)
    while True:
        act, name = pipe.recv()
        if act == "write":
            write(store, name, last_bits)
            pipe.send(None)
        else:
            values = read(store, name)
            pipe.send((values, store.stats()["corrupt_blocks"]))


def race(root: Path, rounds: int) -> None:
    """Both write at once, then both read, then both are read by one that starts now."""
    with started(serve, root, 1) as one, started(serve, root, 2) as two:
        for turn in range(rounds):
            for act in ("write", "read"):
                for _, pipe in (one, two):
                    pipe.send((act, turn))
                for process, pipe in (one, two):
                    answer = hear(process, pipe)
                    if act == "read":
                        values, num_corrupt = answer
                        assert set(values) <= {1, 2} and not num_corrupt
    store = open_store(root, CAPACITY)
    store.recovered.result(SECONDS)
    for turn in range(rounds):
        assert set(read(store, turn)) <= {1, 2}
    assert store.stats()["corrupt_blocks"] == 0
    store.close()


def test_two_processes_that_save_the_same_prefix_delete_nothing_of_each_other(tmp_path: Path) -> None:
    race(tmp_path, ROUNDS)


def test_what_is_computed_anew_after_its_eviction_is_found_after_a_restart(tmp_path: Path) -> None:
    """The journal tells of both, and of the first first."""
    store = open_store(tmp_path)
    write(store, "a", 1)
    assert store.remove(keys_of("a", NUM_BLOCKS)).result(SECONDS) == NUM_BLOCKS
    write(store, "a", 2)
    store.close()
    store = open_store(tmp_path)
    store.recovered.result(SECONDS)
    assert read(store, "a") == [2] * NUM_BLOCKS
    assert store.stats()["corrupt_blocks"] == 0
    assert len(files_of(tmp_path)) == 1
    store.close()


def test_a_block_of_which_another_copy_is_left_is_read_from_that(tmp_path: Path) -> None:
    one, two = open_store(tmp_path), open_store(tmp_path)
    for store in (one, two):
        store.recovered.result(SECONDS)
    write(one, "a", 1)
    write(two, "a", 2)  # it has not looked at the journal since, and knows nothing of the first
    one.folder.contents.catch_up()
    assert len(files_of(tmp_path)) == 2
    assert read(one, "a") == [2] * NUM_BLOCKS
    assert one.stats()["stored_blocks"] == NUM_BLOCKS
    damaged = one.folder.layout.path(one.folder.catalog.slots(keys_of("a", 1))[0].pack.name)  # type: ignore[union-attr]
    text = bytearray(damaged.read_bytes())
    text[4096] ^= 1
    damaged.write_bytes(text)
    assert one.read(keys_of("a", NUM_BLOCKS), buffers(NUM_BLOCKS)).result(SECONDS) == [False] + [True] * 7
    assert read(one, "a") == [1] + [2] * 7
    for store in (one, two):
        store.close()


if __name__ == "__main__":  # ROUNDS
    with tempfile.TemporaryDirectory() as folder:
        race(Path(folder), int(sys.argv[1]))
