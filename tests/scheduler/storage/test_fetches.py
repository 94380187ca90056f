"""Host blocks that fetches are to fill, by whom they are brought and for how long they are held."""

from __future__ import annotations

import numpy as np

from kv_connector.scheduler.storage.fetches import Fetches
from kv_connector.types import StorageAction, StorageJob


def fetch(job_id: int, *host_ids: int) -> StorageJob:
    return StorageJob(job_id, StorageAction.FETCH, b"", np.array(host_ids, np.int64))


def test_a_fetch_that_is_abandoned_brings_nothing_any_more_and_holds_its_blocks_to_its_end() -> None:
    """Storage may write to them yet."""
    fetches = Fetches()
    lost, other = fetch(1, 5, 6), fetch(2, 7)
    fetches.begun(lost)
    fetches.begun(other)
    assert fetches.abandon(1) == [5, 6]
    assert [fetches.job_of(host_id) for host_id in (5, 6, 7)] == [None, None, 2]
    assert fetches.num_blocks == 3
    fetches.ended(other)
    assert not fetches.bring_any
    assert fetches.num_blocks == 2
    fetches.ended(lost)
    assert fetches.num_blocks == 0
