"""Storage jobs of a rank: a job is done where a block of it was moved, and tells of those that were not."""

from __future__ import annotations

import numpy as np
import pytest

from kv_connector.storage.jobs import EndedStorageJob, StorageJobs
from kv_connector.testing.memory import MemoryStorage
from kv_connector.types import StorageAction, StorageJob
from tests.storage.storages import BLOCK, content, key, put


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
    assert jobs.poll() == [EndedStorageJob(1, ok=len(missing) < 2, missing=missing)]
    for index, block_id in enumerate((3, 0)):
        assert host[block_id].tobytes() == (content(keys[index]) if index not in missing else bytes(BLOCK))
