"""Copy jobs under way, as the scheduler half sees them (layer 1): a job ends when every rank has reported it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..types import CopyJob, Direction, PeerAction, PeerJob, StepReport, StorageAction, StorageJob


@dataclass(slots=True)
class _OpenJob:
    job: CopyJob | StorageJob | PeerJob
    waiting_for: set[int]
    failed: bool = False
    pins_device: bool = True
    found: int | None = None


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job that every rank has reported.

    `ok`: it is done on all of them. `pins_device`: its device blocks are still to be freed. `found`: of a look-up, the
    least that any rank has.
    """

    job: CopyJob | StorageJob | PeerJob
    ok: bool
    pins_device: bool
    found: int = 0


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

    def open_storage(self, action: StorageAction, keys: bytes, host_ids: Sequence[int]) -> StorageJob:
        """As `open`, for a job between host and storage."""
        job = StorageJob(self._next_id, action, keys, np.array(host_ids, dtype=np.int64))
        self._next_id += 1
        self._open[job.job_id] = _OpenJob(job, set(range(self._world_size)), pins_device=False)
        return job

    def open_peer(
        self,
        action: PeerAction,
        transfer_id: str,
        first: int,
        device_ids: Sequence[int],
        names: bytes = b"",
        host: str = "",
        ports: tuple[int, ...] = (),
        engine_id: str = "",
        request_id: str | None = None,
    ) -> PeerJob:
        """As `open`, for a job between two engines. Its device blocks stay pinned while the engine is idle, too: they
        are what the engine is idle with."""
        ids = np.array(device_ids, dtype=np.int64)
        job = PeerJob(self._next_id, action, transfer_id, first, ids, names, host, ports, engine_id, request_id)
        self._next_id += 1
        self._open[job.job_id] = _OpenJob(job, set(range(self._world_size)), pins_device=False)
        return job

    def unpin(self) -> list[CopyJob]:
        """Jobs under way that pinned their device blocks until now; the caller frees these."""
        jobs = []
        for entry in self._open.values():
            if entry.pins_device and isinstance(entry.job, CopyJob):
                entry.pins_device = False
                jobs.append(entry.job)
        return jobs

    def take_in(self, report: StepReport) -> list[EndedJob]:
        """Count one rank's report; returns the jobs that end with it."""
        for job_id in report.failed:
            self._distrust_saves_after(job_id)
        ended = []
        found = dict(report.found)
        for job_id, ok in [(job_id, True) for job_id in report.done] + [(job_id, False) for job_id in report.failed]:
            entry = self._open[job_id]
            assert report.rank in entry.waiting_for, f"rank {report.rank} reports job {job_id} twice"
            entry.waiting_for.discard(report.rank)
            entry.failed |= not ok
            if job_id in found:
                entry.found = found[job_id] if entry.found is None else min(entry.found, found[job_id])
            if not entry.waiting_for:
                del self._open[job_id]
                ended.append(EndedJob(entry.job, not entry.failed, entry.pins_device, entry.found or 0))
        return ended

    def _distrust_saves_after(self, job_id: int) -> None:
        """What was computed since a load that failed may rest on bytes that never came, and an engine that plans ahead
        has had it saved in steps that it planned before it knew. These saves run to their end, and count as failed."""
        job = self._open[job_id].job
        if isinstance(job, CopyJob) and job.direction is Direction.LOAD:
            for later_id, entry in self._open.items():
                if later_id > job_id and isinstance(entry.job, CopyJob) and entry.job.direction is Direction.SAVE:
                    entry.failed = True
