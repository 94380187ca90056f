"""Storage jobs of one rank: begun with a step's plan, found to have ended when the step is reported."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..types import StorageAction, StorageJob
from .base import GroupedStorage


@dataclass(frozen=True, slots=True)
class EndedStorageJob:
    """`ok`: it was carried out. `found`: of a lookup, see `StepReport`. `missing`: of a fetch or a backup, the
    host blocks that were not moved all the same; where no block was, it was not carried out. `seconds`: how long it
    took, from when it was handed to the backend."""

    job_id: int
    ok: bool
    found: int | None = None
    missing: tuple[int, ...] = ()
    seconds: float = field(default=0.0, compare=False)


@dataclass(slots=True)
class _Running:
    job: StorageJob
    future: Future[Any]
    begun_at: float
    ended_at: float = 0.0

    def note_end(self, future: Future[Any]) -> None:
        """On whichever of the backend's threads, at about the time in which the future is seen to be done."""
        self.ended_at = time.perf_counter()

    @property
    def seconds(self) -> float:
        return (self.ended_at or time.perf_counter()) - self.begun_at


_UNWANTED = memoryview(bytearray())


class StorageJobs:
    """Moves blocks between `storage` and host memory. Called from the model-runner thread; only `close` blocks."""

    def __init__(self, storage: GroupedStorage, blocks: NDArray[np.uint8]) -> None:
        """`blocks`: the host pool, of shape (num_blocks, block_bytes)."""
        self._storage = storage
        self._blocks = blocks
        self._running: dict[int, _Running] = {}

    def begin(self, job: StorageJob) -> None:
        """Hand a job to the backend, whose threads read or write its host blocks until it has ended."""
        begun_at = time.perf_counter()
        keys = job.split_keys()
        future: Future[Any]
        if job.action is StorageAction.LOOK_UP:
            future = self._storage.which(keys) if job.singly else self._storage.exists(keys)
        else:
            wanted = (memoryview(self._blocks[block_id]) for block_id in job.host_ids.tolist())
            skipped = frozenset(job.skipped)
            buffers = [_UNWANTED if place in skipped else next(wanted) for place in range(len(keys))]
            move = self._storage.read if job.action is StorageAction.FETCH else self._storage.write
            future = move(keys, buffers, job.singly)
        self._running[job.job_id] = running = _Running(job, future, begun_at)
        future.add_done_callback(running.note_end)

    def cancel(self, job_ids: Iterable[int]) -> None:
        """Call off those of these jobs that the backend has not begun: they end as failed."""
        for job_id in job_ids:
            if job_id in self._running:
                self._running[job_id].future.cancel()

    def poll(self) -> list[EndedStorageJob]:
        """Those that have ended since the last call."""
        ended = []
        for running in [entry for entry in self._running.values() if entry.future.done()]:
            job, future, seconds = running.job, running.future, running.seconds
            del self._running[job.job_id]
            if future.cancelled():
                ended.append(EndedStorageJob(job.job_id, False))
            elif job.action is StorageAction.LOOK_UP:
                found = _bits(future.result()) if job.singly else (1 << future.result()) - 1
                ended.append(EndedStorageJob(job.job_id, True, found, seconds=seconds))
            else:
                skipped = frozenset(job.skipped)
                moved = [is_moved for place, is_moved in enumerate(future.result()) if place not in skipped]
                pairs = zip(job.host_ids.tolist(), moved, strict=True)
                missing = tuple(block_id for block_id, is_moved in pairs if not is_moved)
                ended.append(EndedStorageJob(job.job_id, len(missing) < job.num_blocks, None, missing, seconds))
        return ended

    @property
    def group_blocks(self) -> int:
        """See `GroupedStorage`."""
        return self._storage.group_blocks

    def counters(self) -> tuple[tuple[str, float], ...]:
        """What the backend has counted."""
        return tuple(self._storage.stats().items())

    def close(self) -> None:
        """Wait for what is under way, then close the backend."""
        self._storage.close()


class AnotherRanksJobs:
    """Storage jobs that another rank does, which has the same host memory: here they end at once."""

    group_blocks = 1

    def __init__(self) -> None:
        self._ended: list[EndedStorageJob] = []

    def begin(self, job: StorageJob) -> None:
        """See `StorageJobs.begin`."""
        self._ended.append(EndedStorageJob(job.job_id, True))

    def cancel(self, job_ids: Iterable[int]) -> None:
        """None is under way."""

    def poll(self) -> list[EndedStorageJob]:
        """See `StorageJobs.poll`."""
        ended, self._ended = self._ended, []
        return ended

    def counters(self) -> tuple[tuple[str, float], ...]:
        """The other rank has them."""
        return ()

    def close(self) -> None:
        """Nothing is held."""


def _bits(there: Sequence[bool]) -> int:
    """Bit i is `there[i]`."""
    return sum(1 << place for place, is_there in enumerate(there) if is_there)
