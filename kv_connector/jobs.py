"""Copy jobs under way, as the scheduler half sees them (layer 1): a job ends when every rank has reported it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .types import CopyJob, Direction, StepReport


@dataclass(slots=True)
class _OpenJob:
    job: CopyJob
    waiting_for: set[int]
    failed: bool = False
    pins_device: bool = True


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job that every rank has reported.

    `ok`: it is done on all of them. `pins_device`: its device blocks are still to be freed.
    """

    job: CopyJob
    ok: bool
    pins_device: bool


class JobLedger:
    """Issues job ids and holds every job from its plan to the last rank's report."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._open: dict[int, _OpenJob] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_pinning(self) -> int:
        """Jobs whose device blocks are pinned in the engine's pool."""
        return sum(entry.pins_device for entry in self._open.values())

    def open(
        self,
        direction: Direction,
        device_ids: Sequence[int],
        host_ids: Sequence[int],
        request_id: str | None = None,
        num_guarded: int = 0,
    ) -> CopyJob:
        """A new job that every rank has to report; its blocks are leased by the caller until then."""
        job = CopyJob(
            job_id=self._next_id,
            direction=direction,
            device_ids=np.array(device_ids, dtype=np.int64),
            host_ids=np.array(host_ids, dtype=np.int64),
            request_id=request_id,
            num_guarded=num_guarded,
        )
        self._next_id += 1
        self._open[job.job_id] = _OpenJob(job, set(range(self._world_size)))
        return job

    def unpin(self) -> list[CopyJob]:
        """Jobs under way that pinned their device blocks until now; the caller frees these."""
        pinning = [entry for entry in self._open.values() if entry.pins_device]
        for entry in pinning:
            entry.pins_device = False
        return [entry.job for entry in pinning]

    def take_in(self, report: StepReport) -> list[EndedJob]:
        """Count one rank's report; returns the jobs that end with it."""
        ended = []
        for job_id, ok in [(job_id, True) for job_id in report.done] + [(job_id, False) for job_id in report.failed]:
            entry = self._open[job_id]
            assert report.rank in entry.waiting_for, f"rank {report.rank} reports job {job_id} twice"
            entry.waiting_for.discard(report.rank)
            entry.failed |= not ok
            if not entry.waiting_for:
                del self._open[job_id]
                ended.append(EndedJob(entry.job, not entry.failed, entry.pins_device))
        return ended
