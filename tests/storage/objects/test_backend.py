"""Storage in a store of objects: how blocks are grouped and found again, and what happens when the store fails."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from kv_connector.config import StorageConfig
from kv_connector.errors import ConfigError
from kv_connector.storage.breaker import BreakerState
from kv_connector.storage.mooncake.client import MooncakeClient, MooncakeOptions
from kv_connector.storage.objects.backend import ObjectStorage
from kv_connector.storage.objects.client import StoreUnreachable
from tests.storage.objects.stores import ImitatedStore, connected
from tests.storage.storages import IDENTITY, SECONDS, buffers, content, exists, get, key, put
from tests.waiting import until

SMALL, LARGE = 128 << 10, 1 << 20
PER_GROUP = 8


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store() -> ImitatedStore:
    return ImitatedStore()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def storage(store: ImitatedStore, clock: Clock) -> Iterator[ObjectStorage]:
    backend = connected(ObjectStorage("mooncake", store, IDENTITY, SMALL, clock=clock))
    yield backend
    backend.close()


@pytest.fixture
def other(store: ImitatedStore) -> Iterator[ObjectStorage]:
    """Another engine's, on the same store."""
    backend = connected(ObjectStorage("mooncake", ImitatedStore(store.objects), IDENTITY, SMALL))
    yield backend
    backend.close()


def client_of(storage: ObjectStorage) -> ImitatedStore:
    client = storage._client._client
    assert isinstance(client, ImitatedStore)
    return client


def pass_time(storage: ObjectStorage, clock: Clock, seconds: float) -> None:
    """Let the clock go on once a failed probe has ended, and who waits for it look at it."""
    until(lambda: storage._client.breaker.state is BreakerState.OPEN)
    clock.now += seconds
    storage._client._wake.set()


def prefix(count: int) -> list[bytes]:
    """Blocks of one prefix, from its first on."""
    return [key(i) for i in range(count)]


def test_small_blocks_share_an_object_of_a_megabyte_and_nothing_else_is_stored(
    storage: ObjectStorage, store: ImitatedStore
) -> None:
    assert storage.group_blocks == PER_GROUP
    assert all(put(storage, prefix(2 * PER_GROUP + 1), SMALL))
    sizes = sorted(len(content) for content in store.objects.values())
    assert sizes == [4096 + SMALL, 4096 + LARGE, 4096 + LARGE], "only the end of a prefix is a smaller one"
    assert [count for name, count in store.calls if name == "put"] == [3]


@pytest.mark.parametrize(
    ("block_bytes", "blocks"), [(4096, 64), (16 << 10, 64), (100 << 10, 16), (SMALL, 8), (LARGE, 1), (4 << 20, 1)]
)
def test_a_group_is_a_power_of_two_of_blocks(store: ImitatedStore, block_bytes: int, blocks: int) -> None:
    storage = connected(ObjectStorage("mooncake", store, IDENTITY, block_bytes))
    assert storage.group_blocks == blocks
    storage.close()


def test_a_block_of_a_megabyte_is_an_object_by_itself(store: ImitatedStore) -> None:
    storage = connected(ObjectStorage("mooncake", store, IDENTITY, LARGE))
    keys = prefix(3)
    assert all(put(storage, keys, LARGE))
    assert len(store.objects) == 3
    assert get(storage, keys, LARGE) == [True] * 3
    storage.close()


def test_a_look_up_asks_for_one_name_a_group(storage: ObjectStorage, other: ObjectStorage) -> None:
    keys = prefix(3 * PER_GROUP)
    put(storage, keys, SMALL)
    client = client_of(other)
    assert exists(other, keys) == len(keys)
    assert client.calls == [("exist", 3)]
    client.calls.clear()
    assert exists(other, keys[PER_GROUP:]) == 2 * PER_GROUP, "it may begin at any group"
    assert exists(other, keys[:PER_GROUP]) == PER_GROUP
    assert client.calls == [("exist", 2), ("exist", 1)]


@pytest.mark.parametrize("count", range(1, PER_GROUP))
def test_the_end_of_a_prefix_is_found_by_whoever_goes_on_from_it(
    storage: ObjectStorage, other: ObjectStorage, count: int
) -> None:
    """A request of other blocks behind it asks for the whole group, and then for its beginnings, in one call more."""
    keys = prefix(PER_GROUP + count)
    put(storage, keys, SMALL)
    longer = [*keys, *(key(f"behind {i}") for i in range(2 * PER_GROUP))]
    assert exists(other, longer) == len(keys)
    assert [name for name, _ in client_of(other).calls] == ["exist", "exist"]
    assert exists(other, keys) == len(keys)
    assert get(other, keys, SMALL) == [True] * len(keys)
    assert exists(other, keys[: PER_GROUP + count - 1]) == PER_GROUP, "a shorter one is another group"


