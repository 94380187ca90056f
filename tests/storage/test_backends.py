"""What every storage backend promises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_connector.storage import Storage, ThreadedStorage
from kv_connector.testing import storage_contract
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


@pytest.mark.parametrize("check", storage_contract.CHECKS, ids=lambda check: str(check.__name__))
@pytest.mark.parametrize("backend", list(BACKENDS))
def test_every_backend_keeps_the_contract(
    check: Callable[[Callable[[], Storage]], None], backend: str, tmp_path: Path
) -> None:
    check(lambda: BACKENDS[backend](tmp_path))


@pytest.mark.parametrize("backend", sorted(set(BACKENDS) - {"faulty"}))
def test_blocks_that_come_and_go_one_by_one_are_found_one_by_one(backend: str, tmp_path: Path) -> None:
    storage = BACKENDS[backend](tmp_path)
    assert isinstance(storage, ThreadedStorage)
    keys = [key(i) for i in range(9)]
    there = [i not in (0, 3, 4, 8) for i in range(9)]
    kept = [k for k, is_there in zip(keys, there, strict=True) if is_there]
    blocks = buffers(9)
    for k, block in zip(kept, blocks, strict=False):
        block[:] = content(k)
    assert storage.which(keys).result(SECONDS) == [False] * 9
    assert storage.write(kept, blocks[:5], singly=True).result(SECONDS) == [True] * 5
    assert storage.which(keys).result(SECONDS) == there
    assert storage.read(keys, blocks, singly=True).result(SECONDS) == there
    assert all(bytes(block) == content(k) for k, block, found in zip(keys, blocks, there, strict=True) if found)
    storage.close()
    assert storage.which(keys).result(SECONDS) == [False] * 9


def test_what_is_written_and_read_is_counted(storage: Storage) -> None:
    keys = [key(i) for i in range(9)]
    get(storage, keys)
    put(storage, keys)
    get(storage, keys[::-1])
    get(storage, [keys[3], key("other"), keys[5]])
    stats = storage.stats()
    assert (stats["written_blocks"], stats["written_bytes"]) == (9, 9 * BLOCK)
    assert (stats["read_blocks"], stats["read_bytes"], stats["missed_blocks"]) == (11, 11 * BLOCK, 10)


def test_what_exists_is_not_written_again(storage: Storage) -> None:
    keys = [key(i) for i in range(4)]
    put(storage, keys)
    blocks = buffers(5)  # other bytes: content is named by its key, so the first one stays
    assert storage.write([*keys, key("new")], blocks).result(SECONDS) == [True] * 5
    assert get(storage, keys) == [True] * 4
    stats = storage.stats()
    assert (stats["written_blocks"], stats["skipped_writes_blocks"]) == (5, 4)


def test_misuse_is_refused_at_once(storage: Storage) -> None:
    with pytest.raises(ValueError, match="2 keys and 1 buffers"):
        storage.read([key(1), key(2)], buffers(1))
    with pytest.raises(ValueError, match="a key has 3 bytes: give 32"):
        storage.write([b"abc"], buffers(1))


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


@pytest.mark.parametrize("backend", ["memory", "filesystem", "filesystem with a secret", "imitated mooncake"])
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
