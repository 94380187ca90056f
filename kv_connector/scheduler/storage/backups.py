"""Host blocks on their way to storage: which are due, which wait, which are being written.

    on_save        a group is due once the save of its last block has arrived
    on_eviction    it is due when its last block is among the next to be evicted from the host
    at_finish      it is due when a request that used it has ended

Groups are written whole (`grouping.py`): what is on the host of one that is not whole yet stays there, and may be
evicted, until the rest has come. Where a request ends within a group, as much as there is of it becomes a group. A
block is written as often as groups are that have it: where prefixes branch, and where a request went on from an end.
A block of a window or a state is a group of its own, and due as soon as any; it travels with its like.

A group that waits or is written is leased, so the host cannot reuse it. The queue is bounded, also by a share of the
host, so that storage which is slower than the model, or hangs, costs cached blocks and never keeps the host tier from
taking new ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ...config import Backup, StorageConfig
from ...index import BlockState
from ...types import BlockHash, StorageAction, StorageJob
from ..ledger import EndedJob, JobOwner
from ..shared import Shared
from .grouping import Grouping
from .reading import LOST_SECONDS

_JOB_BLOCKS = 256
_JOBS = 2
"""At a time: enough to keep the disk busy while the next one is planned."""
_HOST_SHARE = 4
"""Of the host, as a divisor, that waits or is written at most."""
_WATCHED_BLOCKS = 512
_WATCHED_SHARE = 8
"""Next in line for eviction and looked at under `on_eviction`: two jobs, and of a small host an eighth at most."""


class BackupPlanner:
    """Decides what is written when. `keys` names blocks in storage by their hashes; `owner` opens the jobs."""

    def __init__(
        self,
        config: StorageConfig,
        shared: Shared,
        grouping: Grouping,
        owner: JobOwner,
        keys: Callable[[Sequence[BlockHash]], bytes],
    ) -> None:
        self._when = config.backup
        self._most_blocks = config.max_backup_blocks
        self._shared = shared
        self._host = shared.host
        self._metrics = shared.metrics
        self._grouping = grouping
        self._owner = owner
        self._keys = keys
        self._unstored: set[int] = set()  # host blocks that are in no group that is due, and so far not in storage
        self._ends: set[int] = set()  # those of them whose groups are to be written
        self._marked: set[int] = set()  # being saved, and where ended requests end or, at finish, their groups
        self._behind: dict[int, list[int]] = {}  # by a block on its way: ends that are due, but for it
        # Groups, leased: those of full attention, and of windows and states, whose jobs take turns.
        self._waiting: deque[tuple[bool, deque[list[int]]]] = deque([(False, deque()), (True, deque())])
        self._begun: dict[int, float] = {}  # jobs under way, the oldest first, and when they were begun
        self._num_blocks = 0  # that wait or are written
        self._draining: deque[int] = deque()  # ends of groups that are to be written, whatever was offered before
        self._is_draining = False
        self._may_look_ahead = False  # something changed since nothing was due

    @property
    def follows_requests(self) -> bool:
        """Whether `finished` is to be called."""
        return self._when is Backup.AT_FINISH or self._grouping.num_blocks > 1

    @property
    def is_busy(self) -> bool:
        """Whether something waits for the next plan."""
        return bool(self._draining) or self._waits

    @property
    def _waits(self) -> bool:
        return any(waiting for _, waiting in self._waiting)

    def saved(self, host_ids: Sequence[int]) -> None:
        """Host blocks were filled by a save; what holds an end inside of a block stays on the host."""
        self._note_replaced(host_ids)
        marked = self._marked.intersection(host_ids)
        self._marked -= marked
        host_ids = self._grouping.whole(host_ids)
        marked.intersection_update(host_ids)
        self._unstored.update(host_ids)
        whole = self._grouping.ending_whole(host_ids)
        self._ends.update(whole, marked)
        if self._when is Backup.ON_SAVE:
            self._offer(whole)
        if self._when is not Backup.ON_EVICTION and marked:
            self._offer([block_id for block_id in host_ids if block_id in marked])
        self._offer_behind(host_ids)
        self._may_look_ahead = self._when is Backup.ON_EVICTION

    def fetched(self, host_ids: Sequence[int]) -> None:
        """Host blocks were filled from storage, which has them."""
        self._note_replaced(host_ids)
        self._offer_behind(host_ids)

    def finished(self, host_ids: Sequence[int], last: Sequence[int]) -> None:
        """A request that used these host blocks has ended. `last` holds, of each group of full attention that has any,
        the end of what of its prefix is on the host, or on its way there."""
        is_due = self._when is not Backup.ON_EVICTION
        ends = [*self._grouping.ending_whole(host_ids), *last] if is_due else last
        self._marked.update(b for b in ends if self._host.state(b) is BlockState.SWAPPING_TO_HOST)
        self._ends |= self._unstored.intersection(last)
        if is_due:
            self._offer(ends)

    def drain(self) -> int:
        """Offer all that the host has, in as many steps as that takes; returns how many groups are still to be offered
        and blocks to be written. Called again, it only asks, until it has said that there are none."""
        if not self._is_draining:
            host_ids = self._grouping.whole(self._host.copies())
            self._draining.extend(dict.fromkeys((*self._grouping.ending_whole(host_ids), *self._host.leaves(host_ids))))
        num_left = len(self._draining) + self._num_blocks
        self._is_draining = num_left > 0
        return num_left

    def plan(self) -> list[StorageJob]:
        """Jobs that begin in this step."""
        if self._may_look_ahead and len(self._begun) < _JOBS:
            self._look_ahead()
        self._drain_on()
        jobs = []
        while self._waits and len(self._begun) < _JOBS:
            self._waiting.rotate()
            singly, waiting = self._waiting[0]
            if waiting:
                jobs += self._open(self._next_groups(waiting, 1 if singly else self._grouping.num_blocks), singly)
        return jobs

    def end(self, ended: EndedJob) -> None:
        """Every rank has written the job's blocks, or as many as it could."""
        del self._begun[ended.job.job_id]
        self._num_blocks -= ended.job.num_blocks
        self._metrics.backed_up_blocks += ended.job.num_blocks - len(ended.missing) if ended.ok else 0
        self._metrics.failed_backup_jobs += not ended.ok

    def reset(self) -> None:
        """The host forgets its blocks, and what waits is not wanted any more."""
        self._unstored.clear()
        self._ends.clear()
        self._marked.clear()
        self._behind.clear()
        self._draining.clear()
        self._is_draining = False
        waiting = [block_id for _, groups in self._waiting for group in groups for block_id in group]
        for _, groups in self._waiting:
            groups.clear()
        self._num_blocks -= len(waiting)
        self._host.release(waiting)

    def _note_replaced(self, host_ids: Iterable[int]) -> None:
        """What these blocks held before is gone from the host: not all of it went to storage."""
        lost = self._unstored.intersection(host_ids)
        self._unstored -= lost
        self._ends -= lost
        self._metrics.dropped_backups_blocks += len(lost)

    def _offer_behind(self, host_ids: Iterable[int]) -> None:
        """These blocks have come: groups may be whole that waited for them."""
        if self._behind:
            self._offer([end for block_id in host_ids for end in self._behind.pop(block_id, ())])

    def _offer(self, ends: Iterable[int]) -> None:
        """Queue the groups of these ends, as far as they are whole and there is room."""
        room, taken, is_due = self._room(), [], self._ends
        for end in ends:
            group = self._group_of(end) if end in is_due else []
            if not group:
                continue
            if len(group) <= room:
                room -= len(group)
                taken.append(group)
            else:
                self._metrics.dropped_backups_blocks += len(self._unstored.intersection(group))
            self._unstored.difference_update(group)
            self._ends.difference_update(group)
        self._queue(taken)

    def _drain_on(self) -> None:
        """As far as there is room."""
        while self._draining and (room := self._room()):
            end = self._draining[0]  # which may hold another copy by now
            is_there = self._host.first_not_resident((end,)) is None and self._grouping.whole((end,))
            group = self._grouping.ending_in(end) if is_there else []
            if len(group) > room:
                return
            self._draining.popleft()
            if group:
                self._unstored.add(end)
                self._ends.add(end)
                self._offer((end,))

    def _group_of(self, end: int) -> list[int]:
        """The group that ends in this block, if it is whole on the host. Where some of it is still on its way, it is
        offered again when that has come."""
        group = self._grouping.ending_in(end)
        on_its_way = self._host.first_not_resident(group)
        if on_its_way is None:
            return group
        self._behind.setdefault(on_its_way, []).append(end)
        return []

    def _queue(self, groups: Sequence[list[int]]) -> None:
        """These are written next."""
        host_ids = [block_id for group in groups for block_id in group]
        self._host.acquire(host_ids)
        for singly, waiting in self._waiting:
            waiting.extend(group for group in groups if self._grouping.is_single(group[0]) is singly)
        self._num_blocks += len(host_ids)

    def _room(self) -> int:
        """Blocks that may be queued now, where nothing waits a group at least: none while storage does not answer."""
        oldest = next(iter(self._begun.values()), None)
        if oldest is not None and self._shared.clock() - oldest > LOST_SECONDS:
            return 0
        share = self._host.pool.capacity // _HOST_SHARE
        return max(0, max(self._grouping.num_blocks, min(self._most_blocks, share)) - self._num_blocks)

    def _look_ahead(self) -> None:
        limit = min(_WATCHED_BLOCKS, -(-self._host.pool.capacity // _WATCHED_SHARE))
        next_reused = [block_id for block_id, _ in self._host.next_reused(limit)]
        due = [end for end in next_reused if end in self._ends and self._group_of(end)]
        self._may_look_ahead = bool(due)
        room = self._room()
        for end in due:
            room -= len(self._grouping.ending_in(end))
            if room < 0:
                break
            self._offer((end,))

    def _next_groups(self, waiting: deque[list[int]], whole: int) -> list[list[int]]:
        """Groups of one job, of which a whole one has so many blocks; none behind one that is shorter."""
        groups, num_blocks = [waiting.popleft()], 0
        while waiting and len(groups[-1]) == whole:
            num_blocks += len(groups[-1])
            if num_blocks + len(waiting[0]) > _JOB_BLOCKS:
                break
            groups.append(waiting.popleft())
        return groups

    def _open(self, groups: list[list[int]], singly: bool) -> list[StorageJob]:
        """One job; none where a reset has taken a block of each group."""
        live: list[int] = []
        for group in groups:
            if self._host.first_not_resident(group) is None:
                live += group
            else:
                self._host.release(group)
                self._num_blocks -= len(group)
        if not live:
            return []
        keys = self._keys(self._host.hashes_of(live))
        job_id, host_ids = self._shared.ledger.next_id(), np.array(live, dtype=np.int64)
        job = StorageJob(job_id, StorageAction.BACK_UP, keys, host_ids, singly=singly)
        self._begun[job.job_id] = self._shared.clock()
        self._shared.ledger.open(job, self._owner)
        return [job]