def test_of_several_ends_the_longest_counts(storage: ObjectStorage, other: ObjectStorage) -> None:
    keys = prefix(PER_GROUP)
    for count in (5, 2, 3):
        put(storage, keys[:count], SMALL)
    assert exists(other, keys) == 5
    put(storage, keys, SMALL)
    assert exists(other, keys) == PER_GROUP


def test_an_end_is_not_the_whole_group_whatever_lies_under_its_name(
    storage: ObjectStorage, store: ImitatedStore
) -> None:
    keys = prefix(PER_GROUP)
    put(storage, keys[:3], SMALL)
    (name,) = store.objects
    put(storage, keys, SMALL)
    (whole,) = set(store.objects) - {name}
    store.objects[whole] = store.objects[name]
    assert not any(get(storage, keys, SMALL))


def test_what_is_not_wanted_of_a_group_is_not_touched(storage: ObjectStorage, other: ObjectStorage) -> None:
    keys = prefix(3 * PER_GROUP)
    put(storage, keys, SMALL)
    wanted = {0, 3, 4, PER_GROUP + 7}
    memory = buffers(len(keys), SMALL)
    asked = [block if i in wanted else memoryview(b"") for i, block in enumerate(memory)]
    found = other.read(keys, asked).result(SECONDS)
    assert {i for i, is_found in enumerate(found) if is_found} == wanted
    for i, block in enumerate(memory):
        assert bytes(block) == (content(keys[i], SMALL) if i in wanted else bytes(SMALL))
    assert other.stats()["read_blocks"] == len(wanted)
    assert [call for call in client_of(other).calls if call[0] == "get"] == [("get", 2)], "nothing of the third"


def test_what_branches_off_within_a_group_is_a_group_of_its_own(storage: ObjectStorage, other: ObjectStorage) -> None:
    trunk = prefix(PER_GROUP)
    branch = [*trunk[:3], *(key(f"branch {i}") for i in range(PER_GROUP - 3))]
    assert all(put(storage, [*trunk, *branch], SMALL)), "both in one call"
    assert storage.stats()["written_blocks"] == 2 * PER_GROUP
    for keys in (trunk, branch):
        assert exists(other, keys) == PER_GROUP
        assert all(get(other, keys, SMALL))


def test_a_group_that_was_evicted_is_a_miss_and_is_written_again(
    storage: ObjectStorage, other: ObjectStorage, store: ImitatedStore
) -> None:
    keys = prefix(2 * PER_GROUP)
    put(storage, keys, SMALL)
    del store.objects[next(iter(store.objects))]
    assert exists(other, keys) == 0
    assert get(other, keys, SMALL) == [False] * PER_GROUP + [True] * PER_GROUP
    assert other.stats()["missed_blocks"] == PER_GROUP
    assert all(put(storage, keys, SMALL))
    assert storage.stats()["written_blocks"] == 4 * PER_GROUP, "and so is what comes behind it, without asking"
    assert all(get(other, keys, SMALL))


def test_little_is_asked_for_that_lies_behind_a_miss(storage: ObjectStorage, store: ImitatedStore) -> None:
    store.calls.clear()
    assert exists(storage, prefix(5000)) == 0
    assert sum(count for _, count in store.calls) < 16 + PER_GROUP


def test_a_long_prefix_is_counted_to_its_end(storage: ObjectStorage, store: ImitatedStore) -> None:
    keys = prefix(700 * PER_GROUP + 3)
    for group in storage._groups.cut(keys)[:650]:
        store.objects[group.name] = b""
    assert exists(storage, keys) == 650 * PER_GROUP
    assert [count for _, count in store.calls] == [16, 32, 64, 128, 256, 204, PER_GROUP - 1]


def test_damage_and_foreign_bytes_are_misses(
    storage: ObjectStorage, store: ImitatedStore, caplog: pytest.LogCaptureFixture
) -> None:
    keys = prefix(2 * PER_GROUP)
    put(storage, keys, SMALL)
    first, second = store.objects
    damaged = bytearray(store.objects[first])
    damaged[-1] ^= 1
    store.objects[first], store.objects[second] = bytes(damaged), store.objects[first]
    assert not any(get(storage, keys, SMALL))
    assert storage.stats()["corrupt_blocks"] == 2 * PER_GROUP
    assert not store.objects, "what is damaged is removed"
    assert len(caplog.records) == 1
    assert all(put(storage, keys, SMALL))
    assert all(get(storage, keys, SMALL))


