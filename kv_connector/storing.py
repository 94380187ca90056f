"""Blocks between host memory and storage (layer 1): what is looked up, fetched before it is needed, and backed up.

    a request arrives --LOOK_UP--> every rank says how much of its prefix it has; the shortest counts
                      --FETCH----> into host blocks that are matchable once they are filled, like any other hit
    a save arrives    --BACK_UP--> its host blocks are leased until every rank has written them

Storage is read by name and its content is not tracked: what is gone by the time it is read is a miss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .base import Request
from .config import Prefetch, StorageConfig
from .index import BlockState, CacheTier, Event, GroupedTree, adopt_hash
from .jobs import EndedJob, JobLedger
from .metrics import CacheMetrics
from .types import BlockHash, StorageAction, StorageJob

_FETCH_BLOCKS = 64
"""In one job: what fails, fails with its job, and what has come can be loaded while the rest is on its way."""
_BACK_UP_BLOCKS = 256
_BACK_UP_JOBS = 2
"""At a time: enough to keep the disk busy while the next one is planned."""


@dataclass(slots=True)
class _Prefetch:
    """What storage has of a request that was seen and not admitted."""

    request: Request
    first: int  # blocks that are looked up: from here
    stop: int  # to here
    deadline: float
    jobs: set[int] = field(default_factory=set)  # under way
    is_planned: bool = False

    @property
    def is_done(self) -> bool:
        return self.is_planned and not self.jobs


class StoragePlanner:
    """Follows prefetches and backups. The caller puts `plan` into every step and hands every ended job to `end`."""

    def __init__(
        self,
        config: StorageConfig,
        root: BlockHash,
        grouped: GroupedTree,
        host: CacheTier,
        jobs: JobLedger,
        metrics: CacheMetrics,
        clock: Callable[[], float],
    ) -> None:
        """`root` is hashed into every key: it stands for whatever the engine's own hashes leave out."""
        self._config = config
        self._root = root
        self._tree = grouped.tree
        self._host = host
        self._jobs = jobs
        self._metrics = metrics
        self._clock = clock
        self._prefetches: dict[str, _Prefetch] = {}
        self._of_job: dict[int, _Prefetch] = {}
        self._fetches: list[StorageJob] = []  # to be planned
        self._waiting: deque[int] = deque()  # leased host blocks to be backed up
        self._num_backups = 0  # jobs under way
        self._num_blocks = 0  # that wait or are written

    def arrived(self, request: Request, num_blocks: int) -> None:
        """A request whose first `num_blocks` blocks may be hit. What the host does not hold is looked up, once."""
        if request.request_id in self._prefetches:
            return
        path = self._tree.match(request.block_hashes[:num_blocks])
        absent = self._host.absent(path)
        first, stop = absent[0] if absent else len(path), min(num_blocks, len(request.block_hashes))
        deadline = self._clock() + self._config.timeout_ms / 1e3
        self._prefetches[request.request_id] = _Prefetch(request, first, stop, deadline, is_planned=first >= stop)

    def is_awaited(self, request_id: str) -> bool:
        """Whether the request should wait for what is on its way from storage."""
        prefetch = self._prefetches.get(request_id)
        if prefetch is None or prefetch.is_done or self._config.prefetch is Prefetch.BEST_EFFORT:
            return False
        return self._config.prefetch is Prefetch.WAIT_COMPLETE or self._clock() < prefetch.deadline

    def forget(self, request_id: str) -> None:
        """The request was admitted or is gone. Jobs under way go on: what they bring stays on the host."""
        self._prefetches.pop(request_id, None)

    def saved(self, host_ids: Sequence[int]) -> None:
        """Host blocks were filled by a save: they are to be backed up, as far as the queue is not full."""
        room = max(0, self._config.max_backup_blocks - self._num_blocks)
        self._metrics.dropped_backups_blocks += max(0, len(host_ids) - room)
        taken = list(host_ids)[:room]
        self._host.acquire(taken)
        self._waiting.extend(taken)
        self._num_blocks += len(taken)

    @property
    def is_busy(self) -> bool:
        """Whether something waits for the next plan."""
        return bool(self._waiting or self._fetches) or any(not p.is_planned for p in self._prefetches.values())

    def plan(self) -> tuple[StorageJob, ...]:
        """Jobs that begin in this step: look-ups and fetches before backups."""
        jobs = [self._look_up(prefetch) for prefetch in self._prefetches.values() if not prefetch.is_planned]
        jobs += self._fetches
        self._fetches = []
        while self._waiting and self._num_backups < _BACK_UP_JOBS:
            host_ids = [self._waiting.popleft() for _ in range(min(_BACK_UP_BLOCKS, len(self._waiting)))]
            jobs += self._back_up(host_ids)
        return tuple(jobs)

    def end(self, ended: EndedJob) -> None:
        """A storage job was reported by every rank."""
        job = ended.job
        assert isinstance(job, StorageJob)
        prefetch = self._of_job.pop(job.job_id, None)
        if prefetch is not None:
            prefetch.jobs.discard(job.job_id)
        if job.action is StorageAction.LOOK_UP:
            assert prefetch is not None
            self._end_look_up(prefetch, ended.found)
        elif job.action is StorageAction.FETCH:
            self._end_fetch(job, ended.ok)
        else:
            self._num_backups -= 1
            self._num_blocks -= job.num_blocks
            self._metrics.backed_up_blocks += job.num_blocks if ended.ok else 0
            self._metrics.failed_backup_jobs += not ended.ok
            self._host.release(job.host_ids.tolist())

    def reset(self) -> None:
        """What was cached until now must not be matched any more: keys of before are none of after."""
        self._root = adopt_hash(self._root, b"reset" + np.random.default_rng().bytes(16))
        self._prefetches.clear()

    def _keys(self, hashes: Sequence[BlockHash]) -> bytes:
        return b"".join(adopt_hash(self._root, block_hash) for block_hash in hashes)

    def _look_up(self, prefetch: _Prefetch) -> StorageJob:
        prefetch.is_planned = True
        hashes = prefetch.request.block_hashes[prefetch.first : prefetch.stop]
        job = self._jobs.open_storage(StorageAction.LOOK_UP, self._keys(hashes), ())
        self._follow(job, prefetch)
        return job

    def _follow(self, job: StorageJob, prefetch: _Prefetch) -> None:
        prefetch.jobs.add(job.job_id)
        self._of_job[job.job_id] = prefetch

    def _back_up(self, host_ids: list[int]) -> list[StorageJob]:
        """One job; none where a reset has taken all of the blocks."""
        live = [b for b in host_ids if self._host.state(b) is BlockState.RESIDENT]
        gone = [b for b in host_ids if self._host.state(b) is not BlockState.RESIDENT]
        self._host.release(gone)
        self._num_blocks -= len(gone)
        if not live:
            return []
        self._num_backups += 1
        return [self._jobs.open_storage(StorageAction.BACK_UP, self._keys(self._host.hashes_of(live)), live)]

    def _end_look_up(self, prefetch: _Prefetch, num_found: int) -> None:
        request, now = prefetch.request, self._clock()
        if not num_found or self._prefetches.get(request.request_id) is not prefetch:
            return
        hashes = request.block_hashes[: prefetch.first + num_found]
        room = self._host.allocate_behind(num_found, hashes, now)
        nodes = self._tree.insert_path(hashes, now, prefetch.first)
        wanted = self._host.absent(nodes)[: len(room)]
        self._host.release(room[len(wanted) :])
        self._metrics.dropped_fetches_blocks += num_found - len(room)
        for start in range(0, len(wanted), _FETCH_BLOCKS):
            part = wanted[start : start + _FETCH_BLOCKS]
            self._fetch(prefetch, [nodes[i] for i in part], room[start : start + len(part)])
        self._tree.settle(nodes)

    def _fetch(self, prefetch: _Prefetch, nodes: list[int], host_ids: list[int]) -> None:
        self._host.attach(host_ids, nodes, Event.FETCH)
        keys = self._keys([self._tree.hash_of(node) for node in nodes])
        job = self._jobs.open_storage(StorageAction.FETCH, keys, host_ids)
        self._follow(job, prefetch)
        self._fetches.append(job)

    def _end_fetch(self, job: StorageJob, ok: bool) -> None:
        host_ids = job.host_ids.tolist()
        if ok:
            self._metrics.fetched_blocks += len(self._host.fill(host_ids))
        else:
            self._metrics.failed_fetch_jobs += 1
            self._host.discard(host_ids)
        self._host.release(host_ids)
