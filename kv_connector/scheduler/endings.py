"""The ends of jobs (layer 1): what ranks report is taken in, what a job leased is released, and both are counted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ..base import DeviceBlocks
from ..events import BlockStored, EventLog
from ..index import CacheTier
from ..metrics import CacheMetrics
from ..types import CopyJob, Direction, PeerJob, StepReport, StorageJob, Tier
from .ledger import EndedJob, JobLedger
from .loads.choice import LoadPlanner
from .peers.companion import HandoverPlanner
from .saves.planner import SavePlanner
from .storage.companion import StoragePlanner

logger = logging.getLogger("kv_connector.scheduler")


class JobEnds:
    """Ends jobs of the ledger. `pool` gives the engine's device blocks, which are bound late."""

    def __init__(
        self,
        pool: Callable[[], DeviceBlocks],
        jobs: JobLedger,
        host: CacheTier,
        loads: LoadPlanner,
        saves: SavePlanner,
        storage: StoragePlanner | None,
        handovers: HandoverPlanner | None,
        metrics: CacheMetrics,
        events: EventLog,
    ) -> None:
        self._pool = pool
        self._jobs = jobs
        self._host = host
        self._loads = loads
        self._saves = saves
        self._storage = storage
        self._handovers = handovers
        self._metrics = metrics
        self._events = events
        self._fence = False  # blocks that copies under way use are no longer pinned

    def take_in(self, report: StepReport) -> None:
        """One rank's report: jobs end that every rank has reported with it."""
        metrics, ended = self._metrics, self._jobs.take_in(report)
        for job in ended:
            if isinstance(job.job, StorageJob):
                assert self._storage is not None, "a storage job without storage"
                self._storage.end(job)
            elif isinstance(job.job, PeerJob):
                assert self._handovers is not None, "a peer job without peers"
                self._handovers.end(job.job, job.ok)
                self._pool().free_blocks(job.job.device_ids.tolist())
            elif job.job.direction is Direction.LOAD:
                self._end_load(job, job.job)
                self._release(job, job.job)
            else:
                self._end_save(job, job.job)
                self._release(job, job.job)
        if self._storage is not None and report.storage_counters:
            self._storage.note_counters(report.rank, report.storage_counters)
        if self._handovers is not None:
            self._handovers.note_report(report.rank, report.peer_port, report.peer_counters)
        metrics.loaded_bytes += report.loaded_bytes
        metrics.saved_bytes += report.saved_bytes
        metrics.load_milliseconds += report.load_milliseconds
        metrics.exposed_wait_milliseconds += sum(sum(timing.exposed_wait_ms) for timing in report.load_timings)
        if loaded := _num_loaded(ended):
            self._loads.observe(loaded, report.load_milliseconds / 1e3)

    def unpin(self) -> None:
        """No request is left, and an idle engine may not step again: nothing of its cache stays pinned.

        What the copies under way read and write is guarded by the next step, which waits for them first.
        """
        jobs = self._jobs.unpin()
        self._fence |= bool(jobs)
        for job in jobs:
            self._pool().free_blocks(job.device_ids.tolist())

    def take_fence(self, overwrites: bool) -> bool:
        """Whether the step being planned has to wait for the copies under way. One that `overwrites` nothing, neither
        computing nor loading, leaves the wait to the next."""
        fence = self._fence and overwrites
        self._fence &= not fence
        return fence

    def _end_load(self, ended: EndedJob, job: CopyJob) -> None:
        if job.request_id is not None:
            self._loads.end(job)
        if ended.ok:
            self._metrics.loaded_blocks += job.num_blocks
            return
        self._metrics.failed_load_jobs += 1
        self._host.discard(job.host_ids.tolist())  # a second try would fail as well: they are a miss from now on
        logger.warning("load job %d failed: %d blocks will be recomputed", job.job_id, job.num_blocks)

    def _end_save(self, ended: EndedJob, job: CopyJob) -> None:
        host_ids = job.host_ids.tolist()
        if not ended.ok:
            self._metrics.failed_save_jobs += 1
            self._host.discard(host_ids)
            self._saves.may_save_before_reuse = False  # an idle engine does not try again and again
            logger.warning("save job %d failed: %d blocks stay uncached on the host", job.job_id, job.num_blocks)
            return
        filled = self._host.fill(host_ids)
        self._metrics.saved_blocks += len(filled)
        if filled:
            self._events.add(BlockStored(tuple(self._host.hashes_of(filled)), Tier.HOST))
        if self._storage is not None:
            self._storage.backups.saved(filled)

    def _release(self, ended: EndedJob, job: CopyJob) -> None:
        if ended.pins_device:
            self._pool().free_blocks(job.device_ids.tolist())
        self._host.release(job.host_ids.tolist())


def _num_loaded(ended: Sequence[EndedJob]) -> int:
    jobs = [job.job for job in ended if job.ok and isinstance(job.job, CopyJob)]
    return sum(job.num_blocks for job in jobs if job.direction is Direction.LOAD)
