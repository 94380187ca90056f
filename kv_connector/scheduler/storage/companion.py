"""Blocks between host memory and storage: names, plans and counters of `prefetches.py` and `backups.py`.

Storage is read by name and its content is not tracked: what is gone by the time it is read is a miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...base import Request, ScheduledRequest, StateBlock
from ...config import StorageConfig
from ...metrics import DOCUMENTATION, GAUGES
from ...types import BlockHash, StepPlan, StepReport, StorageAction, StorageJob
from ..companion import Admission, Companion
from ..ledger import EndedJob
from ..loads.choice import LoadPlanner
from ..names import BlockNames, Roots
from ..ranks import RankStates
from ..shared import Shared
from ..tables import BlockTable
from .backups import BackupPlanner
from .grouping import Grouping
from .prefetches import PrefetchPlanner
from .told import ToldBlocks


class StorageCompanion(Companion):
    """What the scheduler half knows of storage."""

    def __init__(
        self, config: StorageConfig, shared: Shared, loads: LoadPlanner, ranks: RankStates, roots: Roots
    ) -> None:
        """`roots` are in every key: they stand for whatever the engine's own hashes leave out."""
        self._shared = shared
        self._names = names = BlockNames(roots, shared.grouped)
        grouping = Grouping(shared.grouped, shared.host, ranks)
        self._backups = BackupPlanner(config, shared, grouping, self, names.of)
        self._told = told = ToldBlocks(shared)
        fetched = self._backups.fetched
        self._prefetches = PrefetchPlanner(config, shared, grouping, loads, self, names.of, fetched, told.answered)
        self._counters: dict[int, dict[str, float]] = {}  # by rank

    def arrived(self, request: Request) -> bool:
        """What the host does not hold of the request is looked up, once."""
        self._names.admitted(request)
        self._prefetches.arrived(request, self._shared.num_useful(request.num_tokens))
        return False

    def is_awaited(self, request_id: str) -> bool:
        """Whether fetches are on their way that the request is to wait for."""
        return self._prefetches.is_awaited(request_id)

    def num_hashes(self, request: Request) -> int:
        """None: storage brings blocks to the host, where they are hits like any other."""
        return 0

    def admitted(self, admission: Admission) -> None:
        """The request waits for storage no more."""
        self._names.admitted(admission.request)
        self._prefetches.admitted(admission.request.request_id, admission.first, admission.num_loaded)

    def scheduled(self, item: ScheduledRequest, tables: Sequence[BlockTable], states: Sequence[StateBlock]) -> None:
        """Nothing follows: blocks reach storage from the host."""

    def preempted(self, request_id: str) -> None:
        """Nothing follows: storage holds no device block."""

    def given_up(self, request_id: str) -> None:
        """Nothing follows: `finished` comes next."""

    def finished(self, request: Request) -> None:
        """Nobody waits for what is fetched for this request alone; what it has used may be written."""
        self._names.finished(request)
        self._prefetches.withdrawn(request.request_id)
        if self._backups.follows_requests:
            self._backups.finished(*self._held(request.block_hashes))

    def _held(self, hashes: Sequence[BlockHash]) -> tuple[list[int], list[int]]:
        """What the host has of a prefix, and of each group of full attention the last block that none is missing in
        front of."""
        grouped, host = self._shared.grouped, self._shared.host
        held: list[int] = []
        last: list[int] = []
        for group in range(len(grouped.groups)):
            nodes = grouped.find_of(group, grouped.keys(hashes, group))
            absent = host.absent(nodes)
            block_ids = host.blocks_of(nodes)
            end = absent[0] if absent else len(nodes)
            last += block_ids[:end][-1:] if group in grouped.full else []
            held += [block_ids[i] for i in sorted(set(range(len(nodes))).difference(absent))]
        return held, last

    def saved(self, host_ids: Sequence[int]) -> None:
        """New blocks are on the host."""
        self._backups.saved(host_ids)

    @property
    def is_busy(self) -> bool:
        """Whether something waits for the next plan."""
        return self._prefetches.is_busy or self._backups.is_busy

    def plan(self, plan: StepPlan) -> StepPlan:
        """Lookups and fetches begin before backups do."""
        jobs = (*self._prefetches.plan(), *self._backups.plan())
        self._told.planned(jobs)
        return replace(plan, storage=jobs, cancelled_storage=self._prefetches.take_cancelled())

    def end(self, ended: EndedJob) -> None:
        """A storage job was reported by every rank."""
        assert isinstance(ended.job, StorageJob)
        self._told.ended(ended)
        (self._backups if ended.job.action is StorageAction.BACK_UP else self._prefetches).end(ended)

    def reported(self, report: StepReport) -> None:
        """What a rank's storage has counted since its start."""
        if report.storage_counters:
            self._counters[report.rank] = dict(report.storage_counters)

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

    @property
    def may_warm(self) -> bool:
        """Not where many are under way, or storage does not answer."""
        return self._prefetches.may_warm

    def warm(self, block_hashes: Sequence[BlockHash], tenant: int) -> bool:
        """What the host lacks of the prefix is looked up and fetched, and waited for by nobody."""
        return self._prefetches.warm(block_hashes, tenant)

    def drain(self) -> int | None:
        """All that the host has is offered anew; what is in storage already is not written again."""
        return self._backups.drain()

    def reset(self) -> bool:
        """What was cached until now must not be matched any more: keys of before are none of after."""
        self._names.reset()
        self._told.reset()
        self._prefetches.reset()
        self._backups.reset()
        return True
