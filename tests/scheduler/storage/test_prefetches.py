"""What is on its way from storage, and how much of the host it may take."""

from __future__ import annotations

from kv_connector.types import StorageAction
from tests.scheduler.storage.test_companion import PROMPT, arrive, fetch, make_half, matched, prompt, report, step
from tests.scheduler.test_half import Asked


def test_what_was_fetched_leaves_its_share_to_the_next() -> None:
    """Else a host that has fetched its share once fetches nothing any more."""
    half, _, _ = make_half(num_host_blocks=20)
    for number in range(4):
        request = Asked(f"r{number}", prompt(number))
        jobs = fetch(half, request)
        assert sum(job.num_blocks for job in jobs) == 10, number
        report(half, jobs)
        half.request_finished(request)


def test_a_request_that_waits_at_a_reset_is_looked_up_anew() -> None:
    """What was found of it has another name from then on, and the host has nothing of it any more."""
    half, _, _ = make_half()
    request = Asked("waits", PROMPT)
    before = arrive(half, request)
    half.reset_cache()
    assert matched(half, request) is None
    (after,) = step(half)
    assert (after.action, after.num_blocks) == (StorageAction.LOOK_UP, 0)
    assert len(after.split_keys()) == 10
    assert not set(before.split_keys()) & set(after.split_keys())
