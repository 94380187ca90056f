"""Host blocks on their way to storage: which are due, which wait, which are being written.

    on_save        a block is due once its save has arrived
    on_eviction    it is due when it is among the next to be evicted from the host
    at_finish      it is due when a request that used it has ended

A block that waits or is written is leased, so the host cannot reuse it. The queue is bounded, also by a share of the
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
        self, config: StorageConfig, shared: Shared, owner: JobOwner, keys: Callable[[Sequence[BlockHash]], bytes]
    ) -> None:
        self._when = config.backup
        self._most_blocks = config.max_backup_blocks
        self._shared = shared
        self._host = shared.host
        self._metrics = shared.metrics
        self._owner = owner
        self._keys = keys
        self._unstored: set[int] = set()  # host blocks that are not due, as far as known not in storage either
        self._due_when_saved: set[int] = set()  # of ended requests, still being saved
        self._waiting: deque[int] = deque()  # leased
        self._begun: dict[int, float] = {}  # jobs under way, the oldest first, and when they were begun
        self._num_blocks = 0  # that wait or are written
        self._may_look_ahead = False  # something changed since nothing was due

    @property
    def follows_requests(self) -> bool:
        """Whether `finished` is to be called."""
        return self._when is Backup.AT_FINISH

    @property
    def is_busy(self) -> bool:
        """Whether something waits for the next plan."""
        return bool(self._waiting)

    def saved(self, host_ids: Sequence[int]) -> None:
        """Host blocks were filled by a save."""
        self._note_replaced(host_ids)
        if self._when is Backup.ON_SAVE:
            self._take(host_ids)
            return
        due = [block_id for block_id in host_ids if block_id in self._due_when_saved]
        self._due_when_saved.difference_update(due)
        self._unstored.update(host_ids)
        self._unstored.difference_update(due)
        self._take(due)
        self._may_look_ahead = self._when is Backup.ON_EVICTION

    def fetched(self, host_ids: Sequence[int]) -> None:
        """Host blocks were filled from storage, which has them."""
        self._note_replaced(host_ids)

    def finished(self, host_ids: Iterable[int]) -> None:
        """A request that used these host blocks has ended."""
        due = []
        for block_id in host_ids:
            if block_id in self._unstored:
                due.append(block_id)
            elif self._host.state(block_id) is BlockState.SWAPPING_TO_HOST:
                self._due_when_saved.add(block_id)
        self._unstored.difference_update(due)
        self._take(due)

    def plan(self) -> list[StorageJob]:
        """Jobs that begin in this step."""
        if self._may_look_ahead and len(self._begun) < _JOBS:
            self._look_ahead()
        jobs = []
        while self._waiting and len(self._begun) < _JOBS:
            host_ids = [self._waiting.popleft() for _ in range(min(_JOB_BLOCKS, len(self._waiting)))]
            jobs += self._open(host_ids)
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
        self._due_when_saved.clear()
        waiting = list(self._waiting)
        self._waiting.clear()
        self._num_blocks -= len(waiting)
        self._host.release(waiting)

    def _note_replaced(self, host_ids: Iterable[int]) -> None:
        """What these blocks held before is gone from the host: not all of it went to storage."""
        lost = self._unstored.intersection(host_ids)
        self._unstored -= lost
        self._metrics.dropped_backups_blocks += len(lost)

    def _take(self, host_ids: Sequence[int]) -> None:
        """Queue blocks, as far as there is room."""
        taken = host_ids[: self._room()]
        self._metrics.dropped_backups_blocks += len(host_ids) - len(taken)
        self._host.acquire(taken)
        self._waiting.extend(taken)
        self._num_blocks += len(taken)

    def _room(self) -> int:
        """Blocks that may be queued now: none while storage does not answer."""
        oldest = next(iter(self._begun.values()), None)
        if oldest is not None and self._shared.clock() - oldest > LOST_SECONDS:
            return 0
        share = max(1, self._host.pool.capacity // _HOST_SHARE)
        return max(0, min(self._most_blocks, share) - self._num_blocks)

    def _look_ahead(self) -> None:
        room = self._room()
        limit = min(_WATCHED_BLOCKS, -(-self._host.pool.capacity // _WATCHED_SHARE))
        due = [block_id for block_id, _ in self._host.next_reused(limit) if block_id in self._unstored]
        self._unstored.difference_update(due[:room])
        self._take(due[:room])
        self._may_look_ahead = bool(due)

    def _open(self, host_ids: list[int]) -> list[StorageJob]:
        """One job; none where a reset has taken all of the blocks."""
        live = [b for b in host_ids if self._host.state(b) is BlockState.RESIDENT]
        gone = [b for b in host_ids if self._host.state(b) is not BlockState.RESIDENT]
        self._host.release(gone)
        self._num_blocks -= len(gone)
        if not live:
            return []
        keys = self._keys(self._host.hashes_of(live))
        job = StorageJob(self._shared.ledger.next_id(), StorageAction.BACK_UP, keys, np.array(live, dtype=np.int64))
        self._begun[job.job_id] = self._shared.clock()
        self._shared.ledger.open(job, self._owner)
        return [job]