def test_a_full_store_is_told_of_once_and_again_when_it_is_full_anew(
    storage: ObjectStorage, store: ImitatedStore, caplog: pytest.LogCaptureFixture
) -> None:
    keys, most = prefix(3 * PER_GROUP), store.max_objects
    for _ in range(2):
        store.max_objects = 0
        for _ in range(3):
            assert not any(put(storage, keys, SMALL))
        store.max_objects = most
        assert all(put(storage, keys, SMALL))
        store.objects.clear()
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    line = "mooncake storage: cannot write: OSError: the store has no room, or no engine has lent it memory"
    assert told == [line] * 2
    assert storage.stats()["failed_writes_blocks"] == 2 * 3 * len(keys)


def test_models_are_told_apart(storage: ObjectStorage, store: ImitatedStore) -> None:
    keys = [key(i) for i in range(3)]
    put(storage, keys, SMALL)
    stranger = connected(ObjectStorage("mooncake", ImitatedStore(store.objects), b"another".ljust(32), SMALL))
    assert exists(stranger, keys) == 0
    assert not any(get(stranger, keys, SMALL))
    stranger.close()


def test_what_another_model_wrote_under_our_name_is_a_miss_and_removed(
    storage: ObjectStorage, store: ImitatedStore
) -> None:
    keys = [key(i) for i in range(3)]
    strangers = ImitatedStore()
    stranger = connected(ObjectStorage("mooncake", strangers, b"another".ljust(32), SMALL))
    put(storage, keys, SMALL)
    put(stranger, keys, SMALL)
    (ours,), (theirs,) = store.objects, strangers.objects.values()
    store.objects[ours] = theirs
    assert not any(get(storage, keys, SMALL))
    assert not store.objects
    stranger.close()


