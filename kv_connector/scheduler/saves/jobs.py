"""Jobs that save: the one of the step that is being planned, and how they end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

import numpy as np

from ...events import BlockStored
from ...index import BlockState
from ...types import BlockHash, CopyJob, Direction, Tier
from ..ledger import EndedJob
from ..shared import Shared
from .before_reuse import SavesBeforeReuse
from .refusals import Refusals

logger = logging.getLogger("kv_connector.scheduler")


class SaveJobs:
    """Makes one job of all that a step saves, and hears how it ended.

    What did not fit is added to `refusals`. `on_saved` is told the host blocks that saves have filled.
    """

    def __init__(
        self,
        shared: Shared,
        refusals: Refusals,
        before_reuse: SavesBeforeReuse,
        on_saved: Callable[[Sequence[int]], None],
    ) -> None:
        self._shared = shared
        self._host = shared.host
        self._metrics = shared.metrics
        self._refusals = refusals
        self._before_reuse = before_reuse
        self._on_saved = on_saved
        self._device_ids: list[int] = []  # that the step being planned saves
        self._host_ids: list[int] = []  # where it saves them
        self._request_ids: set[str] = set()  # that have computed them, or hit them
        self._names: list[BlockHash] = []
        self._names_of: dict[int, list[BlockHash]] = {}  # by job, where those of all its blocks are known

    def add(
        self,
        device_ids: Sequence[int],
        host_ids: Sequence[int],
        request_ids: Collection[str] = (),
        names: Sequence[BlockHash] = (),
    ) -> None:
        """The step saves these device blocks to these host blocks, of which it has a reference each. Their `names`, if
        the caller has them at hand, spare those who are told of the save a search for them."""
        if host_ids:
            self._device_ids += device_ids
            self._host_ids += host_ids
            self._request_ids.update(request_ids)
            self._names += names

    def open(self) -> tuple[CopyJob, ...]:
        """The job of the step that has been planned, none where it saves nothing. Its host blocks are leased."""
        device_ids, self._device_ids = self._device_ids, []
        host_ids, self._host_ids = self._host_ids, []
        request_ids, self._request_ids = self._request_ids, set()
        names, self._names = self._names, []
        if not host_ids:
            return ()
        self._shared.pool.touch(device_ids)
        job_id = self._shared.ledger.next_id()
        if len(names) == len(host_ids):
            self._names_of[job_id] = names
        job = CopyJob(job_id, Direction.SAVE, np.array(device_ids, np.int64), np.array(host_ids, np.int64))
        self._shared.ledger.open(job, self, request_ids)
        return (job,)

    def end(self, ended: EndedJob) -> None:
        """Every rank has reported the save."""
        job = ended.job
        assert isinstance(job, CopyJob)
        host_ids, names = job.host_ids.tolist(), self._names_of.pop(job.job_id, None)
        if not ended.ok:
            self._metrics.failed_save_jobs += 1
            self._host.discard(host_ids)
            self._before_reuse.failed()
            logger.warning("save job %d failed: %d blocks stay uncached on the host", job.job_id, job.num_blocks)
            return
        refused = self._refuse(host_ids, ended.missing) if ended.missing else []
        filled = self._host.fill(host_ids)  # but what was refused
        self._refusals.judge(len(filled), refused)
        self._metrics.saved_blocks += len(filled)
        if filled and self._shared.events.is_read:
            if names is None or len(filled) < len(names):
                names = self._host.hashes_of(filled)
            self._shared.events.add(BlockStored(names, Tier.HOST))
        self._on_saved(filled)

    def _refuse(self, host_ids: Sequence[int], unfit: Collection[int]) -> list[BlockHash]:
        """What did not fit into these of a save's host blocks stays uncached, and is not tried again: its names, but of
        what a reset has let go of meanwhile."""
        lost = [b for b in host_ids if b in unfit and self._host.state(b) is BlockState.SWAPPING_TO_HOST]
        names = self._host.hashes_of(lost)
        self._host.discard(lost)
        self._metrics.refused_blocks += len(unfit)
        return names
