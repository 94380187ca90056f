"""What requests that have arrived may find in storage (layer 1): looked up, and fetched before it is needed.

    a request arrives --LOOK_UP--> every rank says how much of its prefix it has; the shortest counts
                      --FETCH----> into host blocks that are matchable once they are filled, like any other hit

A request whose prefix is on its way for another one rides on those jobs. A job that nobody waits for any more is called
off, and is done all the same where it had begun.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .base import Request
from .config import Prefetch, StorageConfig
from .index import CacheTier, Event, GroupedTree
from .jobs import JobLedger
from .loads import MOST_SKIPPED, LoadPlanner, Rate
from .metrics import CacheMetrics
from .types import BlockHash, StorageAction, StorageJob

_FETCH_BLOCKS = 64
"""In one job: what fails, fails with its job, and what has come can be loaded while the rest is on its way."""
_STALL_SECONDS = 2.0
"""Without any answer to what is asked of storage: the slowest disk reads a job's blocks in less."""

logger = logging.getLogger("kv_connector.scheduler")


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


class _Reading:
    """What is asked of storage and not answered: how fast it is, and whether it answers at all.

    A disk or a network that hangs must not hang every request with it.
    """

    def __init__(self) -> None:
        self.rate = Rate()  # of fetching, in blocks a second
        self._num_asked = 0  # jobs under way
        self._num_fetches = 0
        self._num_blocks = 0  # of fetches under way, and of those that ended since the first of them was begun
        self._since = 0.0
        self._last = 0.0  # when a job ended, or the first was begun
        self._is_told = False  # of the silence that goes on

    def begun(self, jobs: Sequence[StorageJob], now: float) -> None:
        """These jobs are planned."""
        fetches = [job for job in jobs if job.action is StorageAction.FETCH]
        if jobs and not self._num_asked:
            self._last = now
        if fetches and not self._num_fetches:
            self._since, self._num_blocks = now, 0
        self._num_asked += len(jobs)
        self._num_fetches += len(fetches)
        self._num_blocks += sum(job.num_blocks for job in fetches)

    def ended(self, job: StorageJob, was_read: bool, now: float) -> None:
        """One of them has ended; `was_read`: its blocks were read."""
        self._num_asked -= 1
        self._last = now
        self._is_told = False
        if job.action is StorageAction.FETCH:
            self._num_fetches -= 1
            self._num_blocks -= 0 if was_read else job.num_blocks
            if not self._num_fetches and self._num_blocks:
                self.rate.observe(self._num_blocks, now - self._since)

    def hangs(self, now: float) -> bool:
        """Whether nothing has been heard for so long that nothing is to be waited for."""
        if not self._num_asked or now - self._last < _STALL_SECONDS:
            return False
        if not self._is_told:
            self._is_told = True
            logger.warning("storage has not answered for %.0f s: no request waits for it until it does", _STALL_SECONDS)
        return True


