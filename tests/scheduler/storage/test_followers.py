"""Who waits for jobs of storage, and which are called off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kv_connector.scheduler.storage.followers import Followers


def prefetch() -> Any:
    """What a request waits for."""
    return SimpleNamespace(jobs={}, look_ups={}, coalesced=set())


def test_a_job_is_called_off_once_when_the_last_who_waits_for_it_leaves() -> None:
    followers, one, other = Followers(), prefetch(), prefetch()
    followers.follow(1, one, {0, 1})
    followers.coalesce(1, other)
    one.look_ups[1] = "a question"
    followers.leave(one)
    assert not (one.jobs or one.look_ups) and not followers.has_untold
    followers.leave(other)
    assert not other.coalesced and followers.has_untold, "the next plan says so"
    assert [followers.take_cancelled() for _ in range(2)] == [(1,), ()]
    assert followers.ended(1) == ([], True)
    assert followers.ended(1) == ([], False), "nothing is kept of it"


def test_a_job_that_is_wanted_again_before_ranks_were_told_is_not_called_off() -> None:
    followers, one, other = Followers(), prefetch(), prefetch()
    followers.follow(1, one, {0})
    followers.leave(one)
    followers.coalesce(1, other)
    assert not followers.has_untold and followers.take_cancelled() == ()
    assert followers.ended(1) == ([other], False), "if it fails, it has failed"


def test_ranks_are_told_once_however_often_a_job_is_wanted_again() -> None:
    followers, one, other = Followers(), prefetch(), prefetch()
    followers.follow(1, one, {0})
    followers.leave(one)
    assert followers.take_cancelled() == (1,)
    followers.coalesce(1, other)
    followers.leave(other)
    assert followers.take_cancelled() == ()
    followers.coalesce(1, one)
    assert followers.ended(1) == ([one], True), "it looks up once more"
