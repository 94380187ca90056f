"""Blocks between host memory and storage (layer 1): what is looked up, and fetched before it is needed.

    a request arrives --LOOK_UP--> every rank says how much of its prefix it has; the shortest counts
                      --FETCH----> into host blocks that are matchable once they are filled, like any other hit
    a block is due    --BACK_UP--> its host block is leased until every rank has written it (`backups.py`)

Storage is read by name and its content is not tracked: what is gone by the time it is read is a miss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .backups import BackupPlanner
from .base import Request
from .config import Prefetch, StorageConfig
from .index import CacheTier, Event, GroupedTree, adopt_hash
from .jobs import EndedJob, JobLedger
from .loads import LoadPlanner, Rate
from .metrics import DOCUMENTATION, GAUGES, CacheMetrics
from .types import BlockHash, StorageAction, StorageJob

_FETCH_BLOCKS = 64
"""In one job: what fails, fails with its job, and what has come can be loaded while the rest is on its way."""
_MOST_SKIPPED = 8
"""Prefixes computed in a row, after which one is fetched all the same: else its rate would never change again."""


_STALL_SECONDS = 2.0
"""Without any answer to what is asked of storage: the slowest disk reads a job's blocks in less."""

logger = logging.getLogger("kv_connector.scheduler")


class _Answers:
    """Whether storage answers at all: a disk or a network that hangs must not hang every request with it."""

    def __init__(self) -> None:
        self._num_asked = 0  # jobs under way
        self._last = 0.0  # when one ended, or the first was begun
        self._is_told = False  # of the silence that goes on

    def asked(self, num_jobs: int, now: float) -> None:
        """Jobs that read are begun."""
        if not self._num_asked:
            self._last = now
        self._num_asked += num_jobs

    def answered(self, now: float) -> None:
        """One of them has ended, one way or the other."""
        self._num_asked -= 1
        self._last = now
        self._is_told = False

    def are_late(self, now: float) -> bool:
        """Whether nothing has been heard for so long that nothing is to be waited for."""
        if not self._num_asked or now - self._last < _STALL_SECONDS:
            return False
        if not self._is_told:
            self._is_told = True
            logger.warning("storage has not answered for %.0f s: no request waits for it until it does", _STALL_SECONDS)
        return True


@dataclass(slots=True)
class _Prefetch:
    """What storage has of a request that was seen and not admitted."""

    request: Request
    first: int  # blocks that are looked up: from here
    stop: int  # to here
    deadline: float
    jobs: dict[int, list[int]] = field(default_factory=dict)  # under way, and the blocks of the prefix they fetch
    fetched: set[int] = field(default_factory=set)  # blocks of the prefix that have come
    is_planned: bool = False

    @property
    def is_done(self) -> bool:
        return self.is_planned and not self.jobs


