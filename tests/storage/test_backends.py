"""What every storage backend promises."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_connector.storage.base import Storage
from tests.storage.storages import (
    BACKENDS,
    BLOCK,
    SECONDS,
    FaultyStorage,
    buffers,
    content,
    exists,
    get,
    key,
    make_faulty,
    put,
)


@pytest.fixture(params=list(BACKENDS))
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    backend = BACKENDS[request.param](tmp_path)
    yield backend
    backend.close()


def test_what_is_written_is_read(storage: Storage) -> None:
    keys = [key(i) for i in range(9)]
    assert exists(storage, keys) == 0
    assert get(storage, keys) == [False] * 9
    assert put(storage, keys) == [True] * 9
    assert exists(storage, keys) == 9
    assert get(storage, keys[::-1]) == [True] * 9
    assert get(storage, [keys[3], key("other"), keys[5]]) == [True, False, True]
    stats = storage.stats()
    assert (stats["written_blocks"], stats["written_bytes"]) == (9, 9 * BLOCK)
    assert (stats["read_blocks"], stats["read_bytes"], stats["missed_blocks"]) == (11, 11 * BLOCK, 10)


def test_a_prefix_ends_at_the_first_block_that_is_missing(storage: Storage) -> None:
    keys = [key(i) for i in range(6)]
    put(storage, keys[:3] + keys[4:])
    assert exists(storage, keys) == 3
    assert exists(storage, keys[4:]) == 2
    assert exists(storage, []) == 0


def test_what_exists_is_not_written_again(storage: Storage) -> None:
    keys = [key(i) for i in range(4)]
    put(storage, keys)
    blocks = buffers(5)  # other bytes: content is named by its key, so the first one stays
    assert storage.write([*keys, key("new")], blocks).result(SECONDS) == [True] * 5
    assert get(storage, keys) == [True] * 4
    stats = storage.stats()
    assert (stats["written_blocks"], stats["skipped_writes_blocks"]) == (5, 4)


def test_removed_blocks_are_gone_and_can_come_back(storage: Storage) -> None:
    keys = [key(i) for i in range(3)]
    put(storage, keys)
    assert storage.remove(keys).result(SECONDS) == 3
    assert storage.remove(keys).result(SECONDS) == 0
    assert get(storage, keys) == [False] * 3
    assert put(storage, keys) == [True] * 3
    assert get(storage, keys) == [True] * 3


def test_empty_batches_are_nothing(storage: Storage) -> None:
    assert storage.read([], []).result(SECONDS) == []
    assert storage.write([], []).result(SECONDS) == []
    assert storage.remove([]).result(SECONDS) == 0


def test_one_key_twice_in_a_batch(storage: Storage) -> None:
    twice = [key("a"), key("b"), key("a")]
    assert put(storage, twice) == [True] * 3
    assert get(storage, twice) == [True] * 3


def test_misuse_is_refused_at_once(storage: Storage) -> None:
    with pytest.raises(ValueError, match="2 keys and 1 buffers"):
        storage.read([key(1), key(2)], buffers(1))
    with pytest.raises(ValueError, match="a key has 3 bytes: give 32"):
        storage.write([b"abc"], buffers(1))


def test_after_closing_everything_is_a_miss(storage: Storage) -> None:
    keys = [key(i) for i in range(3)]
    put(storage, keys)
    storage.close()
    storage.close()
    assert exists(storage, keys) == 0
    assert get(storage, keys) == [False] * 3
    assert put(storage, keys) == [False] * 3
    assert storage.remove(keys).result(SECONDS) == 0


def test_a_read_that_could_be_cancelled_has_touched_nothing(storage: Storage) -> None:
    keys = [key(i) for i in range(20)]
    put(storage, keys)
    blocks = [buffers(1) for _ in keys]
    reads = [storage.read([name], block) for name, block in zip(keys, blocks, strict=True)]
    cancelled = [read.cancel() for read in reads]
    for name, read, (block,), was_cancelled in zip(keys, reads, blocks, cancelled, strict=True):
        if not was_cancelled:
            assert read.result(SECONDS) == [True]
        assert bytes(block) == (bytes(BLOCK) if was_cancelled else content(name))
    assert all(get(storage, keys))


def test_many_threads_share_a_backend(storage: Storage) -> None:
    wrong: list[object] = []

    def work(seed: int) -> None:
        try:
            for turn in range(6):
                keys = [key((seed + turn) % 5 * 10 + i) for i in range(8)]
                put(storage, keys)
                get(storage, keys)
                exists(storage, keys)
                if turn == 3:
                    storage.remove(keys[:2]).result(SECONDS)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_a_fault_is_a_miss_and_one_line_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = make_faulty(tmp_path)
    assert isinstance(storage, FaultyStorage)
    keys = [key(i) for i in range(4)]
    put(storage, keys)
    storage.fault = OSError("the disk is on fire")
    for _ in range(3):
        assert exists(storage, keys) == 0
        assert get(storage, keys) == [False] * 4
        assert put(storage, [key("new")]) == [False]
    assert [record.getMessage() for record in caplog.records] == [
        "memory storage: a batch failed: OSError: the disk is on fire"
    ]
    storage.fault = None
    assert get(storage, keys) == [True] * 4
    assert storage.stats()["failed_reads_blocks"] == 12
    storage.close()


@pytest.mark.parametrize("backend", ["memory", "filesystem", "imitated mooncake"])
def test_any_sequence_of_calls_is_that_of_a_dictionary_that_forgets(backend: str, tmp_path: Path) -> None:
    """Nothing is found that was not written, bytes are right, and what was neither evicted nor removed is found."""
    count = 0

    @settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(
        st.lists(
            st.tuples(st.sampled_from(["put", "get", "remove"]), st.integers(0, 30), st.integers(1, 12)), max_size=12
        )
    )
    def check(calls: list[tuple[str, int, int]]) -> None:
        nonlocal count
        count += 1
        storage = BACKENDS[backend](tmp_path / str(count))
        expected: set[bytes] = set()
        for call, first, length in calls:
            keys = [key(i) for i in range(first, first + length)]
            if call == "put":
                assert all(put(storage, keys))
                expected |= set(keys)
            elif call == "remove":
                storage.remove(keys).result(SECONDS)
                expected -= set(keys)
            found = {k for k, good in zip(keys, get(storage, keys), strict=True) if good}
            assert found <= expected
            if not storage.stats()["evicted_blocks"] and not any(c == "remove" for c, _, _ in calls):
                assert found == expected & set(keys)
        storage.close()

    check()
