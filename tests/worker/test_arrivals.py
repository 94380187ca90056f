"""What a rank tells of loads and receives: keyed by job and admission, since request ids come again."""

from __future__ import annotations

import numpy as np
import pytest

from kv_connector.types import CopyJob, Direction, PeerAction, PeerJob
from kv_connector.worker.arrivals import Arrivals


def load(job_id: int, admission: int, first: int = 0, request_id: str | None = "r") -> CopyJob:
    ids = np.arange(first, first + 2)
    return CopyJob(job_id, Direction.LOAD, ids, ids, request_id, admission=admission)


def test_a_job_of_an_ended_request_says_nothing_of_the_one_with_its_id() -> None:
    arrivals = Arrivals(fails_by_request=True)
    arrivals.begin([load(1, admission=1), load(2, admission=2, first=10)])
    assert not arrivals.end(1, ok=False)
    assert arrivals.take_finished() == ({"r"}, {"r"})
    arrivals.announce([2])
    assert arrivals.take_finished() == ({"r"}, set())
    assert not arrivals.end(2, ok=True)
    assert arrivals.take_finished() == (set(), set()), "it was told before"


def test_a_request_is_received_when_the_last_job_of_its_admission_has_ended() -> None:
    arrivals = Arrivals(fails_by_request=True)
    receive = PeerJob(2, PeerAction.RECEIVE, "t", 0, np.arange(2, 4), request_id="r", admission=1)
    arrivals.begin([load(1, admission=1), receive])
    arrivals.end(1, ok=False)
    assert arrivals.take_finished() == (set(), set())
    arrivals.end(2, ok=True)
    assert arrivals.take_finished() == ({"r"}, {"r"})
    assert len(arrivals) == 0


@pytest.mark.parametrize("fails_by_request", [True, False])
def test_only_what_steps_may_have_read_casts_doubt_on_them(fails_by_request: bool) -> None:
    arrivals = Arrivals(fails_by_request)
    arrivals.begin([load(1, 0, 0, None), load(2, 1, 10, "waits"), load(3, 2, 20, "announced")])
    arrivals.announce([3])
    told = []
    for job_id in (2, 1, 3):  # each by itself: what one of them says is not the other's
        told.append((arrivals.end(job_id, ok=False), *arrivals.take_invalid_blocks()))
    waits = (False, set() if fails_by_request else {10, 11}, False)
    assert told == [waits, (True, {0, 1}, True), (True, {20, 21}, True)]
    assert arrivals.take_invalid_blocks() == (set(), False)
    assert not arrivals.end(3, ok=False), "it has ended"
