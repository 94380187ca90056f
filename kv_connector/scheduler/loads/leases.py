"""The blocks of a load, from the request's admission to the last rank's report."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np

from ...base import Request
from ...index import Lookup
from ...types import NO_BLOCK, CopyJob, Direction, StepReport
from ..ledger import EndedJob
from ..shared import Shared
from ..tables import BlockTable
from .choice import BackgroundLoad, LoadPlanner
from .rates import LoadMode

logger = logging.getLogger("kv_connector.scheduler")

Tables = Sequence[list[int]]
"""Device blocks of a request, by block group."""


@dataclass(slots=True)
class LoadLease:
    """Blocks of an admitted request that are leased on both sides and not yet planned."""

    mode: LoadMode
    device_ids: list[int] = field(default_factory=list)
    host_ids: list[int] = field(default_factory=list)
    background: BackgroundLoad | None = None


class LoadLeases:
    """Leases blocks for loads, opens their jobs, and hears how they end."""

    def __init__(self, shared: Shared, lookup: Lookup, planner: LoadPlanner) -> None:
        self._shared = shared
        self._lookup = lookup
        self._planner = planner
        self._job_of: dict[str, int] = {}  # load in the background, by the request that waits for it
        self._open: dict[int, frozenset[int]] = {}  # device blocks of loads that have not ended
        self._filling: set[int] = set()  # all of these
        self._are_shared = False  # some are of two loads: blocks may be used again before a load into them has ended
        # What requests have lost of those, and behind them: the last load by then, whose blocks, and which.
        self._dropped: deque[tuple[int, str, Tables]] = deque()
        self._num_loaded = 0  # blocks, in the report that is being taken in

    def take(
        self,
        request: Request,
        tables: Sequence[BlockTable],
        first: int,
        num_hashes: int,
        mode: LoadMode,
        may_announce: bool = True,
    ) -> LoadLease | None:
        """Lease what a hit of `num_hashes` block hashes from `first` on is made of; None where the engine has use for
        none of it, as all lies in front of windows. `may_announce`: the request waits for nothing else, so that it may
        continue when this load is about to end."""
        hit = self._lookup.hit(request.block_hashes, first, num_hashes)
        lease, host = LoadLease(mode), self._shared.host
        for table, indices, nodes in zip(tables, hit.indices, hit.nodes, strict=True):
            host_ids = host.blocks_of(nodes)
            device_ids = table.block_ids[indices.start : indices.stop]
            assert len(host_ids) == len(device_ids), (
                f"{request.request_id} was promised {len(indices)} blocks, not {len(host_ids)}"
            )
            are_held = [*map(NO_BLOCK.__ne__, device_ids)]
            lease.device_ids += compress(device_ids, are_held)
            lease.host_ids += compress(host_ids, are_held)
        if not lease.device_ids:
            return None
        self._shared.pool.touch(lease.device_ids)
        host.acquire(lease.host_ids)
        if mode is LoadMode.ASYNC:
            lease.background = self._planner.reserve(lease.host_ids, may_announce)
        else:
            self._planner.load_in_step(len(lease.host_ids))
        return lease

    def drop(self, lease: LoadLease) -> None:
        """The request has lost its blocks before the load was planned."""
        self._shared.pool.free_blocks(lease.device_ids)
        self._shared.host.release(lease.host_ids)
        if lease.background is None:
            self._planner.load_in_step(-len(lease.host_ids))
        else:
            self._planner.release(lease.background)

    def leave(self, request_id: str) -> None:
        """The request has lost its blocks: nobody waits for its load any more."""
        job_id = self._job_of.pop(request_id, None)
        if job_id is not None:
            self._planner.unwanted(job_id)

    def open(self, lease: LoadLease, request_id: str, admission: int, used: frozenset[int]) -> CopyJob:
        """The job of a load that is planned now. `used`: device blocks that steps in flight still use; in the
        background those come last."""
        if lease.background is None:
            job = self._job(lease.device_ids, lease.host_ids)
        else:
            pairs = sorted(zip(lease.device_ids, lease.host_ids, strict=True), key=lambda pair: pair[0] in used)
            device_ids, host_ids = zip(*pairs, strict=True)
            num_guarded = sum(device_id in used for device_id in device_ids)
            job = self._job(device_ids, host_ids, request_id, admission, num_guarded)
            self._planner.begin(lease.background, job.job_id)
            self._job_of[request_id] = job.job_id
        self._shared.ledger.open(job, self, (request_id,))
        self._open[job.job_id] = filled = frozenset(lease.device_ids)
        self._are_shared |= not self._filling.isdisjoint(filled)
        self._filling |= filled
        return job

    def dropped(self, request_id: str, tables: Tables) -> None:
        """A request has lost these blocks, by group; some may be those of a load that fails yet, or lie behind them."""
        if any(not self._filling.isdisjoint(ids) for ids in tables):
            self._dropped.append((next(reversed(self._open)), request_id, tables))

    def dropped_since(self, block_ids: Collection[int]) -> list[tuple[str, Tables]]:
        """What requests have lost since the first load was planned that is to fill any of these blocks."""
        loads = [job_id for job_id, filled in self._open.items() if not filled.isdisjoint(block_ids)]
        first = min(loads, default=None)
        return [(i, tables) for last, i, tables in self._dropped if first is not None and first <= last]

    def lose(self, block_ids: Sequence[int], live: Iterable[Tables]) -> None:
        """Loads were to fill these blocks and have not: no request hits them, nor what was computed behind them.

        Engines hit blocks as soon as a step is planned, and look only at the requests that run when they hear of the
        failure: what ended or was preempted meanwhile is looked at here. `live`: the tables of those that did not.
        """
        lost = set(block_ids)
        behind = set(lost)
        sizes = [group.hashes_per_block for group in self._shared.grouped.groups]
        for tables in (*live, *(tables for _, tables in self.dropped_since(lost))):
            found = (n * ids.index(block) for n, ids in zip(sizes, tables, strict=False) for block in lost & set(ids))
            if (first := min(found, default=None)) is not None:
                behind.update(*(ids[first // n :] for n, ids in zip(sizes, tables, strict=False)))
        self._shared.pool.forget(behind - {NO_BLOCK})

    def end(self, ended: EndedJob) -> None:
        """Every rank has reported the load."""
        job, metrics = ended.job, self._shared.metrics
        assert isinstance(job, CopyJob)
        filled = self._open.pop(job.job_id)
        if self._are_shared:
            self._filling = set().union(*self._open.values())
            self._are_shared = len(self._filling) < sum(map(len, self._open.values()))
        else:
            self._filling -= filled
        oldest = next(iter(self._open), job.job_id + 1)
        while self._dropped and self._dropped[0][0] < oldest:
            self._dropped.popleft()
        if job.request_id is not None:
            self._planner.end(job, ended.ok)
            self._job_of.pop(job.request_id, None)  # of this one: an id with a load under way is not looked up
        if ended.ok:
            self._num_loaded += job.num_blocks
            metrics.loaded_blocks += job.num_blocks
            return
        metrics.failed_load_jobs += 1
        self._shared.host.discard(job.host_ids.tolist())  # a second try would fail as well: a miss from now on
        logger.warning("load job %d failed: %d blocks will be recomputed", job.job_id, job.num_blocks)

    def reported(self, report: StepReport) -> None:
        """A rank's report was taken in: how long the loads took that ended with it."""
        num_loaded, self._num_loaded = self._num_loaded, 0
        if num_loaded:
            self._planner.observe(num_loaded, report.load_milliseconds / 1e3)

    def _job(
        self,
        device_ids: Sequence[int],
        host_ids: Sequence[int],
        request_id: str | None = None,
        admission: int = 0,
        num_guarded: int = 0,
    ) -> CopyJob:
        return CopyJob(
            job_id=self._shared.ledger.next_id(),
            direction=Direction.LOAD,
            device_ids=np.array(device_ids, dtype=np.int64),
            host_ids=np.array(host_ids, dtype=np.int64),
            request_id=request_id,
            admission=admission,
            num_guarded=num_guarded,
        )
