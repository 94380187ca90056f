"""Which requests wait for which storage job, and which jobs are cancelled when none waits any more."""

from __future__ import annotations

from .prefetching import Prefetching


class Followers:
    """Keeps for every job under way the prefetches that wait for it, and tells once of a job that the last has left."""

    def __init__(self) -> None:
        self._followers: dict[int, list[Prefetching]] = {}  # by job under way
        self._cancelled: set[int] = set()  # jobs that nobody follows
        self._untold: list[int] = []  # those of them that are to be planned

    @property
    def has_untold(self) -> bool:
        """Whether jobs are to be called off in the next plan."""
        return bool(self._untold)

    def take_cancelled(self) -> tuple[int, ...]:
        """Jobs to be called off in this step, planned in this one or before."""
        untold, self._untold = self._untold, []
        return tuple(untold)

    def follow(self, job_id: int, prefetch: Prefetching, hashes: set[int]) -> None:
        """The prefetch waits for the job, which brings it the tokens of these hashes."""
        prefetch.jobs[job_id] = hashes
        self._followers.setdefault(job_id, []).append(prefetch)

    def coalesce(self, job_id: int, prefetch: Prefetching) -> None:
        """The prefetch waits for a job that was begun for others, or for nobody any more. Where ranks were told to call
        it off, whoever waits looks up once more."""
        self.follow(job_id, prefetch, set())
        prefetch.coalesced.add(job_id)
        if job_id in self._untold:
            self._untold.remove(job_id)
            self._cancelled.discard(job_id)

    def leave(self, prefetch: Prefetching) -> None:
        """The prefetch waits for its jobs no more; those that nobody else follows are called off."""
        for job_id in prefetch.jobs:
            followers = self._followers[job_id]
            followers.remove(prefetch)
            if not followers and job_id not in self._cancelled:
                self._cancelled.add(job_id)
                self._untold.append(job_id)
        prefetch.jobs.clear()
        prefetch.look_ups.clear()
        prefetch.coalesced.clear()

    def ended(self, job_id: int) -> tuple[list[Prefetching], bool]:
        """Who has waited for the job to its end, and whether it was called off."""
        was_cancelled = job_id in self._cancelled
        self._cancelled.discard(job_id)
        return self._followers.pop(job_id, []), was_cancelled

    def abandon(self, job_id: int) -> None:
        """Nobody waits any more for a job that may never end."""
        for prefetch in self._followers.pop(job_id, []):
            del prefetch.jobs[job_id]
