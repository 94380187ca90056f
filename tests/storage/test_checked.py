"""A backend of the user's own, behind our checks: whatever it does costs a miss, never a byte and never an engine."""

from __future__ import annotations

import re
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from kv_connector.build import open_storage
from kv_connector.config import StorageConfig
from kv_connector.errors import ConfigError
from kv_connector.index import RankIdentity
from kv_connector.storage import Storage, StorageContext, checked
from kv_connector.storage.base import ended
from kv_connector.storage.breaker import BreakerState
from kv_connector.storage.checked import CheckedStorage, object_bytes
from kv_connector.storage.macs import choose_check
from kv_connector.testing import storage_contract
from kv_connector.testing.memory import MemoryStorage
from tests.storage.storages import BLOCK, IDENTITY, SECONDS, buffers, exists, get, key, put

DOCUMENT = Path(__file__).parents[2] / "docs" / "storage_backends.md"
KEYS = [key(i) for i in range(4)]


class Odd(MemoryStorage):
    """Does what it should until a test says otherwise."""

    def __init__(self) -> None:
        super().__init__(object_bytes(BLOCK), 64 * object_bytes(BLOCK))
        self.answer: Callable[[str, Future[Any], Sequence[memoryview]], Future[Any]] | None = None

    def read(self, keys: Sequence[bytes], views: Sequence[memoryview]) -> Future[list[bool]]:
        return self._odd("read", super().read(keys, views), views)

    def write(self, keys: Sequence[bytes], views: Sequence[memoryview]) -> Future[list[bool]]:
        return self._odd("write", super().write(keys, views), views)

    def exists(self, keys: Sequence[bytes]) -> Future[int]:
        return self._odd("exists", super().exists(keys), ())

    def _odd(self, call: str, future: Future[Any], views: Sequence[memoryview]) -> Future[Any]:
        return future if self.answer is None else self.answer(call, future, views)


class Unanswered(Future[Any]):
    """Whoever waits has waited for as long as he would."""

    def result(self, timeout: float | None = None) -> Any:
        assert timeout == SECONDS
        raise TimeoutError


class Clock:
    """Stands still unless it is told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def inner() -> Odd:
    return Odd()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def storage(inner: Odd, clock: Clock) -> Iterator[CheckedStorage]:
    storage = CheckedStorage("mine", inner, IDENTITY, BLOCK, clock, seconds=SECONDS)
    yield storage
    storage.close()


def example() -> Callable[[StorageContext, dict[str, Any]], Storage]:
    """The backend that the document shows."""
    source = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)[0]
    module: dict[str, Any] = {}
    exec(source, module)
    open_storage: Callable[[StorageContext, dict[str, Any]], Storage] = module["open_storage"]
    return open_storage


@pytest.mark.parametrize("is_checked", [False, True])
@pytest.mark.parametrize("check", storage_contract.CHECKS, ids=lambda check: str(check.__name__))
def test_the_documents_backend_keeps_the_contract(
    check: Callable[[Callable[[], Storage]], None], is_checked: bool, tmp_path: Path
) -> None:
    def opened() -> Storage:
        size = object_bytes(BLOCK) if is_checked else BLOCK
        storage = example()(StorageContext(IDENTITY, size), {"folder": str(tmp_path)})
        return CheckedStorage("mine", storage, IDENTITY, BLOCK) if is_checked else storage

    check(opened)


@pytest.mark.parametrize(("there", "num_calls"), [("", 4), ("0123", 1), ("03", 3), ("123", 2), ("012", 1)])
def test_what_is_kept_singly_is_found_with_the_calls_that_every_backend_has(
    storage: CheckedStorage, inner: Odd, there: str, num_calls: int
) -> None:
    """Whatever is missing in front of it; a call for each gap, and one where there is none."""
    keys = [key(i) for i in range(4)]
    kept = [keys[int(i)] for i in there]
    blocks = buffers(len(kept))
    assert storage.write(kept, blocks, True).result(SECONDS) == [True] * len(kept)
    asked: list[str] = []
    inner.answer = lambda call, future, views: asked.append(call) or future
    assert storage.which(keys).result(SECONDS) == [str(i) in there for i in range(4)]
    assert asked == ["exists"] * num_calls
    assert storage.read(kept, blocks, True).result(SECONDS) == [True] * len(kept)


def test_an_engine_that_starts_again_finds_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the setting, as an engine opens it; another rank, or another model, finds nothing."""
    monkeypatch.setitem(sys.modules, "my_store", module := types.ModuleType("my_store"))
    module.open_storage = example()  # type: ignore[attr-defined]
    config = StorageConfig(kind="my_store:open_storage", options={"folder": str(tmp_path)})

    def opened(rank: int = 0) -> Storage:
        return open_storage(config, RankIdentity(None, rank, 2), rank, BLOCK, memoryview(bytearray(1)), "", 1)

    first, other = opened(), opened(rank=1)
    assert put(first, KEYS) == [True] * 4
    first.close()
    again = opened()
    assert (exists(again, KEYS), exists(other, KEYS)) == (4, 0)
    assert get(again, KEYS) == [True] * 4
    again.close()
    other.close()


