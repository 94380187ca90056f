"""Reads of storage in progress: how fast they are, and whether storage answers at all.

A disk or a network that hangs must not hang every request with it, nor one answer that is lost its request.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ...types import StorageAction, StorageJob
from ..loads.rates import MOST_SKIPPED, Rate

logger = logging.getLogger("kv_connector.scheduler")

STALL_SECONDS = 2.0
"""Without any answer to what is asked of storage: the slowest disk reads a job's blocks in less."""
_LONGEST_LOOK = STALL_SECONDS / 4
"""What counts of the time between two looks: an answer that came while this engine stood still, or was in a long step,
could not be heard."""
LOST_SECONDS = 30.0
"""Without an answer to one job, whatever else is answered: it is not waited for any more."""


class Reading:
    """Lookups and fetches under way. `now` is in seconds and never goes back."""

    def __init__(self) -> None:
        self.rate = Rate()  # of fetching, in blocks a second
        self._asked: dict[int, float] = {}  # jobs under way, the oldest first, and when they were begun
        self._fetches: dict[int, int] = {}  # those of them, and how many blocks of each are counted
        self._num_blocks = 0  # of fetches under way, and of those that ended since the first of them was begun
        self._since = 0.0
        self._silence = 0.0  # seconds since the last answer in which some job was under way
        self._looked = 0.0  # when that was looked at last
        self._is_told = False  # of the silence that goes on
        self._num_skipped = 0  # prefixes, one behind the other, that were sooner computed than fetched

    def begun(self, jobs: Sequence[StorageJob], now: float) -> None:
        """These jobs are planned."""
        fetches = [job for job in jobs if job.action is StorageAction.FETCH]
        if not self._asked:
            self._looked = now  # the silence goes on: what was called off meanwhile has not ended it
        if fetches and not self._fetches:
            self._since, self._num_blocks = now, 0
        self._asked |= {job.job_id: now for job in jobs}
        self._fetches |= {job.job_id: job.num_blocks for job in fetches}
        self._num_blocks += sum(job.num_blocks for job in fetches)

    def ended(self, job: StorageJob, was_answered: bool, now: float) -> None:
        """One of them has ended; `was_answered`: it was not called off before storage began it, which says nothing of
        storage."""
        self._asked.pop(job.job_id, None)
        if was_answered:
            self._silence, self._looked = 0.0, now
            self._is_told = False
        if job.job_id in self._fetches:
            num_counted = self._fetches.pop(job.job_id)
            self._num_blocks -= 0 if was_answered else num_counted
            if not self._fetches and self._num_blocks > 0:
                self.rate.observe(self._num_blocks, now - self._since)

    def hangs(self, now: float) -> bool:
        """Whether nothing has been heard for so long that nothing is to be waited for."""
        if not self._asked:
            return False
        self._silence += min(now - self._looked, _LONGEST_LOOK)
        self._looked = now
        if self._silence < STALL_SECONDS:
            return False
        if not self._is_told:
            self._is_told = True
            logger.warning("storage has not answered for %.0f s: no request waits for it until it does", STALL_SECONDS)
        return True

    def is_slower(self, num_blocks: int, seconds: float | None) -> bool:
        """Whether fetching so many blocks is estimated to take longer than this, which is what computing takes. What is
        not known yet is fetched, and so is a prefix now and then, or nothing new would ever be known."""
        fetch = self.rate.seconds(num_blocks)
        is_slower = fetch is not None and seconds is not None and fetch > seconds and self._num_skipped < MOST_SKIPPED
        self._num_skipped = self._num_skipped + 1 if is_slower else 0
        return is_slower

    def forget(self, job_id: int, now: float) -> None:
        """The job is lost: its answer, if it ever comes, is no measurement, nor is what is fetched beside it now."""
        self._asked.pop(job_id, None)
        if job_id in self._fetches:
            del self._fetches[job_id]
            self._since, self._num_blocks, self._fetches = now, 0, dict.fromkeys(self._fetches, 0)

    def lost(self, now: float) -> list[int]:
        """Jobs that nobody should wait for: they were begun too long ago."""
        lost = []
        for job_id, begun in self._asked.items():
            if now - begun < LOST_SECONDS:
                break
            lost.append(job_id)
        return lost
