"""Fetches from storage: host blocks for what a search has found, and who waits for which of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

from ...events import BlockStored
from ...index import Event
from ...types import BlockHash, StorageAction, StorageJob, Tier
from ..ledger import EndedJob, JobOwner
from ..shared import Shared
from .followers import Followers
from .grouping import Grouping
from .prefetching import Prefetching

_FETCH_BLOCKS = 64
"""In one job: what has come can be loaded while the rest is on its way."""
_LEFT_SHARE = 4
"""Of the host, as a divisor, that fetches under way leave alone: storage that hangs must not keep all of it."""


class Fetches:
    """Knows the fetch that brings a host block, as long as it is waited for, and counts the blocks that fetches hold,
    until they have ended."""

    def __init__(self) -> None:
        self.num_blocks = 0
        """Host blocks of fetches that have not ended, among them those of abandoned ones."""
        self._job_of: dict[int, int] = {}  # by host block

    @property
    def bring_any(self) -> bool:
        """Whether any block is on its way."""
        return bool(self._job_of)

    def job_of(self, host_id: int) -> int | None:
        """The fetch that brings this host block."""
        return self._job_of.get(host_id)

    def begun(self, job: StorageJob) -> None:
        """The fetch was opened."""
        self.num_blocks += job.num_blocks
        self._job_of |= dict.fromkeys(job.host_ids.tolist(), job.job_id)

    def ended(self, job: StorageJob) -> None:
        """Every rank has reported the fetch."""
        self.num_blocks -= job.num_blocks
        for host_id in job.host_ids.tolist():
            self._job_of.pop(host_id, None)

    def abandon(self, job_id: int) -> list[int]:
        """The job is not waited for any more; returns its host blocks, which may be written to yet."""
        host_ids = [host_id for host_id, other in self._job_of.items() if other == job_id]
        for host_id in host_ids:
            del self._job_of[host_id]
        return host_ids


class FetchPlanner:
    """Opens fetches into leased host blocks, which are matchable once they are filled. What is on its way for one
    prefetch is waited for by the others that need it: `followers` knows them.

    `keys` names blocks in storage by their hashes; `on_fetched` hears of host blocks that were filled; `owner` opens
    the jobs, and hands every one that has ended to `end`.
    """

    def __init__(
        self,
        shared: Shared,
        grouping: Grouping,
        followers: Followers,
        owner: JobOwner,
        keys: Callable[[Sequence[BlockHash]], bytes],
        on_fetched: Callable[[Sequence[int]], None],
    ) -> None:
        self._shared = shared
        self._grouped = shared.grouped
        self._tree = shared.grouped.tree
        self._host = shared.host
        self._metrics = shared.metrics
        self._grouping = grouping
        self._followers = followers
        self._owner = owner
        self._keys = keys
        self._on_fetched = on_fetched
        self._fetches = Fetches()

    def open(self, prefetch: Prefetching, end: int, num_lacking: int) -> list[StorageJob]:
        """Fetch what a hit up to `end` lacks, but for what is on its way, as far as there is room; returns the jobs."""
        search, now = prefetch.search, self._shared.clock()
        paths = [self._grouped.keys(search.hashes, group)[: search.stop_of(group, end)] for group in search.first]
        capacity = self._host.pool.capacity
        most = capacity - capacity // _LEFT_SHARE - self._fetches.num_blocks
        self._tree.touch(search.held_windows(end), now)
        room = self._host.allocate_behind(max(0, min(num_lacking, most)), paths, now, *prefetch.terms.claim)
        end = search.fit(len(room))  # room may have been made of what windows need
        self._metrics.dropped_fetches_blocks += max(0, num_lacking - search.num_lacking(end))
        jobs: list[StorageJob] = []
        if end > search.host_end:
            jobs, room = self._fill(prefetch, end, room)
        self._host.release(room)
        return jobs

    def coalesce_begun(self, prefetch: Prefetching) -> None:
        """The prefetch waits for what is on its way to the host for others."""
        if not self._fetches.bring_any:
            return
        search = prefetch.search
        for group, blocks in enumerate(self._grouped.needed(0, search.host_end)):
            keys = self._grouped.keys(search.hashes, group)
            if group in search.first:
                self._coalesce(prefetch, group, range(len(keys)), self._tree.match(keys))
            else:
                nodes = self._grouped.find(keys[blocks.start : blocks.stop])
                self._coalesce(prefetch, group, blocks, nodes, range(search.host_end))

    def end(self, ended: EndedJob, job: StorageJob, was_cancelled: bool) -> None:
        """Every rank has reported the fetch."""
        host_ids = job.host_ids.tolist()
        self._fetches.ended(job)
        if not ended.ok:
            self._metrics.cancelled_fetch_jobs += was_cancelled
            self._metrics.failed_fetch_jobs += not was_cancelled
            self._host.discard(host_ids)
            return
        self._host.discard(sorted(ended.missing))
        host_ids = [block_id for block_id in host_ids if block_id not in ended.missing]
        filled = self._host.fill(host_ids)
        self._on_fetched(host_ids)
        self._metrics.fetched_blocks += len(filled)
        if filled:
            self._shared.events.add(BlockStored(self._host.hashes_of(filled), Tier.HOST))

    def abandon(self, job_id: int) -> None:
        """Nobody waits for the job any more, and it may never end: what it was to bring may be saved or fetched anew.
        Its host blocks stay leased, for they may be written to yet."""
        self._host.discard(self._fetches.abandon(job_id))

    def _fill(self, prefetch: Prefetching, end: int, room: list[int]) -> tuple[list[StorageJob], list[int]]:
        """Jobs for all that a hit up to `end` lacks, which there is room for; and what is left of that."""
        search, now = prefetch.search, self._shared.clock()
        jobs, inserted = [], []
        for group, blocks in enumerate(search.needed(end)):
            nodes = self._grouped.insert(search.hashes, group, now, blocks, prefetch.terms)
            inserted += nodes
            self._tree.touch(nodes, now)
            size, singly = self._grouped.groups[group].hashes_per_block, group in self._grouped.windows
            since = range(search.host_end, end) if singly else None
            needed = nodes[: bisect_left(blocks, search.stop_of(group, end))]
            self._coalesce(prefetch, group, blocks, needed, since)
            for part in self._grouping.parts(self._host.absent(needed), blocks, singly, _FETCH_BLOCKS):
                job = self._fetch(prefetch, nodes, part, room[: len(part)], singly)
                jobs.append(job)
                room = room[len(part) :]
                brought = since or (hashes for i in part for hashes in _hashes(blocks[i], size))
                self._followers.follow(job.job_id, prefetch, set(brought))
        self._tree.settle(inserted)
        return jobs, room

    def _fetch(
        self, prefetch: Prefetching, nodes: list[int], wanted: list[int], host_ids: list[int], singly: bool
    ) -> StorageJob:
        """Of the nodes those at these places are wanted; none of objects without any. Those of full attention begin
        with an object."""
        self._host.attach(host_ids, [nodes[i] for i in wanted], Event.FETCH)
        places = wanted
        if not singly:
            size = self._grouping.num_blocks
            starts = dict.fromkeys(map(self._grouping.start, wanted))
            places = [i for start in starts for i in range(start, min(start + size, len(nodes)))]
        is_wanted = frozenset(wanted)
        skipped = tuple(key for key, i in enumerate(places) if i not in is_wanted)
        keys = self._keys([self._tree.hash_of(nodes[i]) for i in places])
        job_id, blocks = self._shared.ledger.next_id(), np.array(host_ids, dtype=np.int64)
        job = StorageJob(job_id, StorageAction.FETCH, keys, blocks, skipped, singly)
        self._shared.ledger.open(job, self._owner, prefetch.request_ids)
        self._fetches.begun(job)
        return job

    def _coalesce(
        self,
        prefetch: Prefetching,
        group: int,
        blocks: Sequence[int],
        nodes: Sequence[int],
        since: range | None = None,
    ) -> None:
        """Follow the fetches of these nodes, which are blocks of the prefix, that are under way already. Each brings
        its own tokens, or those that windows are whole for since others are."""
        if not self._fetches.bring_any:
            return
        size = self._grouped.groups[group].hashes_per_block
        for block, host_id in zip(blocks, self._host.blocks_of(nodes), strict=False):
            job_id = self._fetches.job_of(host_id)
            if job_id is None:
                continue
            if job_id not in prefetch.jobs:
                self._followers.coalesce(job_id, prefetch)
            prefetch.jobs[job_id].update(_hashes(block, size) if since is None else since)


def _hashes(block: int, size: int) -> range:
    """Of a block of so many hashes."""
    return range(block * size, (block + 1) * size)