def test_another_model_or_rank_that_shares_the_backend_finds_nothing(inner: Odd) -> None:
    here, there = (CheckedStorage("mine", inner, identity, BLOCK) for identity in (bytes(32), IDENTITY))
    assert put(here, KEYS) == [True] * 4
    assert (exists(here, KEYS), exists(there, KEYS)) == (4, 0)
    assert get(there, KEYS) == [False] * 4
    here.close()


@pytest.mark.parametrize(("secret", "magic"), [(b"", b"kvcobj1\0"), (b"known to our engines", b"kvcobj2\0")])
def test_an_object_says_how_it_is_checked(secret: bytes, magic: bytes) -> None:
    """Objects outlive programs: what lies in buckets has these, and one with the other's is not what was written."""
    inner = MemoryStorage(object_bytes(BLOCK), 64 * object_bytes(BLOCK))
    check, identity = choose_check(secret, IDENTITY)
    storage = CheckedStorage("mine", inner, identity, BLOCK, check=check)
    assert put(storage, KEYS) == [True] * 4
    (name,) = storage._names(KEYS[:1])
    (held,) = buffers(1, object_bytes(BLOCK))
    assert inner.read([name], [held]).result(SECONDS) == [True]
    assert bytes(held[BLOCK : BLOCK + 8]) == magic
    held[BLOCK + 6] ^= 3  # 1 for 2, and 2 for 1
    assert inner.remove([name]).result(SECONDS) == 1
    assert inner.write([name], [held]).result(SECONDS) == [True]
    assert get(storage, KEYS) == [False, True, True, True]
    storage.close()


def flipped(call: str, future: Future[Any], views: Sequence[memoryview]) -> Future[Any]:
    future.result(SECONDS)
    if call == "read":
        views[1][7] ^= 1
    return future


def swapped(call: str, future: Future[Any], views: Sequence[memoryview]) -> Future[Any]:
    future.result(SECONDS)
    if call == "read" and len(views) > 1:
        views[0][:], views[1][:] = bytes(views[1]), bytes(views[0])
    return future


def empty(call: str, future: Future[Any], views: Sequence[memoryview]) -> Future[Any]:
    future.result(SECONDS)
    for view in views if call == "read" else ():
        view[:] = bytes(len(view))
    return future


@pytest.mark.parametrize(("answer", "found"), [(flipped, [1, 0, 1, 1]), (swapped, [0, 0, 1, 1]), (empty, [0, 0, 0, 0])])
def test_other_bytes_are_a_miss_and_are_removed(
    storage: CheckedStorage, inner: Odd, answer: Callable[..., Future[Any]], found: list[int]
) -> None:
    put(storage, KEYS)
    inner.answer = answer
    assert get(storage, KEYS) == [bool(is_found) for is_found in found]
    inner.answer = None
    assert get(storage, KEYS) == [bool(is_found) for is_found in found], "what was not whole was removed"
    assert storage.stats()["corrupt_blocks"] == found.count(0)