class StoragePlanner:
    """Follows prefetches. The caller puts `plan` into every step and hands every ended job to `end`.

    `backups` is told what arrives on the host, and planned behind all that is fetched.
    """

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
        self._config = config
        self._root = root
        self._tree = grouped.tree
        self._host = host
        self._jobs = jobs
        self._loads = loads
        self._metrics = metrics
        self._clock = clock
        self._block_size = block_size
        self._prefetches: dict[str, _Prefetch] = {}
        self._of_job: dict[int, _Prefetch] = {}
        self._fetches: list[StorageJob] = []  # to be planned
        self._answers = _Answers()
        self._rate = Rate()  # of fetching, in blocks a second
        self._fetching: tuple[int, float, int] = (0, 0.0, 0)  # jobs under way, since when, blocks of them and before
        self._num_skipped = 0
        self._counters: dict[int, dict[str, float]] = {}  # by rank

    def arrived(self, request: Request, num_blocks: int) -> None:
        """A request whose first `num_blocks` blocks may be hit. What the host does not hold is looked up, once."""
        if request.request_id in self._prefetches:
            return
        path = self._tree.match(request.block_hashes[:num_blocks])
        absent = self._host.absent(path)
        first, stop = absent[0] if absent else len(path), min(num_blocks, len(request.block_hashes))
        now = self._clock()
        is_pointless = first >= stop or self._answers.are_late(now)
        deadline = now + self._config.timeout_ms / 1e3
        self._prefetches[request.request_id] = _Prefetch(request, first, stop, deadline, is_planned=is_pointless)

    def is_awaited(self, request_id: str) -> bool:
        """Whether the request should wait for what is on its way from storage."""
        prefetch = self._prefetches.get(request_id)
        if prefetch is None or prefetch.is_done or self._config.prefetch is Prefetch.BEST_EFFORT:
            return False
        now = self._clock()
        if self._answers.are_late(now):
            return False
        return self._config.prefetch is Prefetch.WAIT_COMPLETE or now < prefetch.deadline

    def admitted(self, request_id: str, first: int, num_blocks: int) -> None:
        """The request was admitted, with a hit on the host of `num_blocks` blocks from `first` on. Jobs under way go
        on: what they bring stays on the host."""
        prefetch = self._prefetches.pop(request_id, None)
        if prefetch is not None:
            num_fetched = len(prefetch.fetched.intersection(range(first, first + num_blocks)))
            self._metrics.storage_hit_tokens += num_fetched * self._block_size

    def finished(self, request: Request) -> None:
        """The request has ended, before it was admitted or after."""
        self._prefetches.pop(request.request_id, None)
        if self.backups.follows_requests:
            nodes = self._tree.match(request.block_hashes)
            absent = set(self._host.absent(nodes))
            self.backups.finished(self._host.blocks_of(n for i, n in enumerate(nodes) if i not in absent))

    @property
    def is_busy(self) -> bool:
        """Whether something waits for the next plan."""
        waits = any(not prefetch.is_planned for prefetch in self._prefetches.values())
        return waits or bool(self._fetches) or self.backups.is_busy

    def plan(self) -> tuple[StorageJob, ...]:
        """Jobs that begin in this step: look-ups and fetches before backups."""
        jobs = [self._look_up(prefetch) for prefetch in self._prefetches.values() if not prefetch.is_planned]
        fetches, self._fetches = self._fetches, []
        now = self._clock()
        self._answers.asked(len(jobs) + len(fetches), now)
        if fetches:
            under_way, since, num_blocks = self._fetching
            begin = since if under_way else now
            self._fetching = under_way + len(fetches), begin, num_blocks + sum(job.num_blocks for job in fetches)
        return (*jobs, *fetches, *self.backups.plan())

    def end(self, ended: EndedJob) -> None:
        """A storage job was reported by every rank."""
        job = ended.job
        assert isinstance(job, StorageJob)
        prefetch = self._of_job.pop(job.job_id, None)
        blocks = prefetch.jobs.pop(job.job_id) if prefetch is not None else []
        if job.action is not StorageAction.BACK_UP:
            self._answers.answered(self._clock())
        if job.action is StorageAction.LOOK_UP:
            assert prefetch is not None
            self._end_look_up(prefetch, ended.found)
        elif job.action is StorageAction.FETCH:
            assert prefetch is not None
            prefetch.fetched.update(blocks if ended.ok else ())
            self._end_fetch(job, ended.ok)
        else:
            self.backups.end(job, ended.ok)

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
        self._prefetches.clear()
        self.backups.reset()

    def _keys(self, hashes: Sequence[BlockHash]) -> bytes:
        return b"".join(adopt_hash(self._root, block_hash) for block_hash in hashes)

    def _look_up(self, prefetch: _Prefetch) -> StorageJob:
        prefetch.is_planned = True
        hashes = prefetch.request.block_hashes[prefetch.first : prefetch.stop]
        job = self._jobs.open_storage(StorageAction.LOOK_UP, self._keys(hashes), ())
        self._follow(job, prefetch, [])
        return job

    def _follow(self, job: StorageJob, prefetch: _Prefetch, blocks: list[int]) -> None:
        prefetch.jobs[job.job_id] = blocks
        self._of_job[job.job_id] = prefetch

    def _end_look_up(self, prefetch: _Prefetch, num_found: int) -> None:
        request, now = prefetch.request, self._clock()
        if not num_found or self._prefetches.get(request.request_id) is not prefetch:
            return
        if self._is_sooner_computed(num_found):
            return
        hashes = request.block_hashes[: prefetch.first + num_found]
        room = self._host.allocate_behind(num_found, hashes, now)
        nodes = self._tree.insert_path(hashes, now, prefetch.first)
        wanted = self._host.absent(nodes)[: len(room)]
        self._host.release(room[len(wanted) :])
        self._metrics.dropped_fetches_blocks += num_found - len(room)
        for start in range(0, len(wanted), _FETCH_BLOCKS):
            part = wanted[start : start + _FETCH_BLOCKS]
            job = self._fetch([nodes[i] for i in part], room[start : start + len(part)])
            self._follow(job, prefetch, [prefetch.first + i for i in part])
        self._tree.settle(nodes)

    def _is_sooner_computed(self, num_blocks: int) -> bool:
        """Whether the model is estimated to be sooner than storage. What is not known yet is fetched."""
        fetch, compute = self._rate.seconds(num_blocks), self._loads.recompute_seconds(num_blocks * self._block_size)
        if fetch is None or compute is None or fetch <= compute or self._num_skipped >= _MOST_SKIPPED:
            self._num_skipped = 0
            return False
        self._num_skipped += 1
        self._metrics.recomputed_storage_tokens += num_blocks * self._block_size
        return True

    def _fetch(self, nodes: list[int], host_ids: list[int]) -> StorageJob:
        self._host.attach(host_ids, nodes, Event.FETCH)
        keys = self._keys([self._tree.hash_of(node) for node in nodes])
        job = self._jobs.open_storage(StorageAction.FETCH, keys, host_ids)
        self._fetches.append(job)
        return job

    def _end_fetch(self, job: StorageJob, ok: bool) -> None:
        host_ids = job.host_ids.tolist()
        under_way, since, num_blocks = self._fetching
        self._fetching = under_way - 1, since, num_blocks
        if under_way == 1:
            self._rate.observe(num_blocks, self._clock() - since)
            self._fetching = 0, 0.0, 0
        if ok:
            self.backups.fetched(host_ids)
            self._metrics.fetched_blocks += len(self._host.fill(host_ids))
        else:
            self._metrics.failed_fetch_jobs += 1
            self._host.discard(host_ids)
        self._host.release(host_ids)
