"""The jobs of a transfer engine, from submission to report."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ...errors import InvalidBlockError
from ...types import CopyJob, Direction
from ..memory.host_form import HostForm
from ..memory.host_pool import HostPool
from ..paths.base import Int64s
from .checks import merged_ids, right_jobs
from .submissions import Completion

logger = logging.getLogger("kv_connector.transfer")


class TakenIn(NamedTuple):
    """What is to be copied of jobs that came in: `failed` are the ids of those that were refused; `moving` the jobs
    that have blocks to move; `device_ids` and `host_ids` theirs, one job behind the other, read-only."""

    failed: frozenset[int]
    moving: Sequence[CopyJob]
    device_ids: Int64s
    host_ids: Int64s


class OpenJobs:
    """Takes each job in once, and reports it once: done or failed. One thread makes every call."""

    def __init__(self, form: HostForm, host: HostPool) -> None:
        self._form = form
        self._host = host
        self._finished: list[Completion] = []
        self._unreported: set[int] = set()
        self.is_closed = False

    def take_in(self, direction: Direction, jobs: Sequence[CopyJob]) -> TakenIn:
        """Check jobs that were submitted together; those with wrong block ids, or with none at all, end here.

        Raises InvalidBlockError for a job id that is still to be reported; nothing is taken in then.
        """
        self._take_ids(jobs)
        num_device, num_host = self._form.layout.num_blocks, self._host.num_ready_blocks
        valid = jobs
        if self.is_closed:
            logger.warning("%d %ss failed: the transfer engine is closed", len(jobs), direction.value)
            valid = []
        ids = merged_ids(valid, direction, num_device, num_host)
        if ids is None:
            valid = right_jobs(jobs, direction, num_device, num_host)
            ids = merged_ids(valid, direction, num_device, num_host)
            assert ids is not None, "jobs that are right one by one are right together"
        failed = ids_of(jobs) - ids_of(valid) if len(valid) < len(jobs) else frozenset()
        moving = [job for job in valid if len(job.device_ids)]
        if len(moving) < len(jobs):
            self.end([job for job in jobs if job.job_id in failed], ok=False)
            self.end([job for job in valid if job.num_blocks == 0], ok=True)
        return TakenIn(failed, moving, *ids)

    def end(self, jobs: Sequence[CopyJob], ok: bool, milliseconds: float = 0.0, refused: Collection[int] = ()) -> None:
        """Nothing is copied for these jobs any more; all of them took so long together. The content of host blocks
        that are `refused` did not fit."""
        for job in jobs:
            num_bytes = job.num_blocks * self._form.moved_bytes if ok else 0
            missing = tuple(filter(refused.__contains__, job.host_ids.tolist())) if refused else ()
            self._finished.append(Completion(job.job_id, ok, num_bytes, job.direction, milliseconds, missing))
            milliseconds = 0.0

    def report(self) -> list[Completion]:
        """The jobs that have ended since the last call; their ids may be used again."""
        if not self._finished:
            return []
        finished, self._finished = self._finished, []
        self._unreported.difference_update(completion.job_id for completion in finished)
        return finished

    def close(self) -> None:
        """Jobs that come in from now on fail."""
        self.is_closed = True

    def _take_ids(self, jobs: Sequence[CopyJob]) -> None:
        new = {job.job_id for job in jobs}
        if len(new) < len(jobs) or not new.isdisjoint(self._unreported):
            # Failing it would end the other job of this id, and its leases, while that one's copy runs.
            twice = [job.job_id for i, job in enumerate(jobs) if job.job_id in {other.job_id for other in jobs[:i]}]
            name = next(iter(new & self._unreported), None)
            name = twice[0] if name is None else name
            raise InvalidBlockError(f"job id {name} is in flight: it names one job until that is reported")
        self._unreported |= new


def ids_of(jobs: Sequence[CopyJob]) -> frozenset[int]:
    """Their job ids."""
    return frozenset(job.job_id for job in jobs)
