"""Both halves of one rank, in one process.

SGLang runs a scheduler on every rank, and all of them decide alike. So each rank has a scheduler half of its own, and
all of these are replicas: they are asked and told the same in the same order, go by one clock, and take in the reports
of all ranks at the same points (`advance`). A plan crosses to the worker half of its own rank only; that the ranks have
come to the same number of steps, and to the same jobs, is checked where reports are exchanged.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...base import Request, SchedulerOutput
from ...build import build_scheduler, build_worker
from ...config import Config
from ...errors import KVConnectorError
from ...index import CacheIdentity, FragmentTree
from ...types import BlockHash, StepPlan, StepReport
from .launch import refuse_groups
from .metrics import PromMetrics
from .pools import DevicePages
from .ranks import Ranks, SharedClock

_NOTHING = SchedulerOutput()


class _Told(NamedTuple):
    """What a rank tells the others: reports of its steps since it did last, the last job that it planned, how much it
    was offered, and how much of that it could take."""

    reports: tuple[StepReport, ...]
    last_job: int
    num_offers: int
    num_ready: int
    seconds: float


class Replica:
    """Plans a step, carries it out, and takes in what the ranks report. Called from the scheduler's thread."""

    def __init__(
        self,
        config: Config,
        pages: DevicePages,
        ranks: Ranks,
        identity: CacheIdentity | None,
        backend: str,
        shows_metrics: bool,
    ) -> None:
        """Takes the host's memory. All ranks are made at the same time. Raises ConfigError and LayoutError."""
        self._ranks = ranks
        self.clock = SharedClock(ranks)
        self.scheduler = build_scheduler(
            config,
            pages.page_size,
            ranks.count,
            tree=FragmentTree(),
            clock=self.clock,
            unpins_when_idle=False,
            publishes_events=False,
            learns_at_admission=False,
            identity=identity,
        )
        self.scheduler.bind_block_pool(pages)
        self.worker = build_worker(
            config,
            ranks.rank,
            ranks.count,
            identity=identity,
            backend=backend,
            num_replicas=ranks.count if pages.are_replicated else 1,
            exchange=ranks.exchange,
            exchange_all=ranks.exchange,
            # It launches a prompt's kernels one by one, and waits for the driver where that takes in copies.
            packs_pieces=True,
            retries_loads=True,
        )
        self.worker.register_kv_caches(pages.tensors, pages.num_pages, dict.fromkeys(pages.tensors, 0))
        self._has_storage = config.storage is not None
        self._untold: list[StepReport] = []
        self._asked: list[tuple[Sequence[BlockHash], bool]] = []  # and not learned yet
        self._last_job = -1
        self.is_loading = False
        """Whether a step has begun that has not ended."""
        self._saving: set[int] = set()  # jobs that have not ended on this rank
        self._metrics = PromMetrics() if shows_metrics and ranks.rank == 0 else None  # last: it is there for good

    def begin(self, output: SchedulerOutput = _NOTHING) -> StepPlan:
        """Plan a step and submit its loads, behind what the current stream was given."""
        plan = self.scheduler.build_connector_meta(output)
        copies = (job.job_id for job in (*plan.loads, *plan.saves))
        self._last_job = max([self._last_job, *copies, *(job.job_id for job in plan.storage)])
        self._saving.update(job.job_id for job in plan.saves)
        self.worker.bind_connector_metadata(plan)
        self.worker.start_load_kv()
        self.is_loading = True
        return plan

    def end(self) -> bool:
        """Submit the step's saves, behind what the current stream was given. Returns whether all loads since the last
        step have come, or will without fail."""
        self.worker.wait_for_save()
        self.worker.get_finished()
        lost = self.worker.get_block_ids_with_load_errors()
        report = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        self.is_loading = False
        self._saving.difference_update(report.done, report.failed)
        self._untold.append(report)
        refuse_groups(report.group_blocks)
        return not lost

    def note_asked(self, hashes: Sequence[BlockHash], on_device: bool = False) -> None:
        """As `SchedulerHalf.note_asked`, in the next `learn`: a request waits now, and learning takes longer than all
        else of its look-up."""
        self._asked.append((hashes, on_device))

    def learn(self) -> None:
        """What was asked for, in order; at the latest before what requests have computed, or storage has brought,
        becomes known."""
        asked, self._asked = self._asked, []
        for hashes, on_device in asked:
            self.scheduler.note_asked(hashes, on_device)

    def has_saved(self, job_id: int) -> bool:
        """Whether a save of a step that has begun has ended on this rank."""
        return job_id not in self._saving

    def step(self, output: SchedulerOutput = _NOTHING) -> StepPlan:
        """A whole step that the engine computes nothing in."""
        plan = self.begin(output)
        self.end()
        return plan

    def advance(self, num_offers: int = 0, num_ready: int = 0) -> int:
        """A step without requests, and then every rank hears what all have reported. All ranks call it, as often.
        Returns how many of so many offers all could take, where this rank could take those that are ready."""
        if num_offers or self._has_storage:  # not for a look-up behind a launch: answers wait
            self.learn()
        self.step()
        own = _Told(tuple(self._untold), self._last_job, num_offers, num_ready, time.monotonic())
        told: list[_Told] = list(self._ranks.exchange(own))
        self._untold = []
        if len({(len(rank.reports), rank.last_job, rank.num_offers) for rank in told}) > 1:
            steps = [(rank.reports[-1].step, rank.last_job, rank.num_offers) for rank in told]
            raise KVConnectorError(f"ranks have not scheduled alike: their last steps, jobs and offers are {steps}")
        self.clock.told(told[0].seconds)
        for reports in zip(*(rank.reports for rank in told), strict=True):
            self.scheduler.update_connector_output(reports)
        if self._metrics is not None:
            self._metrics.show(self.scheduler.get_kv_connector_stats(), self.scheduler.metrics.histograms)
        return min(rank.num_ready for rank in told)

    def finish(self, requests: Iterable[Request]) -> None:
        """These hold no device blocks any more."""
        for request in requests:
            self.scheduler.request_finished(request)
