"""The transfer engine: submits loads and saves beside the forward pass, and reports which have ended.

    compute stream  -- submit_load --- wait_layer(0) --- wait_layer(n) ---- submit_save ------->
                            |               ^                 ^                 |
    load stream             +-> group 0 -> event, group 1 -> event              |
    save stream                                                                 +-> copy -> event

Loads run in groups of layers, one event each: the compute stream waits for a layer's group, the host for nothing. A
load in the background moves whole blocks, the longest pieces there are, as a save does; a long one is cut into slices
of blocks, whose events say how far it is.
Threading model: the model-runner thread, the one that launches the model, makes every call; progress is `poll`. It
hands the driver no more than the first group of a load that a step waits for, or all of one that is urgent. All else is
queued and submitted by a thread for each direction, no faster than the device gets on (`submission/queue.py`), or by
this one, and at once, where it must be on the device's streams before it goes on: a layer or a step waits for it, a
fence, `drain` or `close` does. On the CPU everything is copied on submission, by the caller.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from ..config import Config
from ..errors import ConfigError, TransferError
from ..types import CopyJob, Direction, LoadTiming
from .costs.curves import BUILT_IN, MOST_LAUNCHED_BYTES, LinkCosts
from .cuda.streams import Event, Priority, make_lane
from .memory.host_form import HostForm
from .memory.host_pool import HostPool
from .memory.layout import last_group, layer_groups
from .paths.base import CopyPath
from .paths.choice import make_path
from .submission.open_jobs import OpenJobs, ids_of
from .submission.queue import SubmissionQueue, Submitter, make_submitter
from .submission.submissions import BlockPairs, Completion, Part, Submission, block_parts, layer_parts
from .submission.timing import LoadTrace, LoadTraces

logger = logging.getLogger("kv_connector.transfer")


class TransferEngine:
    """Copies jobs between device blocks and those of `host`, which has them in `form`, on a stream for each direction.

    Each submitted job is returned by `poll` exactly once, done or failed, and only after everything that was enqueued
    for it has completed, so that a job's end frees its blocks.
    """

    def __init__(
        self,
        form: HostForm,
        host: HostPool,
        config: Config,
        path: CopyPath | None = None,
        fallback: CopyPath | None = None,
        costs: LinkCosts = BUILT_IN,
    ) -> None:
        """`path` replaces the one that `config.copy_path` names; a load that fails on it is retried on `fallback`.
        `costs` are those of this machine, by which paths are chosen and layer groups cut.

        Raises ConfigError where pool or path do not fit.
        """
        if host.block_bytes != form.block_bytes:
            raise ConfigError(
                f"host pool has blocks of {host.block_bytes} bytes and the form of {form.block_bytes}: "
                "make the pool with form.block_bytes"
            )
        layout = form.layout
        self._form = form
        self._jobs = OpenJobs(form, host)
        path = path if path is not None else make_path(form, host, config, costs)
        self._group_bytes = config.layer_group_bytes or costs.group_bytes
        # Rows that DMA still moves, for groups that come early, and those that it moves well.
        self._row_bytes = min(costs.rows_at(0.8), self._group_bytes), costs.rows_at(0.92)
        self._groups: dict[int, tuple[range, ...]] = {}  # of loads, by the logarithm of their blocks
        self._slice_blocks = {way: max(1, path.slice_bytes(way) // form.moved_bytes) for way in Direction}
        lanes = [make_lane(layout.device, priority, timing=True) for priority in (Priority.LOAD, Priority.SAVE)]
        load_paths = (path,) if fallback is None else (path, fallback)
        self._queues = {
            Direction.LOAD: SubmissionQueue(lanes[0], load_paths, form.bytes_of),
            Direction.SAVE: SubmissionQueue(lanes[1], (path,), form.bytes_of),
        }
        self._submitters = {way: make_submitter(queue, layout.device) for way, queue in self._queues.items()}
        # Who drops the engine without `close` must not take staging memory away from copies that still run.
        weakref.finalize(self, _end_copies, tuple(self._submitters.values()), tuple(self._queues.values()))
        self._in_flight: list[Submission] = []
        self._load: Submission | None = None
        # The stream that waits for the last load, and for how many of its regions.
        self._waiting: tuple[Any, int] = None, 0
        self._traces = LoadTraces(lanes[0]) if config.trace_loads else None

    def submit_load(self, jobs: Sequence[CopyJob], is_urgent: bool = False) -> frozenset[int]:
        """Copy a step's loads, merged; call it before the forward pass. The model waits for the first layer group, and
        with `is_urgent` for all of them (`BlockCopy.urgent`): they are copied so, unless they are very many bytes.

        Device blocks are written behind the current stream's position. Host blocks may be read at once: what is to be
        loaded must have been saved by then, which is when `poll` or `drain` has returned the save's job.

        Returns the ids of the jobs that are known to have failed: their device blocks hold nothing valid. `poll`
        reports them too. A job with a wrong block id fails alone; an error while copying fails all of the call. Such an
        error may come later, as groups behind the first are submitted: `wait_layer` and `wait_all` tell.
        Raises InvalidBlockError, before anything is copied, for a job id that `poll` has still to return.
        """
        failed, moving, device_ids, host_ids = self._jobs.take_in(Direction.LOAD, jobs)
        if not moving:
            return failed
        queue = self._queues[Direction.LOAD]
        groups = self._layer_groups(len(host_ids))
        parts = layer_parts(groups, BlockPairs(device_ids, host_ids), queue.lane.position())
        self._waiting = None, 0
        self._load = load = self._begin(Direction.LOAD, moving, parts, groups, is_urgent)
        queue.put_first(load)
        if load.is_urgent:
            queue.finish(load)  # else the link rests until the thread gets the GIL, or the model asks for a layer
        if load.end is None:
            self._submitters[Direction.LOAD].wake()
        if self._traces is not None and load.start is not None and not load.is_lost:
            self._traces.begin(LoadTrace(load.start, load.events))
        return failed | self._take_lost_load()

    def mark(self) -> Event:
        """The current stream's position, for background loads that need not wait for what is enqueued behind it."""
        lane = self._queues[Direction.LOAD].lane
        return lane.position() or lane.mark()  # a thread waits for it on the host, where there is one

    def submit_background_load(self, jobs: Sequence[CopyJob], after: Event) -> frozenset[int]:
        """Queue loads, one behind the other; whoever needs the blocks waits for `poll` to return the job, or
        calls `wait_jobs`.

        They wait for nothing, but for each job's guarded blocks, which come behind `after`, a result of `mark`.
        Returns the ids of jobs with wrong block ids; `poll` alone tells of what fails later. Raises as `submit_load`.
        """
        failed, moving, device_ids, host_ids = self._jobs.take_in(Direction.LOAD, jobs)
        start = 0
        for job in moving:
            own = slice(start, start + job.num_blocks)
            self._put(Direction.LOAD, [job], BlockPairs(device_ids[own], host_ids[own]), job.num_guarded, after)
            start = own.stop
        self._submitters[Direction.LOAD].wake()
        return failed

    def wait_jobs(self, job_ids: Collection[int]) -> frozenset[int]:
        """Make the current stream wait for those of these jobs that are in flight, without blocking the host.

        Returns those that are known to have failed: their device blocks hold nothing valid.
        """
        lost = frozenset[int]()
        current = self._current()
        for submission in self._in_flight:
            if any(job.job_id in job_ids for job in submission.jobs):
                self._end_of(submission).wait(current)
                if submission.is_lost:
                    lost |= ids_of(submission.jobs)
        return lost

    def fence(self) -> None:
        """Make the current stream and later loads wait for every copy under way; the host goes on."""
        streams = self._current(), self._queues[Direction.LOAD].lane.stream
        for submission in self._in_flight:
            end = self._end_of(submission)
            for stream in streams:
                end.wait(stream)

    def submit_save(self, jobs: Sequence[CopyJob]) -> frozenset[int]:
        """Queue a step's saves, merged, after the current stream's position; call it after the forward pass.

        The link moves both ways at once, each at 0.81 of its rate alone or more, by the size of pieces (0.814 to 0.945,
        H200, `copies_h200.json`): waiting for the loads under way would cost a save their whole time to win them 19 %
        at most. Their kernels have a higher stream priority, and `save_bandwidth` bounds what is planned. Errors and
        result are those of `submit_background_load`.
        """
        failed, moving, device_ids, host_ids = self._jobs.take_in(Direction.SAVE, jobs)
        if moving:
            position = self._queues[Direction.SAVE].lane.position()
            self._put(Direction.SAVE, moving, BlockPairs(device_ids, host_ids), len(host_ids), position)
            self._submitters[Direction.SAVE].wake()
        return failed

    def catch_up(self) -> None:
        """Let each direction's copies get on where they have made no progress since the last call. Once a step; waits
        at most for the part that a thread is at."""
        for queue in self._queues.values():
            queue.catch_up()

    def wait_layer(self, layer_name: str) -> frozenset[int]:
        """Make the current stream wait until the layer's bytes of the last load are there; the host goes on.

        Does nothing for an unknown layer, and where no load is under way. Returns the ids of the load's jobs where it
        turns out that they have failed, once: see `submit_load`.
        """
        load, region = self._load, self._form.layout.last_region(layer_name)
        if load is None or region < 0:
            return frozenset()
        return self._wait_region(load, region)

    def wait_all(self) -> frozenset[int]:
        """Make the current stream wait for every layer of the last load; the host goes on. Result as `wait_layer`."""
        if self._load is None:
            return frozenset()
        return self._wait_region(self._load, self._load.groups[-1].stop - 1)

    def poll(self) -> list[Completion]:
        """The jobs that have ended since the last call; never blocks."""
        for submission in [entry for entry in self._in_flight if entry.has_ended()]:
            self._retire(submission)
        return self._jobs.report()

    def pending_bytes(self, direction: Direction) -> int:
        """Bytes of jobs that are under way, paddings left out, as far as they are not known to have arrived; never
        blocks. Layer groups of a load that have arrived do not count, nor do slices of a long copy."""
        return sum(entry.pending_bytes() for entry in self._in_flight if entry.direction is direction)

    def drain(self) -> list[Completion]:
        """Block the calling thread until every job has ended; returns what `poll` would."""
        self._synchronize()
        return self.poll()

    def take_load_timings(self) -> tuple[LoadTiming, ...]:
        """Timings of the loads that have ended since the last call, in order; empty without `config.trace_loads`."""
        return self._traces.take() if self._traces is not None else ()

    def close(self) -> None:
        """Block until no copy runs, then release the path's buffers. Idempotent.

        `poll` still returns what had not been reported; jobs submitted from now on fail.
        """
        if not self._jobs.is_closed:
            self._synchronize()
            self._jobs.close()
            for submitter in self._submitters.values():
                submitter.close()
            for path in self._queues[Direction.LOAD].paths:  # those of saves are among them
                path.close()

    def _put(
        self, direction: Direction, jobs: Sequence[CopyJob], pairs: BlockPairs, num_guarded: int, after: Event | None
    ) -> None:
        """Queue whole blocks, the last `num_guarded` behind `after`; the caller wakes the submitter."""
        whole = range(len(self._form.layout.regions))
        parts = block_parts(whole, pairs, self._slice_blocks[direction], num_guarded, after)
        self._queues[direction].put(self._begin(direction, jobs, parts))

    def _begin(
        self,
        direction: Direction,
        jobs: Sequence[CopyJob],
        parts: Iterable[Part],
        groups: tuple[range, ...] = (),
        is_urgent: bool = False,
    ) -> Submission:
        """In flight from here on, and the caller queues it: in `groups` of layers, which a step waits for, or else in
        slices of blocks."""
        num_bytes = sum(job.num_blocks for job in jobs) * self._form.moved_bytes
        is_awaited = bool(groups)
        is_urgent = is_urgent and num_bytes <= MOST_LAUNCHED_BYTES
        groups = groups or (range(len(self._form.layout.regions)),)
        submission = Submission(direction, jobs, groups, num_bytes, iter(parts), is_awaited, is_urgent)
        self._in_flight.append(submission)
        return submission

    def _layer_groups(self, num_blocks: int) -> tuple[range, ...]:
        """Those of the next power of two: the model waits for the first one, and most loads have had their like."""
        key = (num_blocks - 1).bit_length()
        groups = self._groups.get(key)
        if groups is None:
            stops, moved = self._form.layout.layer_stops, self._form.stored_bytes
            groups = layer_groups(stops, moved, 1 << key, self._group_bytes, *self._row_bytes)
            self._groups[key] = groups
        return groups

    def _current(self) -> Any:
        """The current stream, which torch finds sooner where the device is named."""
        return self._queues[Direction.LOAD].lane.current()

    def _end_of(self, submission: Submission) -> Event:
        self._queues[submission.direction].finish(submission)
        assert submission.end is not None, "a submission in flight is queued until it is submitted"
        return submission.end

    def _wait_region(self, load: Submission, region: int) -> frozenset[int]:
        """For the layer group that the region is of."""
        current = self._current()
        if load.ok and region < self._waiting[1] and self._waiting[0] == current:
            return frozenset()  # as for most layers, and some ask twice
        queue, group = self._queues[Direction.LOAD], last_group(load.groups, region)
        while len(load.events) <= group and load.end is None and queue.advance():
            pass
        if load.is_lost:
            return self._take_lost_load()
        if self._traces is not None:
            self._traces.wait(group, current)
        else:
            load.events[group].wait(current)
            self._waiting = current, load.groups[group].stop
        return frozenset()

    def _take_lost_load(self) -> frozenset[int]:
        """Ids of the last load's jobs if it has failed; it is forgotten then."""
        load = self._load
        if load is None or not load.is_lost:
            return frozenset()
        # Blocks of a failed load are computed anew, and what was enqueued must not overwrite that.
        self._end_of(load).wait(self._current())
        self._load = None
        if self._traces is not None:
            self._traces.drop(load.events)
        return ids_of(load.jobs)

    def _retire(self, submission: Submission) -> None:
        self._in_flight.remove(submission)
        start, end, events = submission.start, submission.end, submission.events
        assert end is not None
        milliseconds = start.elapsed_time(end) if submission.ok and start is not None else 0.0
        self._jobs.end(submission.jobs, submission.ok, milliseconds, submission.refused() if submission.ok else ())
        if submission is self._load:
            self._load = None  # all of it is there: no layer has to wait any more
        is_traced = self._traces is not None and self._traces.end(events)
        if submission.ok and start is not None and not is_traced:
            self._queues[submission.direction].lane.recycle([start])

    def _synchronize(self) -> None:
        for submission in list(self._in_flight):
            end = self._end_of(submission)
            try:
                end.synchronize()
            except RuntimeError as error:
                logger.warning("%s failed on the device: %s", submission.direction.value, error)
                submission.ok = False
            self._retire(submission)


def _end_copies(submitters: Sequence[Submitter], queues: Sequence[SubmissionQueue]) -> None:
    """Submit nothing more, and wait for what was: the finalizer of an engine, on whichever thread lets go of it."""
    for submitter in submitters:
        submitter.close()
    for queue in queues:
        try:
            queue.lane.wait_idle()
        except TransferError as error:  # the device is lost, and with it what ran there
            logger.warning("copies of a transfer engine that was dropped failed: %s", error)
