"""What every storage backend promises, as checks that its author runs against it:

    @pytest.mark.parametrize("check", storage_contract.CHECKS, ids=lambda check: check.__name__)
    def test_my_backend(check, tmp_path):
        check(lambda: my_backend.open(context, options))

Each check opens a backend of its own, for objects of `OBJECT_BYTES`, and closes it; at least `NUM_OBJECTS` must fit. It
raises AssertionError where a promise is broken. `kv_connector.storage.Storage` has the promises in words.
"""

from __future__ import annotations

import hashlib
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from ..storage.base import Storage

OBJECT_BYTES = 16384
NUM_OBJECTS = 64
SECONDS = 120.0
"""A future that takes longer hangs."""

Open = Callable[[], Storage]


def key_of(name: object) -> bytes:
    """Some object's key."""
    return hashlib.sha256(str(name).encode()).digest()


def content_of(key: bytes, num_bytes: int = OBJECT_BYTES) -> bytes:
    """What belongs under a key."""
    seed = int.from_bytes(key[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8).tobytes()


def make_buffers(count: int, num_bytes: int = OBJECT_BYTES) -> list[memoryview]:
    """Empty objects on page boundaries."""
    memory = memoryview(mmap.mmap(-1, max(1, count) * num_bytes))
    return [memory[i * num_bytes : (i + 1) * num_bytes] for i in range(count)]


def put(storage: Storage, keys: Sequence[bytes], num_bytes: int = OBJECT_BYTES, seconds: float = SECONDS) -> list[bool]:
    """Write what belongs under these keys. Raises TimeoutError where that takes longer than `seconds`."""
    buffers = make_buffers(len(keys), num_bytes)
    for key, buffer in zip(keys, buffers, strict=True):
        buffer[:] = content_of(key, num_bytes)
    return storage.write(keys, buffers).result(seconds)


def get(storage: Storage, keys: Sequence[bytes], num_bytes: int = OBJECT_BYTES, seconds: float = SECONDS) -> list[bool]:
    """Read keys; asserts that whatever is found is what belongs there. Raises TimeoutError as `put` does."""
    buffers = make_buffers(len(keys), num_bytes)
    found = storage.read(keys, buffers).result(seconds)
    assert len(found) == len(keys), f"{len(found)} answers for {len(keys)} keys"
    for key, buffer, is_found in zip(keys, buffers, found, strict=True):
        assert not is_found or bytes(buffer) == content_of(key, num_bytes), "bytes that were never written"
    return found


def exists(storage: Storage, keys: Sequence[bytes]) -> int:
    """How many of the leading keys are there."""
    return storage.exists(keys).result(SECONDS)


def what_is_written_is_read(open_storage: Open) -> None:
    """In any order, and what was not written is not found."""
    with _opened(open_storage) as storage:
        keys = [key_of(i) for i in range(9)]
        assert exists(storage, keys) == 0
        assert get(storage, keys) == [False] * 9
        assert put(storage, keys) == [True] * 9
        assert exists(storage, keys) == 9
        assert get(storage, keys[::-1]) == [True] * 9
        assert get(storage, [keys[3], key_of("other"), keys[5]]) == [True, False, True]


def a_prefix_ends_at_the_first_that_is_missing(open_storage: Open) -> None:
    """`exists` counts leading keys."""
    with _opened(open_storage) as storage:
        keys = [key_of(i) for i in range(6)]
        put(storage, keys[:3] + keys[4:])
        assert exists(storage, keys) == 3
        assert exists(storage, keys[4:]) == 2
        assert exists(storage, []) == 0


def what_lies_behind_a_gap_is_found_from_there_on(open_storage: Open) -> None:
    """So the connector finds blocks of sliding windows and recurrent states, which come and go one by one."""
    with _opened(open_storage) as storage:
        keys = [key_of(i) for i in range(9)]
        there = [i not in (0, 3, 4, 8) for i in range(9)]
        put(storage, [key for key, is_there in zip(keys, there, strict=True) if is_there])
        found: list[bool] = []
        while len(found) < len(keys):
            found += [True] * exists(storage, keys[len(found) :]) + [False]
        assert found[: len(keys)] == there


def what_is_removed_is_gone_and_can_come_back(open_storage: Open) -> None:
    """`remove` tells how many there were."""
    with _opened(open_storage) as storage:
        keys = [key_of(i) for i in range(3)]
        put(storage, keys)
        assert storage.remove(keys).result(SECONDS) == 3
        assert storage.remove(keys).result(SECONDS) == 0
        assert get(storage, keys) == [False] * 3
        assert put(storage, keys) == [True] * 3
        assert get(storage, keys) == [True] * 3


def empty_batches_are_nothing(open_storage: Open) -> None:
    """They have answers like any other."""
    with _opened(open_storage) as storage:
        assert storage.read([], []).result(SECONDS) == []
        assert storage.write([], []).result(SECONDS) == []
        assert storage.remove([]).result(SECONDS) == 0


def one_key_twice_in_a_batch(open_storage: Open) -> None:
    """Each has its answer and its bytes."""
    with _opened(open_storage) as storage:
        twice = [key_of("a"), key_of("b"), key_of("a")]
        assert put(storage, twice) == [True] * 3
        assert get(storage, twice) == [True] * 3


def after_closing_everything_is_a_miss(open_storage: Open) -> None:
    """Closing twice does nothing more."""
    with _opened(open_storage) as storage:
        keys = [key_of(i) for i in range(3)]
        put(storage, keys)
        storage.close()
        assert exists(storage, keys) == 0
        assert get(storage, keys) == [False] * 3
        assert put(storage, keys) == [False] * 3
        assert storage.remove(keys).result(SECONDS) == 0


def a_read_that_could_be_cancelled_has_touched_nothing(open_storage: Open) -> None:
    """And all others end."""
    with _opened(open_storage) as storage:
        keys = [key_of(i) for i in range(20)]
        put(storage, keys)
        buffers = [make_buffers(1) for _ in keys]
        reads = [storage.read([key], buffer) for key, buffer in zip(keys, buffers, strict=True)]
        cancelled = [read.cancel() for read in reads]
        for key, read, (buffer,), was_cancelled in zip(keys, reads, buffers, cancelled, strict=True):
            if not was_cancelled:
                assert read.result(SECONDS) == [True]
            assert bytes(buffer) == (bytes(OBJECT_BYTES) if was_cancelled else content_of(key))
        assert all(get(storage, keys))


def many_threads_share_it(open_storage: Open) -> None:
    """Calls come from any thread."""
    wrong: list[BaseException] = []
    with _opened(open_storage) as storage:

        def work(seed: int) -> None:
            try:
                for turn in range(6):
                    keys = [key_of((seed + turn) % 5 * 10 + i) for i in range(8)]
                    put(storage, keys)
                    get(storage, keys)
                    exists(storage, keys)
                    if turn == 3:
                        storage.remove(keys[:2]).result(SECONDS)
            except BaseException as error:  # noqa: BLE001 - told below
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        assert not any(thread.is_alive() for thread in threads), "a call never ended"
    assert not wrong, wrong


CHECKS: tuple[Callable[[Open], None], ...] = (
    what_is_written_is_read,
    a_prefix_ends_at_the_first_that_is_missing,
    what_lies_behind_a_gap_is_found_from_there_on,
    what_is_removed_is_gone_and_can_come_back,
    empty_batches_are_nothing,
    one_key_twice_in_a_batch,
    after_closing_everything_is_a_miss,
    a_read_that_could_be_cancelled_has_touched_nothing,
    many_threads_share_it,
)


@contextmanager
def _opened(open_storage: Open) -> Iterator[Storage]:
    storage = open_storage()
    try:
        yield storage
    finally:
        storage.close()
        storage.close()
