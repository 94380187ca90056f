"""Blocks between host memory and storage (layer 1): names, plans and counters of `prefetches.py` and `backups.py`.

Storage is read by name and its content is not tracked: what is gone by the time it is read is a miss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from .backups import BackupPlanner
from .base import Request
from .config import StorageConfig
from .index import CacheTier, GroupedTree, adopt_hash, adopt_hashes
from .jobs import EndedJob, JobLedger
from .loads import LoadPlanner
from .metrics import DOCUMENTATION, GAUGES, CacheMetrics
from .prefetches import PrefetchPlanner
from .types import BlockHash, StorageAction, StorageJob


class StoragePlanner:
    """What the scheduler half knows of storage. It puts `plan` into every step and hands every ended job to `end`."""

    def __init__(
        self,
        config: StorageConfig,
        root: BlockHash,
        grouped: GroupedTree,
        host: CacheTier,
        jobs: JobLedger,
        loads: LoadPlanner,
        metrics: CacheMetrics,
        clock: Callable[[], float],
        block_size: int,
    ) -> None:
        """`root` is hashed into every key: it stands for whatever the engine's own hashes leave out."""
        self.backups = BackupPlanner(config, host, jobs, metrics, self._keys)
        self.prefetches = PrefetchPlanner(
            config, grouped, host, jobs, loads, metrics, clock, block_size, self._keys, self.backups.fetched
        )
        self._root = root
        self._tree = grouped.tree
        self._host = host
        self._counters: dict[int, dict[str, float]] = {}  # by rank

    @property
    def is_busy(self) -> bool:
        """Whether something waits for the next plan."""
        return self.prefetches.is_busy or self.backups.is_busy

    def finished(self, request: Request) -> None:
        """The request has ended, before it was admitted or after."""
        self.prefetches.withdrawn(request.request_id)
        if self.backups.follows_requests:
            nodes = self._tree.match(request.block_hashes)
            absent = set(self._host.absent(nodes))
            self.backups.finished(self._host.blocks_of(n for i, n in enumerate(nodes) if i not in absent))

    def plan(self) -> tuple[tuple[StorageJob, ...], tuple[int, ...]]:
        """Jobs that begin in this step, look-ups and fetches before backups, and jobs that are called off."""
        jobs = (*self.prefetches.plan(), *self.backups.plan())
        return jobs, self.prefetches.take_cancelled()

    def end(self, ended: EndedJob) -> None:
        """A storage job was reported by every rank."""
        job = ended.job
        assert isinstance(job, StorageJob)
        if job.action is StorageAction.BACK_UP:
            self.backups.end(job, ended.ok)
        else:
            self.prefetches.end(job, ended.ok, ended.found)

    def note_counters(self, rank: int, counters: Iterable[tuple[str, float]]) -> None:
        """What a rank's storage has counted since its start."""
        self._counters[rank] = dict(counters)

    def stats(self) -> dict[str, float]:
        """Counters over all ranks, under names that `DOCUMENTATION` has. Gauges are of what ranks may share: the most
        that any of them knows of."""
        stats = {}
        for name in sorted(set().union(*self._counters.values())):
            values = [counters.get(name, 0.0) for counters in self._counters.values()]
            full_name = f"storage_{name}"
            if full_name in DOCUMENTATION:
                stats[full_name] = max(values) if full_name in GAUGES else sum(values)
        return stats

    def reset(self) -> None:
        """What was cached until now must not be matched any more: keys of before are none of after."""
        self._root = adopt_hash(self._root, b"reset" + np.random.default_rng().bytes(16))
        self.prefetches.reset()
        self.backups.reset()

    def _keys(self, hashes: Sequence[BlockHash]) -> bytes:
        return adopt_hashes(self._root, hashes)
