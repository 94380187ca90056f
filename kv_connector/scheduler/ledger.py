"""Jobs from their plan to the last rank's report, and the leases they hold meanwhile.

A job knows its owner, the planner that opened it and is told how it ended; this file knows no kind of job. It holds one
reference on every block that the job reads or writes, on both tiers, and lets go of them once the owner has been told.
Histograms and observers hear of every job, and how long it took.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..base import DeviceBlocks
from ..index import CacheTier
from ..types import CopyJob, PeerJob, StepReport, StorageJob
from .observers import Job, JobObserver, JobTimes, Observers


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job that every rank has reported. `ok`: done on all of them. `found`: of a lookup, bit i is set if every rank
    has key i. `missing`: of a done job, the host blocks that some rank has not moved."""

    job: Job
    ok: bool
    found: int = 0
    missing: frozenset[int] = frozenset()


class JobOwner(Protocol):
    """The planner that opens a job. A job's leases are released right after `end` returns."""

    def end(self, ended: EndedJob) -> None:
        """Every rank has reported the job."""


@dataclass(slots=True)
class _OpenJob:
    job: Job
    owner: JobOwner
    waiting_for: set[int]  # ranks that have not reported it
    device_ids: Sequence[int]  # pinned in the engine's pool
    host_ids: Sequence[int]
    opened_at: float
    observers: Sequence[JobObserver]  # who wants to hear of it
    failed: bool = False
    found: int | None = None
    missing: frozenset[int] = frozenset()
    is_forgotten: bool = False  # the request that waited for it has ended


class JobLedger:
    """Issues job ids, holds every job, and owns its leases. Called from the scheduler's thread; `clock` returns
    seconds."""

    def __init__(
        self,
        world_size: int,
        pool: DeviceBlocks,
        host: CacheTier,
        clock: Callable[[], float],
        times: JobTimes,
        observers: Observers,
    ) -> None:
        self._times = times
        self._observers = observers
        self._world_size = world_size
        self._pool = pool
        self._host = host
        self._clock = clock
        self._open: dict[int, _OpenJob] = {}
        self._awaited: Counter[str] = Counter()  # jobs under way, by the request that waits for them
        self._in_vain: set[str] = set()  # requests that have waited for a job that failed
        self._num_pinning = 0  # copies whose device blocks are pinned
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_pinning(self) -> int:
        """Copies between device and host whose device blocks are pinned in the engine's pool."""
        return self._num_pinning

    def is_awaited(self, request_id: str) -> bool:
        """Whether a job is under way that a request of this id waits, or waited, for."""
        return self._awaited[request_id] > 0

    def has_failed(self, request_id: str) -> bool:
        """Whether the request has waited for a job that failed."""
        return request_id in self._in_vain

    def forget(self, request_id: str) -> None:
        """The request has ended, and may do so before the jobs that it waits for."""
        self._in_vain.discard(request_id)
        if self.is_awaited(request_id):
            for entry in self._open.values():
                entry.is_forgotten |= entry.job.request_id == request_id

    def next_id(self) -> int:
        """The number of the next job; numbers never come again."""
        self._next_id += 1
        return self._next_id - 1

    def open(self, job: Job, owner: JobOwner, request_ids: Collection[str] = ()) -> None:
        """Every rank has to report the job from now on. The caller holds a reference on each of its blocks, on both
        tiers, and hands it over. `request_ids` are the requests that it is for, as far as the owner knows."""
        device_ids = job.device_ids.tolist() if not isinstance(job, StorageJob) else ()
        host_ids = job.host_ids.tolist() if not isinstance(job, PeerJob) else ()
        ranks = set(range(self._world_size))
        observers = self._observers.opened(job, request_ids)
        self._open[job.job_id] = _OpenJob(job, owner, ranks, device_ids, host_ids, self._clock(), observers)
        self._num_pinning += isinstance(job, CopyJob) and len(device_ids) > 0
        if job.request_id is not None:
            self._awaited[job.request_id] += 1

    def unpin(self) -> bool:
        """Let go of the device blocks of all copies; returns whether there were any. The next step that writes to a
        block waits for the copies first. What travels between engines stays pinned: an idle engine is idle with it."""
        entries = [entry for entry in self._open.values() if isinstance(entry.job, CopyJob) and entry.device_ids]
        for entry in entries:
            self._pool.free_blocks(entry.device_ids)
            entry.device_ids = ()
        self._num_pinning = 0
        return bool(entries)

    def take_in(self, report: StepReport) -> None:
        """Count one rank's report; jobs end that every rank has reported with it."""
        for job_id in report.failed:
            self._distrust_after(job_id)
        for job_id, seconds in report.job_seconds:
            entry = self._open[job_id]
            self._times.ran(entry.job, seconds)
            for observer in entry.observers:
                observer.ran(entry.job, report.rank, seconds)
        found, missing = dict(report.found), dict(report.missing)
        for job_ids, ok in ((report.done, True), (report.failed, False)):
            for job_id in job_ids:
                self._open[job_id].missing |= frozenset(missing.get(job_id, ()))
                self._reported(job_id, report.rank, ok, found.get(job_id))

    def overdue(self, seconds: float) -> list[tuple[int, tuple[int, ...]]]:
        """Copies between device and host that were opened longer ago than this, and the ranks that owe a report."""
        limit = self._clock() - seconds
        late = [entry for entry in self._open.values() if entry.opened_at < limit and isinstance(entry.job, CopyJob)]
        return [(entry.job.job_id, tuple(sorted(entry.waiting_for))) for entry in late]

    def _reported(self, job_id: int, rank: int, ok: bool, found: int | None) -> None:
        entry = self._open[job_id]
        assert rank in entry.waiting_for, f"rank {rank} reports job {job_id} twice"
        entry.waiting_for.discard(rank)
        entry.failed |= not ok
        if found is not None:
            entry.found = found if entry.found is None else entry.found & found
        if not entry.waiting_for:
            self._end(entry)

    def _end(self, entry: _OpenJob) -> None:
        job = entry.job
        del self._open[job.job_id]
        if job.request_id is not None:
            self._awaited[job.request_id] -= 1
            if not self._awaited[job.request_id]:
                del self._awaited[job.request_id]
            if entry.failed and not entry.is_forgotten:
                self._in_vain.add(job.request_id)
        ended = EndedJob(job, not entry.failed, entry.found or 0, entry.missing)
        entry.owner.end(ended)
        seconds = self._clock() - entry.opened_at
        self._times.ended(ended, seconds)
        for observer in entry.observers:
            observer.ended(ended, seconds)
        if entry.device_ids:
            self._pool.free_blocks(entry.device_ids)
            self._num_pinning -= isinstance(job, CopyJob)
        self._host.release(entry.host_ids)

    def _distrust_after(self, job_id: int) -> None:
        """What was computed since a load that failed may rest on bytes that never came, and an engine that plans ahead
        has had it carried away in steps that it planned before it knew. These jobs run to their end, and have failed.
        """
        job = self._open[job_id].job
        if not (isinstance(job, CopyJob) and job.brings):
            return  # what other engines send is computed on only once it has arrived
        for later_id, entry in self._open.items():
            if later_id > job_id and entry.job.carries_computed:
                entry.failed = True