def test_a_dead_store_is_asked_once_and_found_again_by_a_probe(
    storage: ObjectStorage, store: ImitatedStore, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [key(i) for i in range(4)]
    put(storage, keys, SMALL)
    store.is_down = True
    assert exists(storage, keys) == 0
    assert store.down_calls == 1
    for _ in range(50):
        look_up = storage.exists(keys)
        read = storage.read(keys, buffers(4, SMALL))
        write = storage.write(keys, buffers(4, SMALL))
        assert look_up.done() and read.done() and write.done(), "nobody waits for a store that is left alone"
        assert (look_up.result(), any(read.result()), any(write.result())) == (0, False, False)
    assert store.down_calls == 1
    stats = storage.stats()
    assert (stats["breaker_is_open"], stats["breaker_opened_times"], stats["refused_calls"]) == (True, 1, 150)
    assert (stats["failed_reads_blocks"], stats["failed_writes_blocks"]) == (200, 200)
    pass_time(storage, clock, 1)
    until(lambda: store.connections.count(False) == 1)
    assert storage.stats()["breaker_is_open"], "the probe has failed"
    store.is_down = False
    pass_time(storage, clock, 100)
    until(lambda: not storage.stats()["breaker_is_open"])
    assert get(storage, keys, SMALL) == [True] * 4
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["mooncake storage: a batch failed: StoreUnreachable: the master is gone"]


def test_a_store_that_is_not_there_at_the_start_is_joined_later(store: ImitatedStore, clock: Clock) -> None:
    store.is_down = True
    storage = ObjectStorage("mooncake", store, IDENTITY, SMALL, clock=clock)
    until(lambda: store.connections == [False])
    assert put(storage, [key(1)], SMALL) == [False]
    store.is_down = False
    pass_time(storage, clock, 100)
    connected(storage)
    assert put(storage, [key(1)], SMALL) == [True]
    storage.close()


def test_a_store_that_comes_back_is_used_again_though_nobody_asks_for_it(store: ImitatedStore) -> None:
    storage = connected(ObjectStorage("mooncake", store, IDENTITY, SMALL))
    assert all(put(storage, [key(1)], SMALL))
    store.is_down = True
    assert exists(storage, [key(1)]) == 0
    store.is_down = False
    connected(storage)
    assert all(get(storage, [key(1)], SMALL))
    storage.close()


def test_what_waits_behind_a_call_that_hangs_is_not_tried_after_it() -> None:
    hangs, goes_on = threading.Event(), threading.Event()

    class HangingStore(ImitatedStore):
        def exist(self, names: Sequence[str]) -> list[bool]:
            self.calls.append(("exist", len(names)))
            hangs.set()
            assert goes_on.wait(SECONDS)
            raise StoreUnreachable("it timed out")

    store = HangingStore()
    storage = connected(ObjectStorage("mooncake", store, IDENTITY, SMALL))
    first = storage.exists([key(1)])
    assert hangs.wait(SECONDS)
    waiting = [storage.exists([key(i)]) for i in range(10)]
    goes_on.set()
    assert [future.result(SECONDS) for future in (first, *waiting)] == [0] * 11
    assert len(store.calls) == 1
    storage.close()


def test_an_owner_that_does_not_answer_costs_its_blocks_and_then_opens_the_breaker(
    storage: ObjectStorage, store: ImitatedStore
) -> None:
    keys = [key(i) for i in range(2 * PER_GROUP)]
    put(storage, keys, SMALL)
    store.faults = 1
    assert sum(get(storage, keys, SMALL)) == PER_GROUP, "other owners are read"
    assert not storage.stats()["breaker_is_open"]
    for _ in range(2):
        store.faults = 1
        get(storage, keys, SMALL)
    assert storage.stats()["breaker_is_open"]
    assert storage.stats()["failed_reads_blocks"] == 3 * PER_GROUP


def test_owners_that_fail_now_and_then_leave_the_breaker_closed(storage: ObjectStorage, store: ImitatedStore) -> None:
    keys = [key(i) for i in range(PER_GROUP)]
    put(storage, keys, SMALL)
    for _ in range(3):
        store.faults = 1
        assert not any(get(storage, keys, SMALL))
        assert all(get(storage, keys, SMALL)), "three in a row open it, and this is between two"
    assert storage.stats()["breaker_opened_times"] == 0


def test_a_block_that_is_asked_for_twice_in_a_call_is_read_twice(storage: ObjectStorage, store: ImitatedStore) -> None:
    put(storage, [key(1)], SMALL)
    twice = buffers(2, SMALL)
    assert storage.read([key(1), key(1)], twice, singly=True).result(SECONDS) == [True, True]
    assert [bytes(buffer) for buffer in twice] == [content(key(1), SMALL)] * 2


def test_a_write_that_fails_is_not_one_that_was_there_already(storage: ObjectStorage, store: ImitatedStore) -> None:
    put(storage, [key("there")], SMALL)
    before = storage.stats()
    store.max_objects = 0
    assert put(storage, [key("there")], SMALL) == [True]
    assert put(storage, [key("new")], SMALL) == [False]
    after = storage.stats()
    names = ("skipped_writes_blocks", "failed_writes_blocks")
    assert [after[name] - before[name] for name in names] == [1, 1]


def test_a_full_store_is_no_fault_of_the_store(storage: ObjectStorage, store: ImitatedStore) -> None:
    keys = [key(i) for i in range(PER_GROUP)]
    put(storage, keys, SMALL)
    store.max_objects = 0
    for _ in range(5):
        assert put(storage, [key("new")], SMALL) == [False]
    assert all(get(storage, keys, SMALL))
    stats = storage.stats()
    assert (stats["failed_writes_blocks"], stats["breaker_opened_times"]) == (5, 0)


@pytest.mark.parametrize("block_bytes", [0, -4096, 1000, 4097])
def test_blocks_are_whole_pages(block_bytes: int, store: ImitatedStore) -> None:
    with pytest.raises(ValueError, match="give a multiple of 4096"):
        ObjectStorage("mooncake", store, IDENTITY, block_bytes)


def test_after_a_close_no_thread_is_left(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    storage = connected(ObjectStorage("mooncake", ImitatedStore(), IDENTITY, SMALL))
    put(storage, [key(1)], SMALL)
    storage.close()
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("master", ["10.0.0..1:50051", f"{'x' * 64}.svc:50051"])
def test_a_master_whose_name_cannot_be_is_one_that_does_not_answer(
    master: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the thread that probes for it dies, and nobody ever hears why there are no hits."""
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", ModuleType("mooncake.store"))
    monkeypatch.setattr(sys.modules["mooncake"], "store", sys.modules["mooncake.store"], raising=False)
    client = MooncakeClient(MooncakeOptions.of(StorageConfig(kind="mooncake", master=master), 1, 1))
    with pytest.raises(StoreUnreachable, match="no master at"):
        client.connect([])


def test_an_engine_lends_its_segment_memory_by_rank_whether_or_not_ranks_share_the_host() -> None:
    config = StorageConfig(kind="mooncake", master="127.0.0.1:1", segment_memory=8 << 30)
    for num_served in (1, 4, 8):
        assert MooncakeOptions.of(config, num_served, 8).segment_bytes == num_served << 30


def test_without_the_wheel_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    config = StorageConfig(kind="mooncake", master="127.0.0.1:1")
    with pytest.raises(ConfigError, match="pip install 'mooncake-transfer-engine-non-cuda>="):
        MooncakeClient(MooncakeOptions.of(config, 1, 1))
