"""Storage jobs of a rank: a job is done where a block of it was moved, and tells of those that were not."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import pytest

from kv_connector.storage import jobs as jobs_module
from kv_connector.storage.jobs import EndedStorageJob, StorageJobs
from kv_connector.testing.memory import MemoryStorage
from kv_connector.types import StorageAction, StorageJob
from tests.storage.storages import BLOCK, HeldStorage, content, key, put


@pytest.mark.parametrize("missing", [(), (0,), (1,), (0, 1)])
def test_a_fetch_tells_which_of_its_blocks_are_missing(missing: tuple[int, ...]) -> None:
    """Its host block holds whatever was there before, and would be loaded for the prefix of another."""
    storage = MemoryStorage(BLOCK, 64 * BLOCK)
    keys = [key(index) for index in range(2)]
    put(storage, [key_ for index, key_ in enumerate(keys) if index not in missing])
    host = np.zeros((4, BLOCK), np.uint8)
    jobs = StorageJobs(storage, host)
    jobs.begin(StorageJob(1, StorageAction.FETCH, b"".join(keys), np.array([3, 0])))
    storage.close()  # when it returns all jobs have ended
    lost = tuple((3, 0)[index] for index in missing)
    assert jobs.poll() == [EndedStorageJob(1, ok=len(missing) < 2, missing=lost)]
    for index, block_id in enumerate((3, 0)):
        assert host[block_id].tobytes() == (content(keys[index]) if index not in missing else bytes(BLOCK))


@pytest.mark.parametrize("missing", [(), (0,), (2,), (0, 1, 2)])
def test_a_fetch_of_groups_fills_the_host_blocks_of_those_that_are_wanted(missing: tuple[int, ...]) -> None:
    """Two groups of four: the host has some of the first, and wants one of the second."""
    skipped, host_ids = (0, 1, 4, 5, 6), [7, 2, 5]
    keys = [key(index) for index in range(8)]
    wanted = [keys[place] for place in range(8) if place not in skipped]

    class Groups(MemoryStorage):
        """Finds what is not missing."""

        group_blocks = 4

        def read(
            self, keys: Sequence[bytes], buffers: Sequence[memoryview], singly: bool = False
        ) -> Future[list[bool]]:
            assert not singly
            assert len(keys) == 8, "whole groups"
            for place, (block_key, buffer) in enumerate(zip(keys, buffers, strict=True)):
                assert len(buffer) == (0 if place in skipped else BLOCK)
                if buffer and wanted.index(block_key) not in missing:
                    buffer[:] = content(block_key)
            future: Future[list[bool]] = Future()
            future.set_result(
                [bool(buffer) and wanted.index(k) not in missing for k, buffer in zip(keys, buffers, strict=True)]
            )
            return future

    host = np.zeros((8, BLOCK), np.uint8)
    jobs = StorageJobs(Groups(BLOCK, BLOCK), host)
    job = StorageJob(1, StorageAction.FETCH, b"".join(keys), np.array(host_ids), skipped)
    assert job.num_blocks == 3
    jobs.begin(job)
    lost = tuple(host_ids[index] for index in missing)
    assert jobs.poll() == [EndedStorageJob(1, ok=len(missing) < 3, missing=lost)]
    filled = {host_ids[i]: content(k) for i, k in enumerate(wanted) if i not in missing}
    assert all(host[i].tobytes() == filled.get(i, bytes(BLOCK)) for i in range(8))
    jobs.close()


class Slow(MemoryStorage):
    """Ends a write, and a read, when it is told to."""

    def __init__(self) -> None:
        super().__init__(BLOCK, 64 * BLOCK)
        self.moved: Future[list[bool]] = Future()

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview], singly: bool = False) -> Future[list[bool]]:
        return self.moved

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview], singly: bool = False) -> Future[list[bool]]:
        return self.moved


@pytest.mark.parametrize("action", [StorageAction.FETCH, StorageAction.BACK_UP])
def test_a_job_is_told_of_when_it_has_ended_and_not_before(action: StorageAction) -> None:
    """Until then its host blocks are read or written: whoever is given them sooner has them stored, or overwritten."""
    storage = Slow()
    jobs = StorageJobs(storage, np.zeros((1, BLOCK), np.uint8))
    jobs.begin(StorageJob(1, action, key(0), np.array([0])))
    assert jobs.poll() == []
    storage.moved.set_result([True])
    assert [(job.job_id, job.ok, job.missing) for job in jobs.poll()] == [(1, True, ())]
    jobs.close()


class Telling(MemoryStorage):
    """Says of each call whether blocks were to be kept singly."""

    def __init__(self) -> None:
        super().__init__(BLOCK, 64 * BLOCK)
        self.told: list[tuple[str, bool]] = []

    def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview], singly: bool = False) -> Future[list[bool]]:
        self.told.append(("read", singly))
        return super().read(keys, buffers, singly)

    def write(self, keys: Sequence[bytes], buffers: Sequence[memoryview], singly: bool = False) -> Future[list[bool]]:
        self.told.append(("write", singly))
        return super().write(keys, buffers, singly)


@pytest.mark.parametrize("singly", [False, True])
def test_a_look_up_says_what_exists_in_front_of_a_gap_or_singly_all_of_it(singly: bool) -> None:
    storage, host = Telling(), np.zeros((5, BLOCK), np.uint8)
    keys = [key(index) for index in range(5)]
    jobs = StorageJobs(storage, host)
    kept = keys[:2] + keys[3:4]
    for number, (action, names, blocks) in enumerate(
        [
            (StorageAction.BACK_UP, kept, range(3)),
            (StorageAction.FETCH, kept, range(3)),
            (StorageAction.LOOK_UP, keys, ()),
        ]
    ):
        jobs.begin(StorageJob(number, action, b"".join(names), np.array(blocks, np.int64), singly=singly))
        jobs._running[number].future.result()  # look-ups, reads and writes have threads of their own
    found = {job.job_id: job.found for job in jobs.poll()}
    storage.close()
    assert found == {0: None, 1: None, 2: 0b01011 if singly else 0b00011}
    assert storage.told == [("write", singly), ("read", singly)]


def test_a_job_took_until_storage_was_done_and_not_until_somebody_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [10.0]
    monkeypatch.setattr(jobs_module.time, "perf_counter", lambda: seconds[0])
    held = HeldStorage()
    held.hold = True
    jobs = StorageJobs(held, np.zeros((1, BLOCK), np.uint8))
    jobs.begin(StorageJob(1, StorageAction.LOOK_UP, key(0), np.array([], np.int64)))
    seconds[0] = 12.0
    assert jobs.poll() == []
    held.release()
    seconds[0] = 60.0  # of a worker whose step was long
    (ended,) = jobs.poll()
    assert ended.seconds == 2.0
