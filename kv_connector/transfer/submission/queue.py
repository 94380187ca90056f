"""Submission queues: where copies of a direction wait until they are submitted, and the thread that empties them.

    model-runner thread  -- submit_save: position, put --> queue --> parts in turn --> driver
                         -- submit_load: position, first group -------------------------^
                                                             ^
    submitting thread    -- help, wait, help, wait, ... -----+       each queue has its own

Submitting is what takes long: microseconds for each chunk, milliseconds for a gigabyte. So the model-runner thread, the
one that launches the model, leaves copies in a queue and goes on. A queue hands them to the driver part by part, first
in first out, but for the loads that a step waits for, which go to the front; its lock says who does so now, and owns
the direction's stream, the paths' side of it and what a submission is filled with. Neither direction waits for the
other: they have a link and copy engines each, and loads go first where both want multiprocessors (`Priority`).

The thread paces. What the driver has taken in and the device has not begun fills the driver's queues, in which the
model's kernels wait too; when they are full the driver keeps everybody waiting, with a lock of its own: 7 to 10 ms
without a kernel of the model's whenever a save began (H200, vLLM 0.25.1). So before the thread submits a part, the
device has reached what the part comes behind, and has ended all but the last part in front of it: two at most are under
way, the one that is copied and the one that comes next, which is what keeps the link busy.

    asleep       the queue is empty; `wake` ends it
    submitting   a part, with the lock
    waiting      on the host, for an event that the device has not reached; without a lock, and without Python's

When it has waited, anything may have happened: somebody else has submitted the part, the submission has ended, another
one is in front. So it asks anew what is next, and remembers nothing but the event, which nobody records again
(`Lane.position`, `Lane.end`). The device needs no thread of ours for what it holds, so the event comes; or the device
is lost, and waiting for the event says so. `close` waits for that as well.

The thread only helps, and nobody waits for it. Whoever needs a copy submitted, because a step waits for it or a fence
does, submits it, and what is in front of it, at once and without pacing: it waits for one part at most that the thread
is at, and for no event. Neither does the thread pace what a step waits for. The GIL can keep the thread from running
for long: whenever it lets go of it, it may get it back 5 ms later, a hundred times a part (a gigabyte took 0.63 s
beside a thread that never left Python: H200, 2026-11-23). So once a step, where the thread has made no progress since
the last one, the model-runner thread waits for the part that it is at, which gives it the GIL; or submits one, where
the thread is at none and the device has nothing left to do for this queue: otherwise the link is busy anyway.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

import torch

from ..cuda.allocations import index_of
from ..cuda.driver import prepare_thread
from ..cuda.streams import Event, HostEvent, Lane
from ..paths.base import BlockCopy, CopyPath
from .submissions import Part, Submission

logger = logging.getLogger("kv_connector.transfer")

MOST_UNDER_WAY = 2
"""Parts of a queue that the device has not ended, where the thread submits: see above."""


class SubmissionQueue:
    """One direction's copies that are still to be submitted. Any thread may call."""

    def __init__(self, lane: Lane, paths: Sequence[CopyPath], bytes_of: Callable[[range], int]) -> None:
        """A part that fails on one of `paths` is tried on the next, and so is what follows it. `bytes_of` gives those
        that a block has in some regions."""
        self.lane = lane
        self.paths = tuple(paths)
        self._bytes_of = bytes_of
        # Plain locks, taken by `with` alone: a signal's handler that raises leaves neither of them owned.
        self._next = threading.Lock()  # of whoever needs a copy submitted, from before it waits for the other
        self._lock = threading.Lock()
        self._waiting: deque[Submission] = deque()
        self._ends: deque[Event] = deque(maxlen=MOST_UNDER_WAY)  # of the parts that were submitted last
        self._seen: tuple[Submission, int] | None = None  # at the front a step ago, with so many parts submitted

    @property
    def is_empty(self) -> bool:
        """Whether everything is submitted."""
        return not self._waiting

    def put(self, submission: Submission) -> None:
        """Take it in, behind the others."""
        self._waiting.append(submission)

    def put_first(self, submission: Submission) -> None:
        """Take it in, in front of the others, and submit its first part."""
        with self._next, self._lock:
            self._waiting.appendleft(submission)
            self._advance(submission)

    def advance(self) -> bool:
        """Submit the next part of the first in the queue; False where there is none. A copy that fails is over, and
        nothing is raised."""
        with self._next, self._lock:
            if not self._waiting:
                return False
            self._advance(self._waiting[0])
            return True

    def help(self) -> Event | None:
        """Submit the next part if the device is ready for it, behind all who wait for their turn: for a thread that
        only helps. Else, what it has to wait for, with no lock, before it asks again.

        A lock goes to whoever comes first, which is the thread that has just let go of it, back for the next part: a
        step's load waited until a gigabyte was submitted, 2 ms for pieces of 16 KiB and 6 for such of 4 (H200,
        2026-11-23).
        """
        with self._next:
            pass
        with self._lock:
            if not self._waiting:
                return None
            front = self._waiting[0]
            event = None if front.is_awaited else self._still_to_come(MOST_UNDER_WAY - 1)
            if event is None:
                self._advance(front)
            return event

    def finish(self, submission: Submission) -> None:
        """Submit it, and what is in front of it: it has an `end` on return."""
        while submission.end is None and self.advance():
            pass

    def catch_up(self) -> None:
        """Let a copy get on that has made no progress since the last call: wait for the part that the thread is at, or
        submit one if the device has nothing else of this queue to do and is ready for it. Once a step."""
        seen, self._seen = self._seen, self._progress()
        if seen is None or seen != self._seen:
            return
        with self._next, self._lock:
            if self._progress() == seen and self._still_to_come(0) is None:
                self._advance(self._waiting[0])
            self._seen = self._progress()

    def _progress(self) -> tuple[Submission, int] | None:
        """None where nothing is queued."""
        try:
            front = self._waiting[0]
        except IndexError:  # asking first whether there is one would let another thread end it
            return None
        return front, len(front.events)

    def _still_to_come(self, num_beside: int) -> Event | None:
        """What the device has to reach before there are at most so many parts beside the next one, and it may begin
        with that; None where it has. The caller has the lock, and something is queued."""
        ends = islice(self._ends, max(0, len(self._ends) - num_beside))
        try:
            events = self._waiting[0].next_part().after, *ends
            return next((event for event in events if event is not None and not event.query()), None)
        except RuntimeError:  # the device is lost: who submits finds out, and ends what is queued
            return None

    def _advance(self, submission: Submission) -> None:
        """The caller has the lock, and this is the first in the queue."""
        try:
            with self.lane.on_device():
                self._submit_part(submission, submission.next_part())
        except Exception as error:  # noqa: BLE001 - as below; a thread must not end by it, nor the model's.
            _log_failure(submission, "its stream", error)
            self._give_up(submission)
        if submission.end is not None:
            self._waiting.popleft()

    def _submit_part(self, submission: Submission, part: Part) -> None:
        if part.after is not None:
            part.after.wait(self.lane.stream)
        if submission.start is None:
            submission.start = self.lane.mark(self.lane.stream)
        while not self._copy(submission, self.paths[submission.num_paths_failed], part):
            submission.num_paths_failed += 1
            if submission.num_paths_failed == len(self.paths):
                self._give_up(submission)
                return
        submission.add_part(len(part.pairs) * self._bytes_of(part.regions), self._mark_end())
        if submission.is_whole:
            submission.end = submission.events[-1]

    def _mark_end(self) -> Event:
        self._ends.append(self.lane.end())
        return self._ends[-1]

    def _give_up(self, submission: Submission) -> None:
        """It has failed, and ends with what was enqueued for it."""
        submission.ok = False
        try:
            submission.end = self._mark_end()
        except RuntimeError:  # the device is lost: nothing runs there any more
            submission.end = HostEvent()

    def _copy(self, submission: Submission, path: CopyPath, part: Part) -> bool:
        is_first_of_many = not submission.events and len(submission.groups) > 1
        regions, pairs, _ = part
        copy = BlockCopy(
            submission.direction,
            regions,
            pairs.device_ids,
            pairs.host_ids,
            self.lane.stream,
            submission.is_urgent or is_first_of_many,
            submission.refusals,
            submission.is_awaited,
        )
        try:
            path.copy(copy)
        except Exception as error:  # noqa: BLE001 - the seam to paths and driver: whatever they raise is a miss, not a crash.
            _log_failure(submission, type(path).__name__, error)
            return False
        return True


