"""What was used longest ago goes first, also where a clock was wrong for a while."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kv_connector.storage.filesystem.backend import FilesystemStorage
from tests.storage.storages import BLOCK, IDENTITY, PACK_BYTES, SECONDS, capacity_for, exists, get, keys_of, put

HOUR = 3600 * 10**9
NUM_PACKS = 6


class Machine:
    """A clock that may be wrong, and engines that look at it."""

    def __init__(self, root: Path) -> None:
        self.ahead = 0
        self.root = root

    def open(self) -> FilesystemStorage:
        store = FilesystemStorage(
            self.root, IDENTITY, BLOCK, capacity_for(NUM_PACKS), PACK_BYTES, clock=lambda: time.time_ns() + self.ahead
        )
        store.recovered.result(SECONDS)
        return store


def kept(store: FilesystemStorage, names: str) -> str:
    return "".join(name for name in names if exists(store, keys_of(name, 1)))


@pytest.mark.parametrize("ahead", [HOUR, 24 * HOUR])
@pytest.mark.parametrize("when", ["same process", "restarted before", "restarted after", "restarted each time"])
@pytest.mark.parametrize("has_journal", [True, False])
def test_a_clock_that_was_ahead_once_does_not_cost_the_newest(
    tmp_path: Path, ahead: int, when: str, has_journal: bool
) -> None:
    """A, b and c are written a day ahead. From then on the clock is right, and they are the oldest."""
    machine = Machine(tmp_path)
    machine.ahead = ahead
    store = machine.open()
    for name in "abc":
        put(store, keys_of(name))
    machine.ahead = 0
    if when != "same process":
        store.close()
        store = machine.open()
    for name in "def":
        put(store, keys_of(name))
        if when == "restarted each time":
            store.close()
            store = machine.open()
    if when == "restarted after":
        store.close()
        if not has_journal:
            (tmp_path / "index").unlink()
        store = machine.open()
        if not has_journal:  # nothing tells when they were written; but they age from now on
            for name in "def":
                get(store, keys_of(name, 1))
    for name in "gh":
        put(store, keys_of(name))
    assert kept(store, "abcdefgh") in ("cdefgh", "adefgh", "bdefgh")
    assert kept(store, "defgh") == "defgh"
    store.close()


def test_what_is_read_goes_behind_what_a_wrong_clock_wrote(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.ahead = 24 * HOUR
    store = machine.open()
    for name in "abcdef":
        put(store, keys_of(name))
    machine.ahead = 0
    get(store, keys_of("a", 1))
    put(store, keys_of("g"))
    put(store, keys_of("h"))
    assert kept(store, "abcdefgh") == "adefgh"
    store.close()


def test_a_neighbour_whose_clock_is_some_seconds_ahead_is_believed(tmp_path: Path) -> None:
    right, fast = Machine(tmp_path), Machine(tmp_path)
    fast.ahead = 5 * 10**9
    store, neighbour = right.open(), fast.open()
    for name in "abcdef":
        put(store, keys_of(name))
    assert exists(neighbour, keys_of("a")) and all(get(neighbour, keys_of("a")))
    put(store, keys_of("g"))
    assert kept(store, "abcdefg") == "acdefg"
    for used in (store, neighbour):
        used.close()
