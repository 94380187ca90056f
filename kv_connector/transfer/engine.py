"""Loads and saves beside the forward pass: what was asked for, what is under way, what has ended.

    compute stream  -- submit_load --- wait_layer(0) --- wait_layer(n) ---- submit_save ------->
                            |               ^                 ^                 |
    load stream             +-> group 0 -> event, group 1 -> event              |
    save stream                                                                 +-> copy -> event

Loads run in groups of layers, one event each: the compute stream waits for a layer's group, the host for nothing. A
load in the background moves whole blocks, the longest pieces there are, as a save does; a long one is cut into slices
of blocks, whose events say how far it is.
Threading model: no thread of its own. One thread, the one that launches the model, makes every call; progress is
`poll`. On the CPU everything is copied on submission.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from ..config import Config
from ..errors import ConfigError, InvalidBlockError, TransferError
from ..types import CopyJob, Direction, LoadTiming
from .checks import check_job, merged_ids
from .costs import BUILT_IN, LinkCosts
from .host_pool import HostPool
from .layout import CacheLayout, last_group
from .paths import CopyPath, make_path
from .streams import Event, Lane, make_lane
from .submissions import BlockPairs, Completion, Submission
from .timing import LoadTrace, LoadTraces

logger = logging.getLogger("kv_connector.transfer")


class TransferEngine:
    """Copies jobs between the device blocks of `layout` and the blocks of `host`, on a stream for each direction.

    Each submitted job is returned by `poll` exactly once, done or failed, and only after everything that was enqueued
    for it has completed, so that a job's end frees its blocks.
    """

    def __init__(
        self,
        layout: CacheLayout,
        host: HostPool,
        config: Config,
        path: CopyPath | None = None,
        fallback: CopyPath | None = None,
        costs: LinkCosts = BUILT_IN,
    ) -> None:
        """`path` replaces the one that `config.copy_path` names; a load that fails on it is tried on `fallback`.

        `costs` are those of this machine: by them paths are chosen and layer groups cut.

        Raises ConfigError where pool or path do not fit.
        """
        if host.block_bytes != layout.block_bytes:
            raise ConfigError(
                f"host pool has blocks of {host.block_bytes} bytes and the layout of {layout.block_bytes}: "
                "make the pool with layout.block_bytes"
            )
        self._layout = layout
        self._host = host
        self._whole: tuple[range, ...] = (range(len(layout.regions)),)
        self._path = path if path is not None else make_path(layout, host, config, costs)
        self._group_bytes = config.layer_group_bytes or costs.group_bytes
        # Rows that DMA still moves, for groups that come early, and those that it moves well.
        self._row_bytes = min(costs.rows_at(0.8), self._group_bytes), costs.rows_at(0.92)
        self._fallback = fallback
        self._lanes = {
            Direction.LOAD: make_lane(layout.device, priority=-1, timing=True),
            Direction.SAVE: make_lane(layout.device, priority=0, timing=True),
        }
        self._in_flight: list[Submission] = []
        self._finished: list[Completion] = []
        self._unreported: set[int] = set()
        self._load: Submission | None = None
        self._traces = LoadTraces(self._lanes[Direction.LOAD]) if config.trace_loads else None
        self._closed = False

    def submit_load(self, jobs: Sequence[CopyJob]) -> frozenset[int]:
        """Enqueue a step's loads, merged, after the current stream's position; call it before the forward pass.

        Returns the ids of the jobs that are known to have failed: their device blocks hold nothing valid. `poll`
        reports them too. A job with a wrong block id fails alone; an error while copying fails all of the call.
        Raises InvalidBlockError, before anything is enqueued, for a job id that `poll` has still to return.
        """
        return self._submit(Direction.LOAD, jobs)

    def mark(self) -> Event:
        """The current stream's position, for background loads that need not wait for what is enqueued behind it."""
        return self._lanes[Direction.LOAD].mark()

    def submit_background_load(self, jobs: Sequence[CopyJob], after: Event) -> frozenset[int]:
        """Enqueue loads one behind the other; whoever needs the blocks waits for `poll` to return the job, or calls
        `wait_jobs`.

        They run at once, but for each job's guarded blocks, which come behind `after`, a result of `mark` that is taken
        back. Errors and result are those of `submit_load`.
        """
        failed = frozenset().union(*(self._submit(Direction.LOAD, [job], after) for job in jobs))
        self._lanes[Direction.LOAD].recycle([after])
        return failed

    def wait_jobs(self, job_ids: Collection[int]) -> None:
        """Make the current stream wait for those of these jobs that are under way; the host goes on."""
        for submission in self._in_flight:
            if any(job.job_id in job_ids for job in submission.jobs):
                assert submission.end is not None
                submission.end.wait()

    def fence(self) -> None:
        """Make the current stream and later loads wait for every copy under way; the host goes on."""
        for submission in self._in_flight:
            assert submission.end is not None
            submission.end.wait()
            submission.end.wait(self._lanes[Direction.LOAD].stream)

    def submit_save(self, jobs: Sequence[CopyJob]) -> frozenset[int]:
        """Enqueue a step's saves, merged, after the current stream's position; call it after the forward pass.

        The link moves both ways at once, each at 0.91 of its rate alone (H200, 2026-11-21): waiting for the loads under
        way would cost a save their whole time to win them 9 %. Their kernels have a higher stream priority, and
        `save_bandwidth` bounds what is planned. Errors and result are those of `submit_load`.
        """
        return self._submit(Direction.SAVE, jobs)

    def wait_layer(self, layer_name: str) -> None:
        """Make the current stream wait until the layer's bytes of the last load are there; the host goes on.

        Returns at once for an unknown layer, and where no load is under way or the load failed on submission.
        """
        region = self._layout.last_region(layer_name)
        if self._load is not None and region >= 0:
            self._wait_group(self._load, last_group(self._load.groups, region))

    def wait_all(self) -> None:
        """Make the current stream wait for every layer of the last load; the host goes on."""
        if self._load is not None:
            self._wait_group(self._load, len(self._load.groups) - 1)

    def poll(self) -> list[Completion]:
        """The jobs that have ended since the last call; never blocks."""
        for submission in [entry for entry in self._in_flight if entry.has_ended()]:
            self._retire(submission)
        finished, self._finished = self._finished, []
        self._unreported.difference_update(completion.job_id for completion in finished)
        return finished

    def pending_bytes(self, direction: Direction) -> int:
        """Bytes of jobs that are under way, paddings left out, as far as they are not known to have arrived; never
        blocks. Layer groups of a load that have arrived do not count, nor do slices of a long copy."""
        return sum(entry.pending_bytes() for entry in self._in_flight if entry.direction is direction)

    def drain(self) -> list[Completion]:
        """Block the host until every job has ended; returns what `poll` would."""
        self._synchronize()
        return self.poll()

    def take_load_timings(self) -> tuple[LoadTiming, ...]:
        """Timings of the loads that have ended since the last call, in order; empty without `config.trace_loads`."""
        return self._traces.take() if self._traces is not None else ()

    def close(self) -> None:
        """Block until no copy runs, then release the path's buffers. Idempotent.

        `poll` still returns what had not been reported; jobs submitted from now on fail.
        """
        if not self._closed:
            self._synchronize()
            self._closed = True
            self._path.close()
            if self._fallback is not None:
                self._fallback.close()

    def _submit(self, direction: Direction, jobs: Sequence[CopyJob], after: Event | None = None) -> frozenset[int]:
        """`after` makes it a load in the background."""
        self._take_ids(jobs)
        valid, failed = jobs, frozenset[int]()
        pairs = self._pairs(direction, jobs, after)
        if pairs is None:
            valid = self._valid_jobs(direction, jobs)
            failed = frozenset(job.job_id for job in jobs) - {job.job_id for job in valid}
            pairs = self._pairs(direction, valid, after)
        moving = [job for job in valid if job.num_blocks]
        if len(moving) < len(jobs):
            for job in jobs:
                if job.job_id in failed or job.num_blocks == 0:
                    self._finish(job, ok=job.job_id not in failed)
        if moving and pairs is not None and not self._enqueue(direction, moving, pairs):
            failed |= {job.job_id for job in moving}
        return failed

    def _take_ids(self, jobs: Sequence[CopyJob]) -> None:
        new = {job.job_id for job in jobs}
        if len(new) < len(jobs) or not new.isdisjoint(self._unreported):
            # Failing it would end the other job of this id, and its leases, while that one's copy runs.
            twice = [job.job_id for i, job in enumerate(jobs) if job.job_id in {other.job_id for other in jobs[:i]}]
            name = next(iter(new & self._unreported), None)
            name = twice[0] if name is None else name
            raise InvalidBlockError(f"job id {name} is in flight: it names one job until that is reported")
        self._unreported |= new

    def _pairs(self, direction: Direction, jobs: Sequence[CopyJob], after: Event | None) -> BlockPairs | None:
        """All blocks of these jobs, None if one has to be refused; of one job in the background with an `after`."""
        if self._closed or not jobs:
            return None
        ids = merged_ids(jobs, direction, self._layout.num_blocks, self._host.num_ready_blocks)
        return None if ids is None else BlockPairs(*ids, 0 if after is None else jobs[0].num_guarded, after)

    def _valid_jobs(self, direction: Direction, jobs: Sequence[CopyJob]) -> list[CopyJob]:
        num_device, num_host = self._layout.num_blocks, self._host.num_ready_blocks
        taken = np.zeros(num_device if direction is Direction.LOAD else num_host, dtype=np.bool_)
        valid = []
        for job in jobs:
            try:
                if self._closed:
                    raise TransferError("the transfer engine is closed")
                check_job(job, direction, num_device, num_host, taken)
            except (InvalidBlockError, TransferError) as error:
                logger.warning("%s job %d failed: %s", direction.value, job.job_id, error)
            else:
                valid.append(job)
        return valid

    def _enqueue(self, direction: Direction, jobs: Sequence[CopyJob], pairs: BlockPairs) -> bool:
        groups, after = self._whole, pairs.after
        if direction is Direction.LOAD and after is None:
            groups = self._layout.layer_groups(len(pairs), self._group_bytes, *self._row_bytes)
        lane = self._lanes[direction]
        with lane.running(after_current=after is None):
            submission = Submission(direction, jobs, groups, lane.mark(lane.stream))
            submission.ok = self._copy(submission, self._path, pairs, lane)
            if not submission.ok and direction is Direction.LOAD and self._fallback is not None:
                submission.ok = self._copy(submission, self._fallback, pairs, lane)
            submission.end = submission.events[-1] if submission.ok else lane.mark(lane.stream)
        self._in_flight.append(submission)
        if direction is Direction.LOAD and after is None:
            self._take_load(submission)
        return submission.ok

    def _copy(self, submission: Submission, path: CopyPath, pairs: BlockPairs, lane: Lane) -> bool:
        submission.begin()
        try:
            for i, (group, part) in enumerate(self._parts(submission, pairs)):
                first_of_many = i == 0 and len(submission.groups) > 1
                for device_ids, host_ids, after in part.in_order():
                    if after is not None:
                        after.wait(lane.stream)
                    path.copy(submission.direction, group, device_ids, host_ids, urgent=first_of_many)
                submission.add_part(len(part) * self._layout.bytes_of(group), lane.mark(lane.stream))
        except Exception as error:  # noqa: BLE001 - the seam to paths and driver: whatever they raise is a miss, not a crash.
            ids = [job.job_id for job in submission.jobs]
            way, name = submission.direction.value, type(path).__name__
            logger.warning("%s of jobs %s failed on %s: %s: %s", way, ids, name, type(error).__name__, error)
            return False
        return True

    def _parts(self, submission: Submission, pairs: BlockPairs) -> Iterator[tuple[range, BlockPairs]]:
        """What gets an event of its own: layer groups, as layers wait for them, or else slices of whole blocks."""
        if submission.groups is not self._whole:
            return ((group, pairs) for group in submission.groups)
        return ((self._whole[0], part) for part in pairs.slices(self._layout.piece_bytes))

    def _take_load(self, submission: Submission) -> None:
        if not submission.ok:
            # Blocks of a failed load are computed anew, and what was enqueued must not overwrite that.
            assert submission.end is not None
            submission.end.wait()
            return
        self._load = submission
        if self._traces is not None:
            self._traces.begin(LoadTrace(submission.start, submission.events))

    def _wait_group(self, load: Submission, group: int) -> None:
        if self._traces is None:
            load.events[group].wait()
        else:
            self._traces.wait(group)

    def _retire(self, submission: Submission) -> None:
        self._in_flight.remove(submission)
        end, events = submission.end, submission.events
        assert end is not None
        milliseconds = submission.start.elapsed_time(end) if submission.ok else 0.0
        for job in submission.jobs:
            self._finish(job, submission.ok, milliseconds)
            milliseconds = 0.0
        if submission is self._load:
            self._load = None  # all of it is there: no layer has to wait any more
        if self._traces is None or not self._traces.end(events):
            self._lanes[submission.direction].recycle([submission.start, *events, *([] if end in events else [end])])

    def _finish(self, job: CopyJob, ok: bool, milliseconds: float = 0.0) -> None:
        num_bytes = job.num_blocks * self._layout.piece_bytes if ok else 0
        self._finished.append(Completion(job.job_id, ok, num_bytes, job.direction, milliseconds))

    def _synchronize(self) -> None:
        for submission in list(self._in_flight):
            assert submission.end is not None
            try:
                submission.end.synchronize()
            except RuntimeError as error:
                logger.warning("%s failed on the device: %s", submission.direction.value, error)
                submission.ok = False
            self._retire(submission)
