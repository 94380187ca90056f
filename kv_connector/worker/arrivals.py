"""Loads and receives into device blocks on one rank: in flight, announced, failed (layer 2).

Everything is keyed by job, and what a request waits for by the number of its admission: ids come again, and what the
one before was waiting for is nothing to the next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from ..types import CopyJob, PeerJob


@dataclass(slots=True)
class _Wait:
    """What one admission of a request waits for."""

    request_id: str
    job_ids: set[int] = field(default_factory=set)  # under way
    lost: set[int] = field(default_factory=set)  # device blocks of those that failed
    is_announced: bool = False  # the engine believes it received, and may have used it


class Arrivals:
    """`fails_by_request`: what failed in the background is told by request; else by block, as loads of a step are."""

    def __init__(self, fails_by_request: bool) -> None:
        self._fails_by_request = fails_by_request
        self._jobs: dict[int, CopyJob | PeerJob] = {}  # under way
        self._waits: dict[tuple[str, int], _Wait] = {}  # by request and admission
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self.invalid_blocks: set[int] = set()  # device blocks that hold what nobody may use, and that were not taken
        self._has_failed_in_step = False

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._jobs

    def begin(self, jobs: Iterable[CopyJob | PeerJob]) -> None:
        """These jobs are planned."""
        for job in jobs:
            self._jobs[job.job_id] = job
            if job.request_id is not None:
                wait = self._waits.setdefault((job.request_id, job.admission), _Wait(job.request_id))
                wait.job_ids.add(job.job_id)

    def announce(self, job_ids: Iterable[int]) -> None:
        """Call requests received whose load the plan says will end soon; one that has ended is received anyway."""
        for job_id in job_ids:
            job = self._jobs.get(job_id)
            if job is None or job.request_id is None:
                continue
            wait = self._waits[job.request_id, job.admission]
            if not wait.is_announced:
                wait.is_announced = True
                self._received.add(wait.request_id)

    def end(self, job_id: int, ok: bool) -> bool:
        """A job has ended on this rank; returns whether steps may have computed on bytes that never came."""
        job = self._jobs.pop(job_id, None)
        if job is None:
            return False
        device_ids = () if ok else job.device_ids.tolist()
        if job.request_id is None:
            self.invalid_blocks.update(device_ids)
            self._has_failed_in_step |= not ok
            return not ok
        wait = self._waits[job.request_id, job.admission]
        wait.job_ids.discard(job_id)
        wait.lost.update(device_ids)
        if not wait.job_ids:
            del self._waits[job.request_id, job.admission]
            self._end_wait(wait)
        return not ok and wait.is_announced

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Requests that are received since the last call, and those of them whose load failed."""
        finished = self._received, self._failed
        self._received, self._failed = set(), set()
        return finished

    def take_invalid_blocks(self) -> tuple[set[int], bool]:
        """Device blocks that hold what nobody may use, since the last call, and whether steps were to read some."""
        invalid = self.invalid_blocks, self._has_failed_in_step
        self.invalid_blocks, self._has_failed_in_step = set(), False
        return invalid

    def open_jobs(self) -> Collection[int]:
        """Jobs under way."""
        return self._jobs.keys()

    def _end_wait(self, wait: _Wait) -> None:
        if not wait.is_announced:
            self._received.add(wait.request_id)
            if wait.lost and self._fails_by_request:
                self._failed.add(wait.request_id)
                return
        self.invalid_blocks |= wait.lost
        self._has_failed_in_step |= wait.is_announced and bool(wait.lost)