class Submitter(Protocol):
    """Whoever empties a queue."""

    def wake(self) -> None:
        """There is something in the queue. Called by the model-runner thread; never blocks."""

    def close(self) -> None:
        """Leave the queue alone from now on. Idempotent."""


class SubmittingNow:
    """Empties a queue at once, on the calling thread: for the CPU, where submitting is copying."""

    def __init__(self, queue: SubmissionQueue) -> None:
        self._queue = queue

    def wake(self) -> None:
        """See `Submitter.wake`; the queue is empty on return."""
        while self._queue.advance():
            pass

    def close(self) -> None:
        """See `Submitter.close`."""


class SubmittingThread:
    """Empties a queue as fast as the device gets on, on a daemon thread of its own, which sleeps while it is empty."""

    def __init__(self, queue: SubmissionQueue, device: torch.device) -> None:
        """`device` is that of the queue's copies."""
        self._queue = queue
        self._device = device
        self._wake = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv-connector-submit", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """See `Submitter.wake`."""
        self._wake.set()

    def close(self) -> None:
        """See `Submitter.close`. Waits for the part that it is at, or for the device to reach what it waits for."""
        self._is_closed = True
        self._wake.set()
        if threading.current_thread() is not self._thread:  # else the garbage collector has called from there
            self._thread.join()

    def _run(self) -> None:
        try:
            prepare_thread(index_of(self._device))
            while not self._is_closed:
                self._wake.wait()
                self._wake.clear()
                while not (self._is_closed or self._queue.is_empty):
                    self._help()
            self._queue.lane.wait_idle()  # paths may go with this thread, and with them what copies use
        except Exception as error:  # noqa: BLE001 - a thread's top: the model-runner thread submits what it leaves.
            logger.warning("copies are submitted by the model-runner thread from now on: %s", error)

    def _help(self) -> None:
        event = self._queue.help()
        if event is None:
            return
        try:
            event.synchronize()
        except RuntimeError:  # the device is lost, and with it what is queued
            self._queue.advance()


def make_submitter(queue: SubmissionQueue, device: torch.device) -> Submitter:
    """For a queue of copies to or from `device`."""
    return SubmittingThread(queue, device) if device.type == "cuda" else SubmittingNow(queue)


def _log_failure(submission: Submission, where: str, error: Exception) -> None:
    ids = [job.job_id for job in submission.jobs]
    way = submission.direction.value
    logger.warning("%s of jobs %s failed on %s: %s: %s", way, ids, where, type(error).__name__, error)
