"""What must hold in a simulated world, and the exception that says what did not.

`JobBook` follows every job of an engine from its plan to the last rank's report, by what crosses the two halves alone,
and looks at each byte that moves: nothing is copied for a job that has ended, and nothing that is leased is written by
others.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kv_connector.types import CopyJob, Direction, PeerAction, PeerJob, StepPlan, StepReport, StorageJob

if TYPE_CHECKING:
    from kv_connector.transfer.paths.base import BlockCopy

    from .pool import BlockPool


class Violation(Exception):
    """`kind`: what claim it breaks ("token", "stuck", "leak", "lease", "job", "pool", "check", "events",
    "crash")."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind = kind
        self.text = text

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(slots=True, eq=False)
class _OpenJob:
    job: CopyJob | StorageJob | PeerJob
    step: int
    landed: set[tuple[int, int]] = field(default_factory=set)  # ranks and device blocks whose bytes have moved
    reported: set[int] = field(default_factory=set)  # ranks whose report says that it has ended
    taken_in: set[int] = field(default_factory=set)  # ranks whose report the scheduler half has
    has_failed: bool = False
    is_pinned: bool = True
    num_rows: Mapping[int, int] = field(default_factory=dict)  # by block that an end lies in: rows that it needs


class JobBook:
    """Jobs under way of one engine."""

    def __init__(self, num_ranks: int, pool: BlockPool) -> None:
        self.open: dict[int, _OpenJob] = {}
        self.num_jobs = 0
        self._num_ranks = num_ranks
        self._pool = pool
        self._loads: dict[int, list[_OpenJob]] = {}  # by device block
        self._saves: dict[int, list[_OpenJob]] = {}
        self._sends: dict[int, list[_OpenJob]] = {}
        self._receives: dict[int, list[_OpenJob]] = {}
        self.met: Counter[str] = Counter()

    def planned(self, plan: StepPlan, num_rows: Mapping[int, int]) -> None:
        """The scheduler half has made this plan. `num_rows`: of blocks that it was told prompts end inside of."""
        if plan.unfit and plan.saves:
            raise Violation("saves", f"step {plan.step} saves, and too much did not fit")
        for job in (*plan.loads, *plan.background_loads, *plan.saves, *plan.storage, *plan.peer):
            if job.job_id in self.open:
                raise Violation("job", f"job {job.job_id} is planned twice")
            self.num_jobs += 1
            entry = self.open[job.job_id] = _OpenJob(job, plan.step, num_rows=num_rows)
            for block in self._device_blocks(job):
                if self._pool.pins[block] == 0:
                    raise Violation("lease", f"job {job.job_id} uses device block {block}, which nobody has pinned")
                self._by_block(job).setdefault(block, []).append(entry)

    def reported(self, rank: int, report: StepReport, invalid: Collection[int] = ()) -> None:
        """A rank has made this report."""
        for job_id in (*report.done, *report.failed):
            entry = self.open.get(job_id)
            if entry is None:
                raise Violation("job", f"rank {rank} reports job {job_id}, which is not under way")
            if rank in entry.reported:
                raise Violation("job", f"rank {rank} reports job {job_id} twice")
            entry.reported.add(rank)
            entry.has_failed |= job_id in report.failed
        for block in invalid:
            for entry in self._loads.get(block, ()):
                entry.has_failed = True

    def taken_in(self, report: StepReport) -> None:
        """The scheduler half takes in this report, now."""
        for job_id in (*report.done, *report.failed):
            entry = self.open[job_id]
            entry.taken_in.add(report.rank)
            if len(entry.taken_in) == self._num_ranks:
                del self.open[job_id]
                self._count_ended(entry)
                for block in self._device_blocks(entry.job):
                    entries = self._by_block(entry.job)[block]
                    entries.remove(entry)
                    if not entries:
                        del self._by_block(entry.job)[block]

    def copied(self, rank: int, copy: BlockCopy) -> None:
        """Bytes move on this rank's device, now."""
        is_load = copy.direction is Direction.LOAD
        by_block = self._loads if is_load else self._saves
        for block in copy.device_ids.tolist():
            entries = [entry for entry in by_block.get(block, ()) if rank not in entry.reported]
            if not entries:
                way = "into" if is_load else "from"
                raise Violation("lease", f"rank {rank} copies {way} device block {block} for no job under way")
            for entry in entries:
                entry.landed.add((rank, block))

    def arrived(self, rank: int, blocks: Sequence[int]) -> None:
        """Another engine's copies have written to these device blocks of the rank, now."""
        for block in blocks:
            entries = [entry for entry in self._receives.get(block, ()) if rank not in entry.reported]
            if not entries:
                raise Violation("lease", f"rank {rank}: another engine writes to device block {block} for no job")
            for entry in entries:
                entry.landed.add((rank, block))

    def written(self, rank: int, block: int, step: int, row: int) -> None:
        """The model writes to the block on this rank, in this step, now, from this row on. A fence guards what is
        pinned no more, and nobody uses what a job has brought that failed on some rank, nor rows behind an end."""
        what = f"step {step} writes on rank {rank} to device block {block}"
        for entry in self._loads.get(block, ()):
            if entry.is_pinned and (rank, block) in entry.landed and not entry.has_failed:
                raise Violation("lease", f"{what}, which job {entry.job.job_id} has filled")
        for entry in self._receives.get(block, ()):
            if (rank, block) in entry.landed and not entry.has_failed:
                raise Violation("lease", f"{what}, which job {entry.job.job_id} has received")
        for entry in self._saves.get(block, ()):
            is_waiting = (rank, block) not in entry.landed and rank not in entry.reported
            is_behind = row >= entry.num_rows.get(block, sys.maxsize)
            if entry.is_pinned and is_waiting and step > entry.step and not (entry.has_failed or is_behind):
                raise Violation("lease", f"{what}, which job {entry.job.job_id} will save")

    def freed(self, blocks: Sequence[int]) -> None:
        """The connector gives up its hold of these blocks; of a job under way it may, where the engine is idle."""
        for entry in self._loads.get(blocks[0], []) + self._saves.get(blocks[0], []) if blocks else ():
            if entry.is_pinned and self._device_blocks(entry.job) == list(blocks):
                entry.is_pinned = False
                return

    def has_loads(self) -> bool:
        return bool(self._loads)

    def has_saves(self) -> bool:
        return bool(self._saves)

    def has_sends(self) -> bool:
        return bool(self._sends)

    def has_receives(self) -> bool:
        return bool(self._receives)

    def has_storage_jobs(self) -> bool:
        return any(isinstance(entry.job, StorageJob) for entry in self.open.values())

    def _count_ended(self, entry: _OpenJob) -> None:
        job = entry.job
        if isinstance(job, StorageJob) or (isinstance(job, PeerJob) and job.num_blocks):
            self.met[f"{job.action.value} {'failed' if entry.has_failed else 'done'}"] += 1

    @staticmethod
    def _device_blocks(job: CopyJob | StorageJob | PeerJob) -> list[int]:
        blocks: list[int] = [] if isinstance(job, StorageJob) else job.device_ids.tolist()
        return blocks

    def _by_block(self, job: CopyJob | StorageJob | PeerJob) -> dict[int, list[_OpenJob]]:
        if isinstance(job, PeerJob):
            return self._sends if job.action is PeerAction.SEND else self._receives
        return self._loads if isinstance(job, CopyJob) and job.direction is Direction.LOAD else self._saves