class PrefetchPlanner:
    """Follows requests from arrival to admission. The caller puts `plan` and `take_cancelled` into every step, and
    hands every ended look-up and fetch to `end`.

    `keys` names blocks in storage by their hashes; `on_fetched` hears of host blocks that are filled.
    """

    def __init__(
        self,
        config: StorageConfig,
        grouped: GroupedTree,
        host: CacheTier,
        jobs: JobLedger,
        loads: LoadPlanner,
        metrics: CacheMetrics,
        clock: Callable[[], float],
        block_size: int,
        keys: Callable[[Sequence[BlockHash]], bytes],
        on_fetched: Callable[[Sequence[int]], None],
    ) -> None:
        self._config = config
        self._tree = grouped.tree
        self._host = host
        self._jobs = jobs
        self._loads = loads
        self._metrics = metrics
        self._clock = clock
        self._block_size = block_size
        self._keys = keys
        self._on_fetched = on_fetched
        self._prefetches: dict[str, _Prefetch] = {}
        self._followers: dict[int, list[_Prefetch]] = {}  # by job under way
        self._job_of: dict[int, int] = {}  # fetch under way, by host block
        self._fetches: list[StorageJob] = []  # to be planned
        self._cancelled: set[int] = set()  # jobs that nobody follows
        self._untold: list[int] = []  # those of them that are to be planned
        self._reading = _Reading()
        self._num_skipped = 0

    @property
    def is_busy(self) -> bool:
        """Whether something waits for the next plan."""
        waits = any(not prefetch.is_planned for prefetch in self._prefetches.values())
        return waits or bool(self._fetches or self._untold)

    def arrived(self, request: Request, num_blocks: int) -> None:
        """A request whose first `num_blocks` blocks may be hit. What the host does not hold is looked up, once."""
        if request.request_id in self._prefetches:
            return
        path = self._tree.match(request.block_hashes[:num_blocks])
        absent = self._host.absent(path)
        first, stop = absent[0] if absent else len(path), min(num_blocks, len(request.block_hashes))
        now = self._clock()
        deadline = now + self._config.timeout_ms / 1e3
        is_pointless = first >= stop or self._reading.hangs(now)
        prefetch = _Prefetch(request, first, stop, deadline, is_planned=is_pointless)
        self._prefetches[request.request_id] = prefetch
        self._ride(prefetch, 0, path)

    def is_awaited(self, request_id: str) -> bool:
        """Whether the request should wait for what is on its way from storage."""
        prefetch = self._prefetches.get(request_id)
        if prefetch is None or prefetch.is_done or self._config.prefetch is Prefetch.BEST_EFFORT:
            return False
        now = self._clock()
        if self._reading.hangs(now):
            return False
        return self._config.prefetch is Prefetch.WAIT_COMPLETE or now < prefetch.deadline

    def admitted(self, request_id: str, first: int, num_blocks: int) -> None:
        """The request was admitted, with a hit on the host of `num_blocks` blocks from `first` on.

        Under `best_effort` what is under way goes on, for those who come later; else the request has waited as long as
        it was to, and computes the rest.
        """
        prefetch = self._prefetches.pop(request_id, None)
        if prefetch is None:
            return
        num_fetched = len(prefetch.fetched.intersection(range(first, first + num_blocks)))
        self._metrics.storage_hit_tokens += num_fetched * self._block_size
        if self._config.prefetch is not Prefetch.BEST_EFFORT:
            self._leave(prefetch)

    def withdrawn(self, request_id: str) -> None:
        """The request has ended; if it was not admitted nobody wants what is under way for it alone."""
        prefetch = self._prefetches.pop(request_id, None)
        if prefetch is not None:
            self._leave(prefetch)

    def plan(self) -> list[StorageJob]:
        """Jobs that begin in this step."""
        jobs = [self._look_up(prefetch) for prefetch in self._prefetches.values() if not prefetch.is_planned]
        jobs += self._fetches
        self._fetches = []
        self._reading.begun(jobs, self._clock())
        return jobs

    def take_cancelled(self) -> tuple[int, ...]:
        """Jobs to be called off in this step, planned in this one or before."""
        untold, self._untold = self._untold, []
        return tuple(untold)

    def end(self, job: StorageJob, ok: bool, num_found: int) -> None:
        """A look-up or a fetch was reported by every rank."""
        was_cancelled = job.job_id in self._cancelled and not ok
        self._cancelled.discard(job.job_id)
        self._reading.ended(job, not was_cancelled, self._clock())
        followers = self._followers.pop(job.job_id, [])
        for prefetch in followers:
            blocks = prefetch.jobs.pop(job.job_id)
            prefetch.fetched.update(blocks if ok else ())
        if job.action is StorageAction.FETCH:
            self._end_fetch(job, ok, was_cancelled)
        elif followers and num_found:
            self._found(followers[0], num_found)

    def reset(self) -> None:
        """Nothing of what is under way is wanted any more."""
        for prefetch in self._prefetches.values():
            self._leave(prefetch)
        self._prefetches.clear()

    def _look_up(self, prefetch: _Prefetch) -> StorageJob:
        prefetch.is_planned = True
        hashes = prefetch.request.block_hashes[prefetch.first : prefetch.stop]
        job = self._jobs.open_storage(StorageAction.LOOK_UP, self._keys(hashes), ())
        self._follow(job.job_id, prefetch, [])
        return job

    def _found(self, prefetch: _Prefetch, num_found: int) -> None:
        """Storage has so many of the blocks that were looked up: fetch them, but for those that are on their way."""
        if self._is_sooner_computed(num_found):
            return
        hashes, now = prefetch.request.block_hashes[: prefetch.first + num_found], self._clock()
        room = self._host.allocate_behind(num_found, hashes, now)
        nodes = self._tree.insert_path(hashes, now, prefetch.first)
        self._tree.touch(nodes, now)
        self._ride(prefetch, prefetch.first, nodes)
        wanted = self._host.absent(nodes)[: len(room)]
        self._host.release(room[len(wanted) :])
        self._metrics.dropped_fetches_blocks += num_found - len(room)
        for start in range(0, len(wanted), _FETCH_BLOCKS):
            part = wanted[start : start + _FETCH_BLOCKS]
            job = self._fetch([nodes[i] for i in part], room[start : start + len(part)])
            self._follow(job.job_id, prefetch, [prefetch.first + i for i in part])
        self._tree.settle(nodes)

    def _is_sooner_computed(self, num_blocks: int) -> bool:
        """Whether the model is estimated to be sooner than storage. What is not known yet is fetched."""
        fetch = self._reading.rate.seconds(num_blocks)
        compute = self._loads.recompute_seconds(num_blocks * self._block_size)
        if fetch is None or compute is None or fetch <= compute or self._num_skipped >= MOST_SKIPPED:
            self._num_skipped = 0
            return False
        self._num_skipped += 1
        self._metrics.recomputed_storage_tokens += num_blocks * self._block_size
        return True

    def _fetch(self, nodes: list[int], host_ids: list[int]) -> StorageJob:
        self._host.attach(host_ids, nodes, Event.FETCH)
        keys = self._keys([self._tree.hash_of(node) for node in nodes])
        job = self._jobs.open_storage(StorageAction.FETCH, keys, host_ids)
        self._job_of |= dict.fromkeys(host_ids, job.job_id)
        self._fetches.append(job)
        return job

    def _end_fetch(self, job: StorageJob, ok: bool, was_cancelled: bool) -> None:
        host_ids = job.host_ids.tolist()
        for block_id in host_ids:
            del self._job_of[block_id]
        if ok:
            self._on_fetched(host_ids)
            self._metrics.fetched_blocks += len(self._host.fill(host_ids))
        else:
            self._metrics.cancelled_fetch_jobs += was_cancelled
            self._metrics.failed_fetch_jobs += not was_cancelled
            self._host.discard(host_ids)
        self._host.release(host_ids)

    def _ride(self, prefetch: _Prefetch, first: int, nodes: Sequence[int]) -> None:
        """Follow the fetches of these nodes, blocks of the prefix from `first` on, that are under way already."""
        if not self._job_of:
            return
        for index, block_id in enumerate(self._host.blocks_of(nodes), first):
            job_id = self._job_of.get(block_id)
            if job_id is None:
                continue
            if job_id not in prefetch.jobs:
                self._follow(job_id, prefetch, [])
            prefetch.jobs[job_id].append(index)

    def _follow(self, job_id: int, prefetch: _Prefetch, blocks: list[int]) -> None:
        prefetch.jobs[job_id] = blocks
        self._followers.setdefault(job_id, []).append(prefetch)

    def _leave(self, prefetch: _Prefetch) -> None:
        """The request waits for its jobs no more; those that nobody else follows are called off."""
        for job_id in prefetch.jobs:
            followers = self._followers[job_id]
            followers.remove(prefetch)
            if not followers and job_id not in self._cancelled:
                self._cancelled.add(job_id)
                self._untold.append(job_id)
        prefetch.jobs.clear()
