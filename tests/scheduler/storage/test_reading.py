"""What is learned of storage's speed where some of what it is asked is never answered."""

from __future__ import annotations

import numpy as np
import pytest

from kv_connector.scheduler.storage.reading import LOST_SECONDS, Reading
from kv_connector.types import StorageAction, StorageJob


def fetch(job_id: int, num_blocks: int) -> StorageJob:
    return StorageJob(job_id, StorageAction.FETCH, b"", np.arange(num_blocks, dtype=np.int64))


def test_a_fetch_that_is_lost_does_not_end_what_is_learned() -> None:
    reading, lost = Reading(), fetch(1, 8)
    reading.begun([lost], 0.0)
    (job_id,) = reading.lost(LOST_SECONDS)
    reading.forget(job_id, LOST_SECONDS)
    reading.begun([fetch(2, 10)], 100.0)
    reading.ended(fetch(2, 10), True, 102.0)
    assert reading.rate.value == 5.0
    reading.ended(lost, True, 200.0)
    assert reading.rate.value == 5.0, "it took as long as it was not waited for"


@pytest.mark.parametrize("was_read", [True, False])
def test_what_is_under_way_beside_one_that_is_lost_says_nothing(was_read: bool) -> None:
    """How long it took would be counted from the middle of it."""
    reading = Reading()
    reading.begun([fetch(1, 8)], 0.0)
    reading.begun([fetch(2, 1000)], LOST_SECONDS - 1.0)
    reading.forget(1, LOST_SECONDS)
    reading.ended(fetch(2, 1000), was_read, LOST_SECONDS + 0.001)
    assert reading.rate.value == 0.0


def test_what_is_called_off_behind_one_that_is_lost_takes_nothing_from_what_is_learned() -> None:
    reading = Reading()
    reading.begun([fetch(1, 8), fetch(2, 6)], 0.0)
    reading.forget(1, LOST_SECONDS)
    reading.begun([fetch(3, 10)], LOST_SECONDS)
    reading.ended(fetch(2, 6), False, LOST_SECONDS + 1.0)
    reading.ended(fetch(3, 10), True, LOST_SECONDS + 2.0)
    assert reading.rate.value == 5.0


def test_what_is_called_off_counts_for_nothing_in_what_is_learned() -> None:
    reading = Reading()
    reading.begun([fetch(1, 10), fetch(2, 1000)], 0.0)
    reading.ended(fetch(2, 1000), False, 1.0)
    reading.ended(fetch(1, 10), True, 2.0)
    assert reading.rate.value == 5.0


def test_time_in_which_storage_is_asked_nothing_is_no_silence() -> None:
    """A client hangs up at once, every ten seconds: nothing was under way in between."""
    reading = Reading()
    for job_id in range(100):
        reading.begun([fetch(job_id, 1)], 10.0 * job_id)
        assert not reading.hangs(10.0 * job_id)
        reading.ended(fetch(job_id, 1), False, 10.0 * job_id)
