"""Blocks that routers were told are in storage, whose content is not tracked: blocks that were written, and that a
lookup or a fetch found or missed.

So a block that was deleted, by this engine or another, is called stored until somebody asks for it in vain, and one
that another engine has written is not until somebody asks for it. Nothing is kept where nobody reads events.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from ...events import BlockRemoved, BlockStored
from ...types import BlockHash, StorageAction, StorageJob, Tier
from ..ledger import EndedJob
from ..shared import Shared
from .search import Question

_MOST = 1 << 20
"""Blocks that routers are told of at a time, about 150 bytes each: of more the oldest are called removed."""


class ToldBlocks:
    """By key, which is the hash of a block, or `index.group_key` of it."""

    def __init__(self, shared: Shared, most: int = _MOST) -> None:
        self._events = shared.events
        self._grouped = shared.grouped
        self._host = shared.host
        self._most = most
        self._told: OrderedDict[BlockHash, None] = OrderedDict()
        self._moved: dict[int, dict[int, BlockHash]] = {}  # by job under way, what its host blocks hold

    def planned(self, jobs: Iterable[StorageJob]) -> None:
        """Jobs that begin in this step; their host blocks hold, or are to hold, what they name, but for what was let go
        of since the job was made, by a reset or with its tenant."""
        if self._events.is_read:
            for job in jobs:
                host_ids = [host_id for host_id in job.host_ids.tolist() if self._host.holds_copy(host_id)]
                self._moved[job.job_id] = dict(zip(host_ids, self._host.hashes_of(host_ids), strict=True))

    def ended(self, ended: EndedJob) -> None:
        """Fetches and backups that every rank has reported."""
        job = ended.job
        assert isinstance(job, StorageJob)
        keys = self._moved.pop(job.job_id, {})
        if job.action is StorageAction.FETCH:
            self._lose([key for host_id, key in keys.items() if host_id in ended.missing])
        elif ended.ok:
            self._store([key for host_id, key in keys.items() if host_id not in ended.missing])

    def answered(self, hashes: Sequence[BlockHash], question: Question, found: int) -> None:
        """A lookup has found those of the blocks whose bits are set: of full attention the leading ones count."""
        if not self._events.is_read:
            return
        keys = self._grouped.keys(hashes, question.group)[question.blocks.start : question.blocks.stop]
        is_there = [bool(found >> place & 1) for place in range(len(keys))]
        if question.group not in self._grouped.windows:
            stop = is_there.index(False) + 1 if False in is_there else len(keys)
            keys, is_there = keys[:stop], is_there[:stop]  # of what is behind the first gap nothing is said
        self._store([key for key, there in zip(keys, is_there, strict=True) if there])
        self._lose([key for key, there in zip(keys, is_there, strict=True) if not there])

    def reset(self) -> None:
        """Names of before are none of after: nothing of it is found any more."""
        self._moved.clear()
        self._lose(list(self._told))

    def _store(self, keys: Sequence[BlockHash]) -> None:
        new = [key for key in keys if key not in self._told]
        self._told.update(dict.fromkeys(new))
        if new:
            self._events.add(BlockStored(new, Tier.STORAGE))
        self._lose([key for key, _ in zip(self._told, range(len(self._told) - self._most), strict=False)])

    def _lose(self, keys: Sequence[BlockHash]) -> None:
        gone = [key for key in keys if key in self._told]
        for key in gone:
            del self._told[key]
        if gone:
            self._events.add(BlockRemoved(gone, Tier.STORAGE))
