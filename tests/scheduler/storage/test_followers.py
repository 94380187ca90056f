"""Who waits for a job of storage, and which jobs are called off."""

from __future__ import annotations

from typing import Any

from kv_connector.index import PLAIN
from kv_connector.scheduler.storage.followers import Followers
from kv_connector.scheduler.storage.prefetching import Prefetching


def prefetching() -> Prefetching:
    search: Any = None  # nobody looks at it
    return Prefetching((), (), 0, search, 0.0, PLAIN, False)


def test_a_job_that_somebody_waits_for_again_is_called_off_once_all_have_left() -> None:
    """Before the ranks were told that nobody does: they hear of it once."""
    followers, first, second = Followers(), prefetching(), prefetching()
    followers.follow(1, first, {0})
    followers.leave(first)
    followers.coalesce(1, second)
    assert followers.take_cancelled() == ()
    followers.leave(second)
    assert followers.take_cancelled() == (1,)
    assert followers.take_cancelled() == ()
    assert followers.ended(1) == ([], True)
    assert followers.ended(1) == ([], False)


def test_a_job_that_is_waited_for_again_is_none_that_was_called_off() -> None:
    followers, first, second = Followers(), prefetching(), prefetching()
    followers.follow(1, first, {0})
    followers.leave(first)
    followers.coalesce(1, second)
    assert followers.ended(1) == ([second], False)
