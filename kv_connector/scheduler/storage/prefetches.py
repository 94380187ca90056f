"""What requests that have arrived may find in storage: looked up, and fetched before it is needed.

    a request arrives --LOOK_UP--> every rank says how much of its prefix it has; the shortest counts
                      --FETCH----> into host blocks that are matchable once they are filled, like any other hit

Look-ups and fetches are of whole groups (`grouping.py`), but for the end of a prefix: a fetch names all blocks of a
group and brings those that the host lacks. A request whose prefix is on its way for another one waits for those jobs,
too. A job that nobody waits for any more is called off, and is done all the same where it had begun.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from ...base import Request
from ...config import Prefetch, StorageConfig
from ...events import BlockStored
from ...index import Event
from ...types import BlockHash, StorageAction, StorageJob, Tier
from ..ledger import EndedJob, JobOwner
from ..loads.choice import LoadPlanner
from ..loads.rates import MOST_SKIPPED
from ..shared import Shared
from .grouping import Grouping
from .reading import LOST_SECONDS, Reading

_FETCH_BLOCKS = 64
"""In one job: what has come can be loaded while the rest is on its way."""
_LEFT_SHARE = 4
"""Of the host, as a divisor, that fetches under way leave alone: storage that hangs must not keep all of it."""

logger = logging.getLogger("kv_connector.scheduler")


@dataclass(slots=True)
class _Prefetch:
    """What storage has of a request that was seen and not admitted."""

    request: Request
    first: int  # blocks that are looked up: from here, where a group begins
    lacking: int  # the first that the host lacks
    stop: int  # to here
    deadline: float
    jobs: dict[int, list[int]] = field(default_factory=dict)  # under way, and the blocks of the prefix they fetch
    fetched: set[int] = field(default_factory=set)  # blocks of the prefix that have come
    coalesced: set[int] = field(default_factory=set)  # those of the jobs that fetch for others
    is_planned: bool = False
    is_repeated: bool = False  # it is looked up for the second time, and last

    @property
    def is_done(self) -> bool:
        return self.is_planned and not self.jobs


class PrefetchPlanner:
    """Follows requests from arrival to admission. The caller puts `plan` and `take_cancelled` into every step, and
    hands every ended look-up and fetch to `end`.

    `keys` names blocks in storage by their hashes; `on_fetched` hears of host blocks that were filled; `owner` opens
    the jobs.
    """

    def __init__(
        self,
        config: StorageConfig,
        shared: Shared,
        grouping: Grouping,
        loads: LoadPlanner,
        owner: JobOwner,
        keys: Callable[[Sequence[BlockHash]], bytes],
        on_fetched: Callable[[Sequence[int]], None],
    ) -> None:
        self._config = config
        self._shared = shared
        self._tree = shared.grouped.tree
        self._host = shared.host
        self._grouping = grouping
        self._loads = loads
        self._owner = owner
        self._metrics = shared.metrics
        self._clock = shared.clock
        self._block_size = shared.block_size
        self._keys = keys
        self._on_fetched = on_fetched
        self._prefetches: dict[str, _Prefetch] = {}
        self._followers: dict[int, list[_Prefetch]] = {}  # by job under way
        self._job_of: dict[int, int] = {}  # fetch under way, by host block
        self._fetches: list[StorageJob] = []  # to be planned
        self._cancelled: set[int] = set()  # jobs that nobody follows
        self._untold: list[int] = []  # those of them that are to be planned
        self._num_fetching = 0  # host blocks
        self._reading = Reading()
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
        stop = min(num_blocks, len(request.block_hashes))
        prefetch = _Prefetch(request, 0, 0, stop, self._clock() + self._config.timeout_ms / 1e3)
        self._prefetches[request.request_id] = prefetch
        self._begin(prefetch)

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
        for job_id in self._reading.lost(self._clock()):
            self._abandon(job_id)
        jobs = [self._look_up(prefetch) for prefetch in self._prefetches.values() if not prefetch.is_planned]
        jobs += self._fetches
        self._fetches = []
        self._reading.begun(jobs, self._clock())
        return jobs

    def take_cancelled(self) -> tuple[int, ...]:
        """Jobs to be called off in this step, planned in this one or before."""
        untold, self._untold = self._untold, []
        return tuple(untold)

    def end(self, ended: EndedJob) -> None:
        """A look-up or a fetch was reported by every rank."""
        job, ok = ended.job, ended.ok
        assert isinstance(job, StorageJob)
        was_cancelled = job.job_id in self._cancelled and not ok
        self._cancelled.discard(job.job_id)
        self._reading.ended(job, not was_cancelled, self._clock())
        followers = self._followers.pop(job.job_id, [])
        if job.action is StorageAction.FETCH:
            self._end_fetch(ended, job, was_cancelled)
        for prefetch in followers:
            blocks = prefetch.jobs.pop(job.job_id)
            if ok:
                prefetch.fetched.update(blocks)
            elif job.job_id in prefetch.coalesced and not prefetch.is_repeated:
                prefetch.is_repeated = True  # the fetch was another's, and perhaps it was that one's to call off
                self._begin(prefetch)
        if job.action is StorageAction.LOOK_UP and followers and ended.found:
            self._found(followers[0], ended.found)

    def reset(self) -> None:
        """Nothing of what is under way is wanted any more."""
        for prefetch in self._prefetches.values():
            self._leave(prefetch)
        self._prefetches.clear()

    def _begin(self, prefetch: _Prefetch) -> None:
        """What the host does not hold is to be looked up, and what is on its way to it is waited for."""
        path = self._tree.match(prefetch.request.block_hashes[: prefetch.stop])
        absent = self._host.absent(path)
        prefetch.lacking = absent[0] if absent else len(path)
        prefetch.first = self._grouping.start(prefetch.lacking)
        prefetch.is_planned = prefetch.lacking >= prefetch.stop or self._reading.hangs(self._clock())
        self._coalesce(prefetch, 0, path)

    def _look_up(self, prefetch: _Prefetch) -> StorageJob:
        prefetch.is_planned = True
        hashes = prefetch.request.block_hashes[prefetch.first : prefetch.stop]
        job = self._open(StorageAction.LOOK_UP, self._keys(hashes), ())
        self._follow(job.job_id, prefetch, [])
        return job

    def _open(
        self, action: StorageAction, keys: bytes, host_ids: Sequence[int], skipped: tuple[int, ...] = ()
    ) -> StorageJob:
        job = StorageJob(self._shared.ledger.next_id(), action, keys, np.array(host_ids, dtype=np.int64), skipped)
        self._shared.ledger.open(job, self._owner)
        return job

    def _abandon(self, job_id: int) -> None:
        """Storage has lost the job, by all appearances: its requests are computed, and what it was to bring may be
        saved or fetched anew. Its host blocks stay leased: they may be written to yet."""
        logger.warning("storage has not answered job %d for %.0f s: it is not waited for", job_id, LOST_SECONDS)
        self._reading.forget(job_id)
        for prefetch in self._followers.pop(job_id, []):
            del prefetch.jobs[job_id]
        host_ids = [block_id for block_id, other in self._job_of.items() if other == job_id]
        for block_id in host_ids:
            del self._job_of[block_id]
        self._host.discard(host_ids)

    def _found(self, prefetch: _Prefetch, num_found: int) -> None:
        """Storage has so many of the blocks that were looked up: fetch them, but for those that are on their way."""
        num_new = prefetch.first + num_found - prefetch.lacking
        if num_new <= 0 or self._is_sooner_computed(num_new):
            return
        hashes, now = prefetch.request.block_hashes[: prefetch.first + num_found], self._clock()
        capacity = self._host.pool.capacity
        most = capacity - capacity // _LEFT_SHARE - self._num_fetching
        room = self._host.allocate_behind(max(0, min(num_new, most)), (hashes,), now)
        nodes = self._tree.insert_path(hashes, now, prefetch.first)
        self._tree.touch(nodes, now)
        self._coalesce(prefetch, prefetch.first, nodes)
        wanted = self._host.absent(nodes)[: len(room)]
        self._host.release(room[len(wanted) :])
        self._metrics.dropped_fetches_blocks += num_new - len(room)
        taken = 0
        for part in self._parts(wanted):
            job = self._fetch(nodes, part, room[taken : taken + len(part)])
            self._follow(job.job_id, prefetch, [prefetch.first + i for i in part])
            taken += len(part)
        self._tree.settle(nodes)

    def _parts(self, wanted: Sequence[int]) -> list[list[int]]:
        """Places of blocks, in order and counted from the beginning of a group, cut into jobs: no group is cut."""
        parts: list[list[int]] = []
        for _, group in groupby(wanted, self._grouping.start):
            places = list(group)
            if not parts or len(parts[-1]) + len(places) > _FETCH_BLOCKS:
                parts.append([])
            parts[-1] += places
        return parts

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

    def _fetch(self, nodes: list[int], wanted: list[int], host_ids: list[int]) -> StorageJob:
        """Of the nodes, which begin with a group, those at these places are wanted; none of groups without any."""
        self._host.attach(host_ids, [nodes[i] for i in wanted], Event.FETCH)
        size, is_wanted = self._grouping.num_blocks, frozenset(wanted)
        starts = dict.fromkeys(map(self._grouping.start, wanted))
        places = [i for start in starts for i in range(start, min(start + size, len(nodes)))]
        skipped = tuple(key for key, i in enumerate(places) if i not in is_wanted)
        keys = self._keys([self._tree.hash_of(nodes[i]) for i in places])
        job = self._open(StorageAction.FETCH, keys, host_ids, skipped)
        self._num_fetching += job.num_blocks
        self._job_of |= dict.fromkeys(host_ids, job.job_id)
        self._fetches.append(job)
        return job

    def _end_fetch(self, ended: EndedJob, job: StorageJob, was_cancelled: bool) -> None:
        host_ids = job.host_ids.tolist()
        self._num_fetching -= job.num_blocks
        for block_id in host_ids:
            self._job_of.pop(block_id, None)
        if not ended.ok:
            self._metrics.cancelled_fetch_jobs += was_cancelled
            self._metrics.failed_fetch_jobs += not was_cancelled
            self._host.discard(host_ids)
            return
        self._host.discard([host_ids[place] for place in sorted(ended.missing)])
        host_ids = [block_id for place, block_id in enumerate(host_ids) if place not in ended.missing]
        filled = self._host.fill(host_ids)
        self._on_fetched(host_ids)
        self._metrics.fetched_blocks += len(filled)
        if filled:
            self._shared.events.add(BlockStored(tuple(self._host.hashes_of(filled)), Tier.HOST))

    def _coalesce(self, prefetch: _Prefetch, first: int, nodes: Sequence[int]) -> None:
        """Follow the fetches of these nodes, blocks of the prefix from `first` on, that are under way already."""
        if not self._job_of:
            return
        for index, block_id in enumerate(self._host.blocks_of(nodes), first):
            job_id = self._job_of.get(block_id)
            if job_id is None:
                continue
            if job_id not in prefetch.jobs:
                self._follow(job_id, prefetch, [])
                prefetch.coalesced.add(job_id)
                self._want_again(job_id)
            prefetch.jobs[job_id].append(index)

    def _follow(self, job_id: int, prefetch: _Prefetch, blocks: list[int]) -> None:
        prefetch.jobs[job_id] = blocks
        self._followers.setdefault(job_id, []).append(prefetch)

    def _want_again(self, job_id: int) -> None:
        """Somebody waits for the job again. Where ranks were told to call it off, whoever waits looks up once more."""
        if job_id in self._untold:
            self._untold.remove(job_id)
            self._cancelled.discard(job_id)

    def _leave(self, prefetch: _Prefetch) -> None:
        """The request waits for its jobs no more; those that nobody else follows are called off."""
        for job_id in prefetch.jobs:
            followers = self._followers[job_id]
            followers.remove(prefetch)
            if not followers and job_id not in self._cancelled:
                self._cancelled.add(job_id)
                self._untold.append(job_id)
        prefetch.jobs.clear()
        prefetch.coalesced.clear()