def test_what_is_written_when_nobody_waits_any_more_lands_nowhere(
    storage: CheckedStorage, inner: Odd, clock: Clock
) -> None:
    """A store that hangs, then writes late; it is left alone meanwhile, and asked again later."""
    put(storage, KEYS)
    held: list[tuple[Future[Any], Sequence[memoryview]]] = []

    def hang(call: str, future: Future[Any], views: Sequence[memoryview]) -> Future[Any]:
        held.append((Unanswered(), views))
        return held[-1][0]

    inner.answer = hang
    blocks = buffers(4)
    assert storage.read(KEYS, blocks).result(SECONDS) == [False] * 4
    assert storage.breaker.state is BreakerState.OPEN
    assert get(storage, KEYS) == [False] * 4
    assert len(held) == 1, "it is asked for nothing while it is left alone"
    for view in held[0][1]:
        view[:] = b"\xdd" * len(view)
    held[0][0].set_result([True] * 4)
    assert all(bytes(block) == bytes(BLOCK) for block in blocks)
    clock.now += 1
    assert get(storage, KEYS) == [False] * 4, "no request is the probe"
    assert storage.breaker.state is BreakerState.HALF_OPEN
    held[1][0].set_result(0)
    inner.answer = None
    assert get(storage, KEYS) == [True] * 4


def test_a_probe_whose_answer_is_lost_is_not_the_last(storage: CheckedStorage, inner: Odd, clock: Clock) -> None:
    """A call lost in a partition; what it says later, when another probe is out, says nothing of now."""
    put(storage, KEYS)
    asked: list[Future[Any]] = []

    def hang(call: str, future: Future[Any], views: Sequence[memoryview]) -> Future[Any]:
        asked.append(Unanswered())
        return asked[-1]

    inner.answer = hang
    assert exists(storage, KEYS) == 0
    clock.now += 1
    for _ in range(2):
        assert get(storage, KEYS) == [False] * 4
    assert len(asked) == 2 and storage.breaker.state is BreakerState.HALF_OPEN, "one probe at a time"
    clock.now += SECONDS
    assert get(storage, KEYS) == [False] * 4
    assert storage.breaker.state is BreakerState.OPEN, "its time is over, as any other answer's"
    clock.now += 1
    assert get(storage, KEYS) == [False] * 4
    assert len(asked) == 3
    asked[1].set_result(0)
    assert storage.breaker.state is BreakerState.HALF_OPEN, "that was the one before"
    inner.answer = None
    asked[2].set_result(0)
    assert get(storage, KEYS) == [True] * 4


def answering(inner: Odd, call: str, answer: object) -> None:
    """From now on these calls do what they should, and then say this."""

    def odd(made: str, future: Future[Any], views: Sequence[memoryview]) -> Future[Any]:
        future.result(SECONDS)
        return ended(answer) if made == call else future

    inner.answer = odd


def test_what_is_not_whole_is_not_copied_into_the_callers_memory(storage: CheckedStorage, inner: Odd) -> None:
    put(storage, KEYS)
    inner.answer = flipped
    blocks = buffers(4)
    assert storage.read(KEYS, blocks).result(SECONDS) == [True, False, True, True]
    assert [bytes(block) == bytes(BLOCK) for block in blocks] == [False, True, False, False]


def test_a_block_that_was_not_stored_is_not_called_stored(storage: CheckedStorage, inner: Odd) -> None:
    """A bucket that is full: it takes some of a batch."""
    answering(inner, "write", [True, False, True, False])
    assert put(storage, KEYS) == [True, False, True, False]
    stats = storage.stats()
    assert (stats["written_blocks"], stats["failed_writes_blocks"]) == (2, 2)


@pytest.mark.parametrize(("answer", "found"), [(99, 4), (-3, 0)])
def test_no_more_is_found_than_was_asked_for(storage: CheckedStorage, inner: Odd, answer: object, found: int) -> None:
    """Who asks takes as many keys as it is told."""
    answering(inner, "exists", answer)
    assert exists(storage, KEYS) == found


def test_the_log_says_that_the_answers_are_too_few(
    storage: CheckedStorage, inner: Odd, caplog: pytest.LogCaptureFixture
) -> None:
    """Who writes a backend finds the mistake with it."""
    answering(inner, "read", [True] * 3)
    assert get(storage, KEYS) == [False] * 4
    assert caplog.messages == ["mine storage: a batch failed: OSError: it gave 3 answers for 4 keys"]


def test_a_probe_that_cannot_be_made_has_failed(storage: CheckedStorage, inner: Odd, clock: Clock) -> None:
    """A client without a connection raises at once: it is asked again after a pause, not after an answer's time."""
    put(storage, KEYS)

    def raising(call: str, future: Future[Any], views: Sequence[memoryview]) -> Future[Any]:
        raise ConnectionError("no connection")

    inner.answer = raising
    for _ in range(3):
        assert get(storage, KEYS) == [False] * 4
    clock.now += 1
    assert get(storage, KEYS) == [False] * 4
    assert storage.breaker.state is BreakerState.OPEN


def test_a_long_batch_takes_a_bounded_part_of_memory(inner: Odd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects are put together in memory of their own: of 64 MiB at a time."""
    monkeypatch.setattr(checked, "_BATCH_BYTES", 2 * object_bytes(BLOCK))
    storage = CheckedStorage("mine", inner, IDENTITY, BLOCK)
    asked = []

    def counted(call: str, future: Future[Any], views: Sequence[memoryview]) -> Future[Any]:
        asked.append((call, len(views)))
        return future

    inner.answer = counted
    keys = [key(i) for i in range(5)]
    assert put(storage, keys) == get(storage, keys) == [True] * 5
    assert asked == [("write", 2), ("write", 2), ("write", 1), ("read", 2), ("read", 2), ("read", 1)]
    storage.close()


@pytest.mark.parametrize("answers", [[True] * 3, [True] * 5, None, OSError("gone")])
def test_answers_that_cannot_be_are_misses(storage: CheckedStorage, inner: Odd, answers: object) -> None:
    put(storage, KEYS)

    def answer(call: str, future: Future[Any], views: Sequence[memoryview]) -> Future[Any]:
        odd: Future[Any] = Future()
        if isinstance(answers, OSError):
            odd.set_exception(answers)
        else:
            odd.set_result(answers)
        return odd

    inner.answer = answer
    for _ in range(2):
        assert get(storage, KEYS) == [False] * 4
        assert put(storage, KEYS) == [False] * 4
        assert exists(storage, KEYS) == 0


def test_statistics_wait_for_nobody(inner: Odd) -> None:
    """The thread that launches the model asks for them."""
    asked = []
    inner.stats = lambda: asked.append(threading.current_thread()) or {"stored_objects": 3}  # type: ignore[method-assign,func-returns-value]
    storage = CheckedStorage("mine", inner, IDENTITY, BLOCK)
    put(storage, KEYS)
    storage.close()
    assert storage.stats()["stored_objects"] == 3
    assert asked and threading.current_thread() not in asked


@pytest.mark.parametrize("told", [OSError("no such counter"), None, {"version": "1.2.3"}, {"stored_objects": None}])
def test_statistics_that_fail_cost_no_block(
    told: object, storage: CheckedStorage, inner: Odd, caplog: pytest.LogCaptureFixture
) -> None:
    """What is stored is said to be stored, and the log has one line, however often it is asked."""

    def stats() -> Any:
        if isinstance(told, OSError):
            raise told
        return told

    inner.stats = stats  # type: ignore[method-assign]
    for _ in range(3):
        assert put(storage, KEYS) == [True] * 4
        assert get(storage, KEYS) == [True] * 4
    storage.close()
    assert storage.stats()["failed_writes_blocks"] == 0
    (line,) = caplog.messages
    assert line.startswith("mine storage: it has no statistics: ")


def test_writes_do_not_wait_for_statistics(storage: CheckedStorage, inner: Odd) -> None:
    """A backend that asks its server for them, and the server is slow."""
    answered = threading.Event()
    asked = []

    def stats() -> dict[str, float]:
        asked.append(threading.current_thread())
        answered.wait()
        return {"stored_objects": 3}

    inner.stats = stats  # type: ignore[method-assign]
    try:
        for turn in range(3):
            assert put(storage, keys := [key(f"{turn} {i}") for i in range(4)]) == [True] * 4
            assert get(storage, keys) == [True] * 4
    finally:
        answered.set()
    storage.close()
    assert len(asked) == 1, "it is not asked again before it has answered"
    assert storage.stats()["stored_objects"] == 3


def raising(context: StorageContext, options: dict[str, Any]) -> Storage:
    raise ValueError("no such bucket")


def nothing(context: StorageContext, options: dict[str, Any]) -> object:
    return None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module_at_all:open", "cannot be imported"),
        (f"{__name__}:no_such_function", "cannot be imported"),
        (f"{__name__}:raising", "cannot be opened: ValueError('no such bucket')"),
        (f"{__name__}:nothing", "returned None, which has no exists, read, write, remove, stats, close"),
    ],
)
def test_what_is_no_backend_is_refused_at_the_start(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        open_storage(StorageConfig(kind=name), RankIdentity(None, 0, 1), 0, BLOCK, memoryview(bytearray(1)), "", 1)
